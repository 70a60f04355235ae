-- ARGV: endpoint, the CANCELLED result, then ids. Returns an outcome per id.
local outcomes, ended, must_stop = {}, {}, false
for i = 3, #ARGV do
  local id = ARGV[i]
  local state, submitter = unpack(redis.call('HMGET', TASK .. id, 'state', 'submitter'))
  local outcome = 'unknown'
  if state == 'queued' then
    finish(id, state, submitter or '', ARGV[2])
    ended[#ended + 1] = id
    outcome = 'removed'
  elseif state == 'leased' then
    redis.call('SADD', STOPS, id)
    outcome = 'requested'
    must_stop = true
  elseif state == 'done' then
    outcome = 'finished'
  end
  outcomes[#outcomes + 1] = outcome
end
let_go(ended)
if must_stop then wake_owner(ARGV[1]) end
return outcomes
