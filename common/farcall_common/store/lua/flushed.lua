-- ARGV: seconds to live, then ids. What stays is a marker that keeps a late enqueue or restore from running them again.
-- Results mostly reach the database in the order of the outbox: then one call removes them all.
local is_next = true
for i, id in ipairs(redis.call('LRANGE', OUTBOX, 0, #ARGV - 2)) do
  is_next = is_next and id == ARGV[i + 1]
end
if is_next then redis.call('LTRIM', OUTBOX, #ARGV - 1, -1) end
for i = 2, #ARGV do
  local id = ARGV[i]
  if not is_next then redis.call('LREM', OUTBOX, 1, id) end
  local state, submitter = unpack(redis.call('HMGET', TASK .. id, 'state', 'submitter'))
  if state == 'done' then
    count_bytes(submitter or '', 0 - redis.call('HSTRLEN', TASK .. id, 'task'))
    redis.call('DEL', TASK .. id)  -- a hash that once had a long value stays large when it is deleted from
    redis.call('HSET', TASK .. id, 'state', 'done')
    redis.call('EXPIRE', TASK .. id, ARGV[1])
  end
end
book_bytes()
