-- ARGV: fence.
require_claim(ARGV[1])
redis.call('HSET', OWNER, 'epoch', ARGV[1])
