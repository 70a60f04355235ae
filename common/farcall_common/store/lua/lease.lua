-- ARGV: fence, now, deadline, limit. Returns (task, attempt, enqueued at, stop requested) per task.
require_owner(ARGV[1])
local ids = redis.call('RPOP', QUEUE, ARGV[4]) or {}
if #ids == 0 then return ids end
local may_stop = redis.call('EXISTS', STOPS) == 1
local leased, deadlines = {}, {}
for i, id in ipairs(ids) do
  local task = redis.call('HMGET', TASK .. id, 'task', 'attempt', 'enqueued_at')
  local attempt = tonumber(task[2]) + 1
  redis.call('HSET', TASK .. id, 'state', 'leased', 'attempt', attempt, 'leased_at', ARGV[2])
  leased[i] = {task[1], attempt, task[3], may_stop and redis.call('SISMEMBER', STOPS, id) or 0}
  deadlines[2 * i - 1], deadlines[2 * i] = ARGV[3], id
end
redis.call('ZADD', LEASES, unpack(deadlines))
return leased
