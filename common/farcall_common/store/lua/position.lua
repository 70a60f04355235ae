-- ARGV: id. Returns the state of the task ('' if it is not here), how many tasks of its lane leave before it, how many
-- tasks wait, of how many submitters, and the most leased tasks of its submitter if it has so many, else 0.
local state = redis.call('HGET', TASK .. ARGV[1], 'state') or ''
local ahead, most = 0, 0
if state == 'queued' then
  local submitter = submitter_of(ARGV[1])
  local list = QUEUE .. submitter
  if tonumber(redis.call('ZSCORE', ROUND, submitter) or 0) >= PARKED then most = limit_of('m', submitter) or 0 end
  local at = redis.call('LPOS', list, ARGV[1], 'RANK', -1)
  ahead = at and redis.call('LLEN', list) - 1 - at or 0
end
local submitters = 0
for _, submitter in ipairs(redis.call('ZRANGE', ROUND, 0, -1)) do
  local owner = owner_of(submitter)
  if owner == submitter or not redis.call('ZSCORE', ROUND, owner) then submitters = submitters + 1 end
end
return {state, ahead, tonumber(redis.call('HGET', COUNTS, 'waiting') or 0), submitters, most}
