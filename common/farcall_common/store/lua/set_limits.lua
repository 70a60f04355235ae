-- ARGV: endpoint, 1 if these are all limits of the endpoint, then (submitter, most leased tasks or '', weight or '') per
-- submitter.
if redis.call('HEXISTS', OWNER, 'deleted') == 1 or (#ARGV == 2 and redis.call('EXISTS', LIMITS) == 0) then return end
if ARGV[2] == '1' then redis.call('DEL', LIMITS) end
for i = 3, #ARGV, 3 do
  for name, value in pairs({m = ARGV[i + 1], w = ARGV[i + 2]}) do
    if value == '' then
      redis.call('HDEL', LIMITS, name .. ':' .. ARGV[i])
    else
      redis.call('HSET', LIMITS, name .. ':' .. ARGV[i], value)
    end
  end
end
local is_free, places = false, redis.call('ZRANGE', ROUND, 0, -1, 'WITHSCORES')
for i = 1, #places, 2 do
  local score = tonumber(places[i + 1])
  set_place(places[i], score % TURNS)
  is_free = is_free or (score >= PARKED and tonumber(redis.call('ZSCORE', ROUND, places[i])) < PARKED)
end
if is_free then wake_owner(ARGV[1]) end
