-- ARGV: member, ttl in seconds; the only key is a set of members by the time when each counts as gone. Returns 1 if the member
-- was not in it.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', NOW)
local is_new = redis.call('ZADD', KEYS[1], NOW + ARGV[2], ARGV[1])
local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')[2]
redis.call('PEXPIRE', KEYS[1], math.ceil(1000 * (last - NOW)))
return is_new
