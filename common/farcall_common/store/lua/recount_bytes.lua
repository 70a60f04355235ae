-- ARGV: tasks. Counts BYTES from the tasks that are here, if they are no more than so many: nothing else runs meanwhile.
-- Returns their payers.
local waiting = tonumber(redis.call('HGET', COUNTS, 'waiting') or 0)
if waiting + redis.call('ZCARD', LEASES) + redis.call('LLEN', OUTBOX) > tonumber(ARGV[1]) then return {} end
local found = {}
local function count(ids)
  for _, id in ipairs(ids) do
    local submitter = payer_of(submitter_of(id))
    found[submitter] = (found[submitter] or 0) + redis.call('HSTRLEN', TASK .. id, 'task')
  end
end
for _, submitter in ipairs(redis.call('ZRANGE', ROUND, 0, -1)) do
  count(redis.call('LRANGE', QUEUE .. submitter, 0, -1))
end
count(redis.call('ZRANGE', LEASES, 0, -1))
count(redis.call('LRANGE', OUTBOX, 0, -1))
redis.call('DEL', BYTES)
local submitters = {}
for submitter, size in pairs(found) do
  count_bytes(submitter, size)
  if submitter ~= '' then submitters[#submitters + 1] = submitter end
end
book_bytes()
return submitters
