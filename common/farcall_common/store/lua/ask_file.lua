-- ARGV: a request for a piece of a file of this endpoint. Publishes it to the owner; returns how many have received it: 1,
-- or 0 if there is no owner, or one that knows no such requests.
local owner = redis.call('HMGET', OWNER, 'forwarder', 'until')
if not owner[1] or tonumber(owner[2]) <= NOW then return 0 end
return redis.call('PUBLISH', 'files:' .. owner[1], ARGV[1])
