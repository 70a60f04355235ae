-- ARGV: seconds to live, then ids. What stays is a marker that keeps a late enqueue or restore from running them again.
for i = 2, #ARGV do
  local id = ARGV[i]
  redis.call('LREM', OUTBOX, 1, id)
  if redis.call('HGET', TASK .. id, 'state') == 'done' then
    redis.call('HDEL', TASK .. id, 'task', 'result')
    redis.call('EXPIRE', TASK .. id, ARGV[1])
  end
end
