-- ARGV: forwarder, until, now, spool. Returns the new fence, as text.
local held = redis.call('HMGET', OWNER, 'forwarder', 'until', 'spool')
local is_live = held[1] and tonumber(held[2]) > tonumber(ARGV[3])
if is_live and held[1] ~= ARGV[1] and (held[3] or '') ~= '' and held[3] ~= ARGV[4] then
  error({err = 'INUSE another agent is connected as this endpoint'})
end
-- The server's clock in microseconds keeps it rising when the previous fence was wiped. %.0f: all digits of a double.
local time = redis.call('TIME')
local clock = tonumber(time[1]) * 1000000 + tonumber(time[2])
local previous = tonumber(redis.call('HGET', OWNER, 'fence') or 0)
local fence = string.format('%.0f', math.max(previous + 1, clock))
redis.call('HSET', OWNER, 'fence', fence, 'forwarder', ARGV[1], 'until', ARGV[2], 'spool', ARGV[4])
return fence
