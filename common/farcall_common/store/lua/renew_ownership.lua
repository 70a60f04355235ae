-- ARGV: fence, forwarder, ttl in seconds, spool.
require_owner(ARGV[1])
redis.call('HSET', OWNER, 'forwarder', ARGV[2], 'until', NOW + ARGV[3], 'spool', ARGV[4])
