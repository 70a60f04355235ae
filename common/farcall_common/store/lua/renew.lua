-- ARGV: fence, seconds of a lease, then ids. Returns the ids that are not leased.
require_owner(ARGV[1])
local missing = {}
for i = 3, #ARGV do
  if redis.call('ZSCORE', LEASES, ARGV[i]) then
    redis.call('ZADD', LEASES, NOW + ARGV[2], ARGV[i])
  else
    missing[#missing + 1] = ARGV[i]
  end
end
return missing
