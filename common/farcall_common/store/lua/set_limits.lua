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
local is_free = false
for _, submitter in ipairs(redis.call('ZRANGE', ROUND, 0, -1)) do
  is_free = renew_place(submitter) or is_free
end
if is_free then wake_owner(ARGV[1]) end
