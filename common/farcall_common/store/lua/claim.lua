-- ARGV: forwarder, ttl in seconds, spool, then (submitter, weight) per submitter whose weight is not 1. Returns the new
-- fence, as text.
local held = redis.call('HMGET', OWNER, 'forwarder', 'until', 'spool')
local is_live = held[1] and tonumber(held[2]) > NOW
if is_live and held[1] ~= ARGV[1] and (held[3] or '') ~= '' and held[3] ~= ARGV[3] then
  error({err = 'INUSE another agent is connected as this endpoint'})
end
-- The server's clock in microseconds keeps it rising when the previous fence was wiped. %.0f: all digits of a double.
local server_time = redis.call('TIME')
local clock = tonumber(server_time[1]) * 1000000 + tonumber(server_time[2])
local previous = tonumber(redis.call('HGET', OWNER, 'fence') or 0)
local fence = string.format('%.0f', math.max(previous + 1, clock))
redis.call('HSET', OWNER, 'fence', fence, 'forwarder', ARGV[1], 'until', NOW + ARGV[2], 'spool', ARGV[3])
-- A turn that was given by an earlier weight stays until the submitter's next one.
redis.call('DEL', WEIGHTS)
if #ARGV > 3 then redis.call('HSET', WEIGHTS, unpack(ARGV, 4)) end
return fence
