-- ARGV: endpoint, seconds of a rescue lease, submitter, idempotent, max_attempts, attempt, then (id, task) per task.
-- Returns how many tasks wait.
if redis.call('HEXISTS', OWNER, 'deleted') == 1 then return 0 end
local submitter, attempt, waiting = ARGV[3], tonumber(ARGV[6]), {}
for i = 7, #ARGV, 2 do
  local id = ARGV[i]
  if redis.call('EXISTS', TASK .. id) == 0
    and add(ARGV[2], false, submitter, id, ARGV[i + 1], ARGV[4], ARGV[5], attempt) then
    waiting[#waiting + 1] = id
  end
end
if #waiting > 0 then
  redis.call('LPUSH', QUEUE .. submitter, unpack(waiting))
  count_waiting(submitter, #waiting)
end
book_bytes()
wake_owner(ARGV[1])
return tonumber(redis.call('HGET', COUNTS, 'waiting') or 0)
