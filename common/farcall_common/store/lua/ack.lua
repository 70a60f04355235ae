-- ARGV: fence, then (id, result) per task. The first result of a task that is here counts.
require_owner(ARGV[1])
local ended = {}
for i = 2, #ARGV, 2 do
  local id = ARGV[i]
  local state, submitter = unpack(redis.call('HMGET', TASK .. id, 'state', 'submitter'))
  if state and state ~= 'done' then
    finish(id, state, submitter or '', ARGV[i + 1])
    ended[#ended + 1] = id
  end
end
let_go(ended)
