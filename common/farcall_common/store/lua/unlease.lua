-- ARGV: fence, then ids, oldest first.
require_owner(ARGV[1])
local back = {}
for i = 2, #ARGV do
  if redis.call('ZSCORE', LEASES, ARGV[i]) then
    redis.call('HINCRBY', TASK .. ARGV[i], 'attempt', -1)
    back[#back + 1] = ARGV[i]
  end
end
put_back(back)
