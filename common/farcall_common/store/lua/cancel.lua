-- ARGV: now, the result that says cancelled, then ids. Returns the forwarder to wake, then an outcome per id.
local outcomes = {live_owner(ARGV[1])}
for i = 3, #ARGV do
  local id = ARGV[i]
  local state = redis.call('HGET', TASK .. id, 'state')
  local outcome = 'unknown'
  if state == 'queued' then
    finish(id, state, ARGV[2])
    outcome = 'removed'
  elseif state == 'leased' then
    redis.call('SADD', STOPS, id)
    outcome = 'requested'
  elseif state == 'done' then
    outcome = 'finished'
  end
  outcomes[#outcomes + 1] = outcome
end
return outcomes
