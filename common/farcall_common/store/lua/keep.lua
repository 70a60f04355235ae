-- ARGV: fence, forwarder, until.
require_owner(ARGV[1])
redis.call('HSET', OWNER, 'forwarder', ARGV[2], 'until', ARGV[3])
