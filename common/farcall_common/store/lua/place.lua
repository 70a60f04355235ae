-- ARGV: id. Returns the state of the task ('' if it is not here), how many tasks leave before it, how many wait.
local state = redis.call('HGET', TASK .. ARGV[1], 'state') or ''
local depth = redis.call('LLEN', QUEUE)
local at = state == 'queued' and redis.call('LPOS', QUEUE, ARGV[1], 'RANK', -1)
return {state, at and depth - 1 - at or 0, depth}
