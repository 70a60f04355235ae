-- ARGV: a request for output of tasks of this endpoint. Publishes it to the owner; returns 1 if there is one.
local owner = redis.call('HMGET', OWNER, 'forwarder', 'until')
if not owner[1] or tonumber(owner[2]) <= NOW then return 0 end
redis.call('PUBLISH', 'output:' .. owner[1], ARGV[1])
return 1
