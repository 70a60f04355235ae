-- ARGV: fence, now, deadline, limit. Returns (task, attempt, enqueued at, stop requested) per task.
require_owner(ARGV[1])
local leased = {}
for _, id in ipairs(redis.call('RPOP', QUEUE, ARGV[4]) or {}) do
  local attempt = redis.call('HINCRBY', TASK .. id, 'attempt', 1)
  redis.call('HSET', TASK .. id, 'state', 'leased', 'leased_at', ARGV[2])
  redis.call('ZADD', LEASES, ARGV[3], id)
  local task = redis.call('HMGET', TASK .. id, 'task', 'enqueued_at')
  leased[#leased + 1] = {task[1], attempt, task[2], redis.call('SISMEMBER', STOPS, id)}
end
return leased
