-- ARGV: tasks, the most that may wait. KEYS: how many tasks a submitter is about to queue at an endpoint, and its two lists
-- there. Reserves room for so many (fewer than 0: frees it), and returns -1; or how many wait, or are about to, if that
-- would be too many. A program that dies frees nothing: what is reserved is forgotten after a minute.
local count, reserved = tonumber(ARGV[1]), tonumber(redis.call('GET', KEYS[1]) or 0)
if count > 0 then
  local waiting = reserved + redis.call('LLEN', KEYS[2]) + redis.call('LLEN', KEYS[3])
  if waiting + count > tonumber(ARGV[2]) then return waiting end
end
if reserved + count > 0 then
  redis.call('SET', KEYS[1], reserved + count, 'EX', 60)
else
  redis.call('DEL', KEYS[1])
end
return -1
