-- ARGV: what the checkpoint is expected to be ('' for none), what it becomes; the only key is the checkpoint. Returns
-- whether it was as expected.
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
