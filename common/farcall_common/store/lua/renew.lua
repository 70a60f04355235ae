-- ARGV: fence, seconds of a lease, then ids; those that are not leased are left out.
require_owner(ARGV[1])
for i = 3, #ARGV do
  redis.call('ZADD', LEASES, 'XX', NOW + ARGV[2], ARGV[i])
end
