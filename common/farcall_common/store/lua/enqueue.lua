-- ARGV: now, rescue deadline, then (id, task, idempotent, max_attempts, attempt) per task.
-- Returns the forwarder to wake.
for i = 3, #ARGV, 5 do
  local id, task, idempotent, max_attempts, attempt = unpack(ARGV, i, i + 4)
  if redis.call('EXISTS', TASK .. id) == 0 then
    add(ARGV[1], ARGV[2], false, id, task, idempotent, max_attempts, tonumber(attempt))
  end
end
return live_owner(ARGV[1])
