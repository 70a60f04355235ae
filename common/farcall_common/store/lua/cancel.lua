-- ARGV: endpoint, now, the result that says cancelled, then ids. Returns an outcome per id.
local outcomes, ended, must_stop = {}, {}, false
for i = 4, #ARGV do
  local id = ARGV[i]
  local state = redis.call('HGET', TASK .. id, 'state')
  local outcome = 'unknown'
  if state == 'queued' then
    finish(id, state, ARGV[3])
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
if must_stop then wake_owner(ARGV[1], ARGV[2]) end
return outcomes
