-- ARGV: fence, limit. Returns (task, attempt, enqueued at, stop requested, leased at) per expired task that stays
-- leased.
require_owner(ARGV[1])
local again, ended = {}, {}
for _, id in ipairs(redis.call('ZRANGE', LEASES, '-inf', NOW, 'BYSCORE', 'LIMIT', 0, ARGV[2])) do
  local task, attempt, enqueued_at, leased_at, idempotent, max_attempts = unpack(
    redis.call('HMGET', TASK .. id, 'task', 'attempt', 'enqueued_at', 'leased_at', 'idempotent', 'max_attempts'))
  local stop = redis.call('SISMEMBER', STOPS, id)
  if stop == 0 and may_start_again(idempotent, max_attempts, tonumber(attempt)) then
    again[#again + 1] = id
  else
    ended[#ended + 1] = {task, tonumber(attempt), enqueued_at, stop, leased_at or enqueued_at}
  end
end
put_back(again)
return ended
