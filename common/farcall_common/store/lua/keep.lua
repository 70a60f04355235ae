-- ARGV: fence, forwarder, until, spool.
require_owner(ARGV[1])
redis.call('HSET', OWNER, 'forwarder', ARGV[2], 'until', ARGV[3], 'spool', ARGV[4])
