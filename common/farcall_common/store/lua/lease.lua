-- ARGV: fence, seconds of a lease, limit, reserve. Takes up to limit tasks, and then up to reserve more of submitters that
-- have fewer leased ones than their weight. Returns (task, attempt, enqueued at, stop requested, leased at) per task.
require_owner(ARGV[1])
local limit, reserve, ids = tonumber(ARGV[3]), tonumber(ARGV[4]), {}
while #ids < limit + reserve do
  local first = redis.call('ZRANGE', ROUND, 0, 1, 'WITHSCORES')
  local submitter, count = first[1], 1
  if not submitter or tonumber(first[2]) >= PARKED or (#ids >= limit and tonumber(first[2]) >= TURNS) then break end
  if #ids < limit then
    count = limit - #ids
    if first[4] and tonumber(first[4]) < PARKED then
      -- As many as bring it level with the next one.
      local level = math.floor(tonumber(first[4]) / TURNS)
      count = math.min(count, math.max(1, level * weight_of(submitter) - held_of(submitter)))
    end
  end
  count = math.min(count, room_of(submitter) or count)
  if count > 0 then
    local taken = redis.call('RPOP', QUEUE .. submitter, count) or {}
    for _, id in ipairs(taken) do ids[#ids + 1] = id end
    count_served(submitter, #taken)
  else  -- a script of another release gave it a place that its limit does not allow
    renew_place(submitter)
  end
end
if #ids == 0 then return ids end
local may_stop = redis.call('EXISTS', STOPS) == 1
local leased, deadlines = {}, {}
for i, id in ipairs(ids) do
  local task = redis.call('HMGET', TASK .. id, 'task', 'attempt', 'enqueued_at')
  local attempt = tonumber(task[2]) + 1
  redis.call('HSET', TASK .. id, 'state', 'leased', 'attempt', attempt, 'leased_at', NOW)
  leased[i] = {task[1], attempt, task[3], may_stop and redis.call('SISMEMBER', STOPS, id) or 0,
    string.format('%.6f', NOW)}
  deadlines[2 * i - 1], deadlines[2 * i] = NOW + ARGV[2], id
end
redis.call('ZADD', LEASES, unpack(deadlines))
return leased
