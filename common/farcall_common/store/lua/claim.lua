-- ARGV: forwarder, until. Returns the new fence, as text.
-- The server's clock in microseconds keeps it rising when the previous fence was wiped. %.0f: all digits of a double.
local time = redis.call('TIME')
local clock = tonumber(time[1]) * 1000000 + tonumber(time[2])
local previous = tonumber(redis.call('HGET', OWNER, 'fence') or 0)
local fence = string.format('%.0f', math.max(previous + 1, clock))
redis.call('HSET', OWNER, 'fence', fence, 'forwarder', ARGV[1], 'until', ARGV[2])
return fence
