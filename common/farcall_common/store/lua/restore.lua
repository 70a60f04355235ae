-- ARGV: fence, now, deadline, then (id, task, idempotent, max_attempts, attempt, held attempt or '') per task.
require_claim(ARGV[1])
for i = 4, #ARGV, 6 do
  local id, task, idempotent, max_attempts, attempt, held = unpack(ARGV, i, i + 5)
  local state = redis.call('HGET', TASK .. id, 'state')
  if not state then
    local waits = add(ARGV[2], ARGV[3], held ~= '', id, task, idempotent, max_attempts,
      math.max(tonumber(attempt), tonumber(held) or 0))
    if waits then redis.call('LPUSH', QUEUE, id) end
  elseif held ~= '' and state ~= 'done' then
    if state == 'queued' then redis.call('LREM', QUEUE, -1, id) end
    redis.call('ZADD', LEASES, ARGV[3], id)
    redis.call('HSET', TASK .. id, 'state', 'leased',
      'attempt', math.max(tonumber(redis.call('HGET', TASK .. id, 'attempt')), tonumber(held)))
  end
end
