-- Put before every other script. KEYS are those of one endpoint, in one slot by its {endpoint} hash tag.
--
--   OWNER   hash    fence, forwarder, until (who to wake, epoch seconds), spool (of the agent in its session; '' for
--                   none), epoch (present: no task is missing here), deleted (present: the endpoint was deleted)
--   QUEUE   prefix  a list per submitter: its waiting task ids; new ones enter at the head, the next is the tail
--   ROUND   zset    submitters with waiting tasks, by TURNS * (leased tasks / weight, rounded down) + turn: the first one
--                   is next. Max-min fairness, as farcall_common.fairness
--   HELD    hash    for each submitter with leased tasks: n:<submitter>, how many, and t:<submitter>, its last turn
--   WEIGHTS hash    weights by submitter, as the agent's configuration has them; 1 for others
--   LIMITS  hash    for each submitter with an allowance: m:<submitter>, the most leased tasks, and w:<submitter>, its
--                   weight, which replaces that of the agent's configuration
--   COUNTS  hash    waiting: tasks in all of QUEUE; turn: the last turn that was given. Gone when nothing waits or
--                   is leased
--   BYTES   hash    for each payer the bytes of all its tasks that are here
--   LEASES  zset    leased task ids by deadline, epoch seconds
--   STOPS   set     ids of tasks that someone asked to cancel after they were leased
--   OUTBOX  list    ids of ended tasks that may not have reached the database
--   TASK    prefix  a hash per task: state (queued, leased, done), task, idempotent, max_attempts, attempt,
--                   enqueued_at, leased_at, result, submitter
--
-- `time` is what the server's TIME answers. No caller's clock decides anything: callers give durations.
--
-- A task is queued if and only if it is in the list of its submitter, once; leased if and only if it is in LEASES.
--
-- Tasks of a submitter that have a latency target are in a lane of their own: QUEUE, ROUND, HELD and the tasks' hashes
-- name the submitter with LANE behind it, as if it were another one. WEIGHTS, LIMITS and BYTES name the submitter alone.
-- A service account is its creator here, the payer. At endpoints of its creator it is <payer>/<account>: BYTES name the
-- payer, WEIGHTS and LIMITS the account.
local OWNER, QUEUE, LEASES, STOPS, OUTBOX, TASK, ROUND, HELD, WEIGHTS, COUNTS, BYTES, LIMITS = unpack(KEYS)
local NOW = time[1] + time[2] / 1000000  -- epoch seconds
local TURNS = 2 ^ 32
local PARKED = 2 ^ 52  -- behind all levels: submitters that have as many leased tasks as they may have
local SERVED = 2 ^ 31  -- before turns of submitters that were served come those of newcomers, without leased tasks
local LANE = '!'  -- no id of an identity has it

-- The submitter alone, without LANE.
local function owner_of(submitter)
  return string.sub(submitter, -1) == LANE and string.sub(submitter, 1, -2) or submitter
end

local function payer_of(submitter)
  return string.match(owner_of(submitter), '^[^/]*')
end

local function identity_of(submitter)
  return string.match(owner_of(submitter), '[^/]*$')
end

local function other_lane(submitter)
  local owner = owner_of(submitter)
  return owner == submitter and owner .. LANE or owner
end

-- The caller was the last one to claim this endpoint.
local function require_claim(fence)
  local current, deleted = unpack(redis.call('HMGET', OWNER, 'fence', 'deleted'))
  if deleted then error({err = 'FENCED the endpoint was deleted'}) end
  if not current then error({err = 'DATALOST the endpoint has not been claimed'}) end
  if current ~= fence then error({err = 'FENCED the endpoint has a newer owner'}) end
end

-- In addition, the queue has every open task of the endpoint.
local function require_owner(fence)
  require_claim(fence)
  if redis.call('HEXISTS', OWNER, 'epoch') == 0 then error({err = 'DATALOST the queue is not restored'}) end
end

-- After `attempt` dispatches that came to nothing.
local function may_start_again(idempotent, max_attempts, attempt)
  return attempt == 0 or (idempotent == '1' and attempt < tonumber(max_attempts))
end

local is_limited = nil

-- A field of LIMITS, or nil. Asks for the key once, because most endpoints have none.
local function limit_of(name, submitter)
  if is_limited == nil then is_limited = redis.call('EXISTS', LIMITS) == 1 end
  return is_limited and tonumber(redis.call('HGET', LIMITS, name .. ':' .. identity_of(submitter)) or nil) or nil
end

local function weight_of(submitter)
  local weight = limit_of('w', submitter)
  if weight then return weight end
  return tonumber(redis.call('HGET', WEIGHTS, identity_of(submitter)) or 1)
end

local function held_of(submitter)
  return tonumber(redis.call('HGET', HELD, 'n:' .. submitter) or 0)
end

-- How many more tasks of a submitter may be leased, of both lanes together; nil if there is no limit.
local function room_of(submitter)
  local most = limit_of('m', submitter)
  return most and most - held_of(submitter) - held_of(other_lane(submitter))
end

local function set_place(submitter, turn)
  local room = room_of(submitter)
  local level = math.floor(held_of(submitter) / weight_of(submitter))
  local before = room and room <= 0 and PARKED or level * TURNS
  redis.call('ZADD', ROUND, string.format('%.0f', before + turn), submitter)
end

-- Give a submitter its place again, with the turn that it has. Returns whether it was parked and is not any more; nil if
-- nothing of it waits.
local function renew_place(submitter)
  local score = tonumber(redis.call('ZSCORE', ROUND, submitter) or nil)
  if not score then return nil end
  set_place(submitter, score % TURNS)
  return score >= PARKED and tonumber(redis.call('ZSCORE', ROUND, submitter)) < PARKED
end

local function forget_turns()
  if redis.call('EXISTS', ROUND, HELD) == 0 then redis.call('DEL', COUNTS) end
end

-- Wake the forwarder that owns the endpoint, if one does.
local function wake_owner(endpoint)
  local owner = redis.call('HMGET', OWNER, 'forwarder', 'until')
  if owner[1] and tonumber(owner[2]) > NOW then redis.call('PUBLISH', 'wake:' .. owner[1], endpoint) end
end

-- The number of leased tasks of a submitter changes. Its turn stays.
local function count_held(submitter, change)
  if redis.call('HINCRBY', HELD, 'n:' .. submitter, change) <= 0 then
    redis.call('HDEL', HELD, 'n:' .. submitter, 't:' .. submitter)
  end
  local is_free = renew_place(submitter)
  if is_free == nil then forget_turns() end
  if limit_of('m', submitter) then is_free = renew_place(other_lane(submitter)) or is_free end
  if is_free then wake_owner(string.match(OWNER, '{(.*)}')) end
end

-- The number of waiting tasks of a submitter changes; its list is changed already.
local function count_waiting(submitter, change)
  redis.call('HINCRBY', COUNTS, 'waiting', change)
  if redis.call('EXISTS', QUEUE .. submitter) == 0 then
    redis.call('ZREM', ROUND, submitter)
    forget_turns()
  elseif change > 0 and not redis.call('ZSCORE', ROUND, submitter) then
    local last = redis.call('HGET', HELD, 't:' .. submitter)
    set_place(submitter, last and tonumber(last) or redis.call('HINCRBY', COUNTS, 'turn', 1))
  end
end

-- A submitter had its turn: this many tasks of its list are leased now.
local function count_served(submitter, count)
  local turn = SERVED + redis.call('HINCRBY', COUNTS, 'turn', 1)
  redis.call('HSET', HELD, 't:' .. submitter, string.format('%.0f', turn))
  redis.call('HINCRBY', HELD, 'n:' .. submitter, count)
  redis.call('HINCRBY', COUNTS, 'waiting', -count)
  if redis.call('EXISTS', QUEUE .. submitter) == 1 then
    set_place(submitter, turn)
  else
    redis.call('ZREM', ROUND, submitter)
  end
  if limit_of('m', submitter) then renew_place(other_lane(submitter)) end
end

-- The memory of a submitter's tasks changes; book_bytes has to follow. In two parts, because a batch has few payers.
local changes = {}
local function count_bytes(submitter, change)
  local payer = payer_of(submitter)
  changes[payer] = (changes[payer] or 0) + change
end

local function book_bytes()
  for payer, change in pairs(changes) do
    if redis.call('HINCRBY', BYTES, payer, change) <= 0 then redis.call('HDEL', BYTES, payer) end
  end
end

-- The submitter of a task, or its lane.
local function submitter_of(id)
  return redis.call('HGET', TASK .. id, 'submitter') or ''
end

-- Hold a new task; book_bytes has to follow. It waits (true: the caller puts it into the list of its submitter), or is
-- leased because the endpoint has it (held), or so that reap finds it.
local function add(lease_s, held, submitter, id, task, idempotent, max_attempts, attempt)
  local waits = not held and may_start_again(idempotent, max_attempts, attempt)
  redis.call('HSET', TASK .. id, 'state', waits and 'queued' or 'leased', 'task', task, 'idempotent', idempotent,
    'max_attempts', max_attempts, 'attempt', attempt, 'enqueued_at', NOW, 'submitter', submitter)
  count_bytes(submitter, #task)
  if not waits then
    redis.call('ZADD', LEASES, NOW + lease_s, id)
    count_held(submitter, 1)
  end
  return waits
end

-- Ids in the order in which they should leave.
local function put_back(ids)
  for i = #ids, 1, -1 do
    local submitter = submitter_of(ids[i])
    redis.call('ZREM', LEASES, ids[i])
    redis.call('RPUSH', QUEUE .. submitter, ids[i])
    redis.call('HSET', TASK .. ids[i], 'state', 'queued')
    count_held(submitter, -1)
    count_waiting(submitter, 1)
  end
end

-- A task does not wait any more.
local function take_out(id, submitter)
  redis.call('LREM', QUEUE .. submitter, -1, id)
  count_waiting(submitter, -1)
end

-- End a task that is queued or leased; let_go has to follow. In two parts, because a batch lets go in a few calls.
local released = {}
local function finish(id, state, submitter, result)
  if state == 'queued' then
    take_out(id, submitter)
  else
    released[submitter] = (released[submitter] or 0) + 1
  end
  redis.call('HSET', TASK .. id, 'state', 'done', 'result', result)
end

-- These ended tasks are not leased any more; whether they are in the database is still to be seen.
local function let_go(ids)
  if #ids == 0 then return end
  for submitter, count in pairs(released) do count_held(submitter, -count) end
  redis.call('ZREM', LEASES, unpack(ids))
  redis.call('SREM', STOPS, unpack(ids))
  redis.call('RPUSH', OUTBOX, unpack(ids))
end
