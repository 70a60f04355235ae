-- ARGV: endpoint, now, rescue deadline, idempotent, max_attempts, attempt, then (id, task) per task. Returns how many
-- tasks wait.
local attempt, waiting = tonumber(ARGV[6]), {}
for i = 7, #ARGV, 2 do
  local id = ARGV[i]
  if redis.call('EXISTS', TASK .. id) == 0
    and add(ARGV[2], ARGV[3], false, id, ARGV[i + 1], ARGV[4], ARGV[5], attempt) then
    waiting[#waiting + 1] = id
  end
end
if #waiting > 0 then redis.call('LPUSH', QUEUE, unpack(waiting)) end
wake_owner(ARGV[1], ARGV[2])
return redis.call('LLEN', QUEUE)
