-- ARGV: endpoint, now, rescue deadline, then (id, task, idempotent, max_attempts, attempt) per task.
for i = 4, #ARGV, 5 do
  local id, task, idempotent, max_attempts, attempt = unpack(ARGV, i, i + 4)
  if redis.call('EXISTS', TASK .. id) == 0 then
    add(ARGV[2], ARGV[3], false, id, task, idempotent, max_attempts, tonumber(attempt))
  end
end
wake_owner(ARGV[1], ARGV[2])
