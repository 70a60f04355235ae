-- Put before every other script. KEYS are those of one endpoint, in one slot by its {endpoint} hash tag.
--
--   OWNER   hash    fence, forwarder, until (who to wake, epoch seconds), spool (of the agent that it hears; '' for
--                   none), epoch (present: no task is missing here)
--   QUEUE   list    waiting task ids; new ones enter at the head, the next to leave is the tail
--   LEASES  zset    leased task ids by deadline, epoch seconds
--   STOPS   set     ids of tasks that someone asked to cancel after they were leased
--   OUTBOX  list    ids of ended tasks that may not have reached the database
--   TASK    prefix  a hash per task: state (queued, leased, done), task, idempotent, max_attempts, attempt,
--                   enqueued_at, leased_at, result
--
-- A task is queued if and only if it is in QUEUE, once; leased if and only if it is in LEASES.
local OWNER, QUEUE, LEASES, STOPS, OUTBOX, TASK = unpack(KEYS)

-- The caller took this endpoint over, and nobody did after it.
local function require_claim(fence)
  local current = redis.call('HGET', OWNER, 'fence')
  if not current then error({err = 'DATALOST nobody has claimed the endpoint'}) end
  if current ~= fence then error({err = 'FENCED the endpoint has a newer owner'}) end
end

-- Besides, the queue has every open task of the endpoint.
local function require_owner(fence)
  require_claim(fence)
  if redis.call('HEXISTS', OWNER, 'epoch') == 0 then error({err = 'DATALOST the queue is not restored'}) end
end

-- After `attempt` dispatches that came to nothing.
local function may_start_again(idempotent, max_attempts, attempt)
  return attempt == 0 or (idempotent == '1' and attempt < tonumber(max_attempts))
end

-- Hold a new task. It waits (true: the caller puts it into QUEUE), or is leased because the endpoint has it (held), or
-- so that reap ends it.
local function add(now, deadline, held, id, task, idempotent, max_attempts, attempt)
  local waits = not held and may_start_again(idempotent, max_attempts, attempt)
  redis.call('HSET', TASK .. id, 'state', waits and 'queued' or 'leased', 'task', task, 'idempotent', idempotent,
    'max_attempts', max_attempts, 'attempt', attempt, 'enqueued_at', now)
  if not waits then redis.call('ZADD', LEASES, deadline, id) end
  return waits
end

-- Ids in the order in which they should leave.
local function put_back(ids)
  for i = #ids, 1, -1 do
    redis.call('ZREM', LEASES, ids[i])
    redis.call('RPUSH', QUEUE, ids[i])
    redis.call('HSET', TASK .. ids[i], 'state', 'queued')
  end
end

-- End a task that is queued or leased; let_go has to follow. In two parts, because a batch lets go in three calls.
local function finish(id, state, result)
  if state == 'queued' then redis.call('LREM', QUEUE, -1, id) end
  redis.call('HSET', TASK .. id, 'state', 'done', 'result', result)
end

-- Nobody leases these ended tasks any more; whether they are in the database is still to be seen.
local function let_go(ids)
  if #ids == 0 then return end
  redis.call('ZREM', LEASES, unpack(ids))
  redis.call('SREM', STOPS, unpack(ids))
  redis.call('RPUSH', OUTBOX, unpack(ids))
end

-- Tell the forwarder that owns the endpoint, if one does, to look into the queue.
local function wake_owner(endpoint, now)
  local owner = redis.call('HMGET', OWNER, 'forwarder', 'until')
  if owner[1] and tonumber(owner[2]) > tonumber(now) then redis.call('PUBLISH', 'wake:' .. owner[1], endpoint) end
end
