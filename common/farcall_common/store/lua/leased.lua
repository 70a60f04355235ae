-- ARGV: fence. Returns id, attempt, id, attempt, ...
require_owner(ARGV[1])
local found = {}
for _, id in ipairs(redis.call('ZRANGE', LEASES, 0, -1)) do
  found[#found + 1] = id
  found[#found + 1] = redis.call('HGET', TASK .. id, 'attempt')
end
return found
