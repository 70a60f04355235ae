-- ARGV: fence, forwarder, ttl in seconds, spool. Renews the ownership. Returns 1 if the endpoint needs maintenance: for a
-- result that may not have reached the database, a lease that has expired, or another owner; else 0.
local owner = redis.call('HMGET', OWNER, 'fence', 'epoch')
if owner[1] ~= ARGV[1] or not owner[2] then return 1 end
redis.call('HSET', OWNER, 'forwarder', ARGV[2], 'until', NOW + ARGV[3], 'spool', ARGV[4])
if redis.call('LLEN', OUTBOX) > 0 then return 1 end
return #redis.call('ZRANGE', LEASES, '-inf', NOW, 'BYSCORE', 'LIMIT', 0, 1)
