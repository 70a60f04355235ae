-- ARGV: fence, seconds of a lease, then (id, task, submitter, idempotent, max_attempts, attempt, held attempt or '') per task.
require_claim(ARGV[1])
for i = 3, #ARGV, 7 do
  local id, task, submitter, idempotent, max_attempts, attempt, held = unpack(ARGV, i, i + 6)
  local state = redis.call('HGET', TASK .. id, 'state')
  if not state then
    local waits = add(ARGV[2], held ~= '', submitter, id, task, idempotent, max_attempts,
      math.max(tonumber(attempt), tonumber(held) or 0))
    if waits then
      redis.call('LPUSH', QUEUE .. submitter, id)
      count_waiting(submitter, 1)
    end
  elseif held ~= '' and state ~= 'done' then
    if state == 'queued' then
      take_out(id, submitter_of(id))
      count_held(submitter_of(id), 1)
    end
    redis.call('ZADD', LEASES, NOW + ARGV[2], id)
    redis.call('HSET', TASK .. id, 'state', 'leased',
      'attempt', math.max(tonumber(redis.call('HGET', TASK .. id, 'attempt')), tonumber(held)))
  end
end
book_bytes()
