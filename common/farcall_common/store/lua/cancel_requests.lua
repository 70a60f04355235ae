-- ARGV: fence. Returns the ids that are leased and should stop.
require_owner(ARGV[1])
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', STOPS)) do
  if redis.call('ZSCORE', LEASES, id) then found[#found + 1] = id end
end
return found
