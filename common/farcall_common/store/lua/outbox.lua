-- ARGV: limit. Returns (id, task, result) per ended task, oldest first.
local found = {}
for _, id in ipairs(redis.call('LRANGE', OUTBOX, 0, ARGV[1] - 1)) do
  local ended = redis.call('HMGET', TASK .. id, 'task', 'result')
  found[#found + 1] = {id, ended[1], ended[2]}
end
return found
