-- ARGV: ids. Returns those that are not here: neither waiting, nor leased, nor ended a moment ago.
local missing = {}
for _, id in ipairs(ARGV) do
  if redis.call('EXISTS', TASK .. id) == 0 then missing[#missing + 1] = id end
end
return missing
