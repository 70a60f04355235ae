-- ARGV: fence, then (id, result) per task. Returns an outcome per task.
require_owner(ARGV[1])
local outcomes, ended = {}, {}
for i = 2, #ARGV, 2 do
  local id, result = ARGV[i], ARGV[i + 1]
  local state, submitter = unpack(redis.call('HMGET', TASK .. id, 'state', 'submitter'))
  local outcome = 'unknown'
  if state == 'done' then
    outcome = 'duplicate'
  elseif state then
    finish(id, state, submitter or '', result)
    ended[#ended + 1] = id
    outcome = 'first'
  end
  outcomes[#outcomes + 1] = outcome
end
let_go(ended)
return outcomes
