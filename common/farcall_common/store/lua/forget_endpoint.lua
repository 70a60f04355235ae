-- ARGV: ids, seconds. The endpoint was deleted: removes up to so many of its tasks, and remembers for so long that nothing
-- may be queued. Returns 1 if nothing is left.
redis.call('HSET', OWNER, 'deleted', 1)
redis.call('HDEL', OWNER, 'forwarder', 'until', 'spool', 'epoch')
redis.call('EXPIRE', OWNER, ARGV[2])
local left = tonumber(ARGV[1])
local function drop(ids)
  for _, id in ipairs(ids) do
    count_bytes(submitter_of(id), 0 - redis.call('HSTRLEN', TASK .. id, 'task'))
    redis.call('DEL', TASK .. id)
  end
  left = left - #ids
end
while left > 0 do
  local submitter = redis.call('ZRANGE', ROUND, 0, 0)[1]
  if not submitter then break end
  local ids = redis.call('RPOP', QUEUE .. submitter, left) or {}
  drop(ids)
  count_waiting(submitter, -#ids)
end
if left > 0 then
  local ids = redis.call('ZRANGE', LEASES, 0, left - 1)
  redis.call('ZREMRANGEBYRANK', LEASES, 0, left - 1)
  drop(ids)
end
if left > 0 then drop(redis.call('LPOP', OUTBOX, left) or {}) end
book_bytes()
if left <= 0 then return 0 end
redis.call('DEL', ROUND, HELD, WEIGHTS, COUNTS, BYTES, STOPS, LIMITS)
return 1
