-- ARGV: none; the only key is that of announce. Returns the members that are there.
return redis.call('ZRANGE', KEYS[1], '(' .. string.format('%.6f', NOW), '+inf', 'BYSCORE')
