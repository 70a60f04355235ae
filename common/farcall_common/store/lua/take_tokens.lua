-- ARGV: tokens wanted, rate per second, burst, whether all are taken although there are not as many (1 or 0); the only
-- key is that of a token bucket. Returns the tokens that are given, and the seconds until there is one if there was none.
-- Time never runs backwards here.
local wanted, rate, burst = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local bucket = redis.call('HMGET', KEYS[1], 'tokens', 'at')
local tokens, since = tonumber(bucket[1]) or burst, tonumber(bucket[2]) or NOW
local at = math.max(since, NOW)
tokens = math.min(burst, tokens + (at - since) * rate)
local given = ARGV[4] == '1' and wanted or math.max(0, math.min(wanted, math.floor(tokens)))
redis.call('HSET', KEYS[1], 'tokens', tokens - given, 'at', at)
-- By then it is full, as one that is not there.
redis.call('PEXPIRE', KEYS[1], math.ceil(1000 * (burst + math.max(0, given - tokens)) / rate) + 1000)
return {given, tostring(given > 0 and 0 or (1 - tokens) / rate)}
