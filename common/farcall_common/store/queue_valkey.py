"""Queue in Valkey: lists, a lease set and a hash per task, changed only by the scripts in ``lua/``.

All keys of an endpoint carry its id as hash tag, so that they share a slot and a script moves them in one step:

========================  ======  =====================================================================  =========
key                       type    content                                                                TTL
========================  ======  =====================================================================  =========
``own:{endpoint}``        hash    fence, forwarder, until, spool, epoch; deleted                         if deleted
``q:{endpoint}:<owner>``  list    waiting task ids of one submitter; ``<owner>!``: with latency target   none
``n:{endpoint}:<owner>``  string  for how many more tasks of a submitter room is reserved                  a minute
``r:{endpoint}``          zset    submitters with waiting tasks, in the order of their turns              none
``h:{endpoint}``          hash    leased tasks by submitter                                              none
``w:{endpoint}``          hash    weights of submitters                                                  none
``a:{endpoint}``          hash    limits and weights of submitters with an allowance                     none
``c:{endpoint}``          hash    waiting: how many tasks wait; turn: the last one given                 none
``b:{endpoint}``          hash    bytes of tasks by the identity whose quotas they use                   none
``l:{endpoint}``          zset    leased task ids by deadline                                            none
``x:{endpoint}``          set     leased tasks that should stop                                          none
``o:{endpoint}``          list    results that may not have reached the database                         none
``t:{endpoint}:<task>``   hash    the task, its state, attempt and result                                see below
``fwd:<forwarder>``       string  a live forwarder                                                       its own
``fwds``                  zset    forwarder ids by the time they count as dead                           none
``zap:<public key>``      string  subject of a CURVE key                                                 its own
``checkpoint:<name>``     string  how far the reconciler has come with the queue as it is                none
``at:<owner>``            set     endpoints where the queue has tasks of a submitter, or had                none
``rate:<bucket>``         hash    tokens, at: a token bucket as it was at a moment                       full again
``wake:<forwarder>``      channel endpoint ids with work or cancellations; lossy                         --
``watch:<owner>``         zset    forwarders where the owner's clients wait, by when that is over        its own
``results:<forwarder>``   channel results that other forwarders recorded; lossy                          --
``output:<forwarder>``    channel requests for output of tasks; lossy                                    --
``files:<forwarder>``     channel requests for files of other endpoints, and answers to its own; lossy   --
``output:<request>``      list    answers to such a request                                              seconds
========================  ======  =====================================================================  =========

A task hash has no TTL until the database has the task's result; then a marker without payload and result stays for
:data:`MARKER_TTL_S`. An eviction policy of ``volatile-*`` therefore never drops a task. Markers save work and keep
no promise: a second result of a task is refused by the database, which has the first.

**Losing everything.** A wipe takes ``own:{endpoint}`` with it. Its ``epoch`` field says that no open task of the
endpoint is missing; without it every consuming call raises QueueDataLost, until one forwarder has claimed the endpoint,
restored every page of open tasks from the database, and marked it restored, all under one fence: a second wipe in the
middle takes the fence along, and the rebuild fails instead of being declared complete. Enqueue and cancel work all the
while, for they need no other task; a restore leaves what it finds.

**Time** is the server's: its clock decides which leases have expired and who is there. Callers say how long.

**Fences** rise by one, and never below the server's clock in microseconds: so they rise across a wipe too. Calls
compare for equality, so that a stale owner is refused even if the clock were set back.

**What the queue cannot promise alone.** Between a wipe and its restore only the database knows what was dispatched. A
task with ``idempotent=False`` may be sent only with the permit of
:meth:`~farcall_common.store.ports.Tasks.record_transitions`. Whatever the queue answers to a reported result, the
database decides: record the result there before the endpoint may forget it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from farcall_common.errors import EndpointInUse, ErrorRecord, Fenced, QueueDataLost
from farcall_common.fairness import LANE
from farcall_common.store import codec, transitions
from farcall_common.store.model import (
    CancelOutcome,
    HeldLeases,
    LeasedTask,
    MaintenanceResult,
    QueuedTask,
    QueueMemory,
    QueuePosition,
    QueueState,
    RunningLimit,
    TaskResult,
    TokensTaken,
)
from farcall_common.store.registry_valkey import ValkeyRegistry
from farcall_common.store.valkey import (
    BATCH,
    SERVER_CLOCK,
    Call,
    Command,
    Scripts,
    batches,
    connect,
    in_use,
    mapped,
    refusal,
    texts,
)

#: TTL of the marker of an ended task, which keeps a process that saw it open in the database from queueing it again:
#: twice the longest time between that read and its call (a round of the reconciler has 55 s, a request 29 s).
MARKER_TTL_S: Final = 120

#: How long the queue remembers that an endpoint was deleted: longer than any request that saw it before, or any session
#: of its agent that was not ended.
DELETED_TTL_S: Final = 3600

#: The lease of a task that is enqueued although it may have started and must not start again (the queue had lost it):
#: time for its endpoint to connect before reap gives the task up.
RESCUE_LEASE_S: Final = 60.0

#: Expired leases, and results in the outbox, that one call returns.
_REAPED: Final = 500
_RESULTS: Final = 200

#: Keys that one step of the recount looks at, and tasks of an endpoint that it counts.
_SCANNED: Final = 1000
_RECOUNTED: Final = 10_000


class ValkeyQueue(ValkeyRegistry):
    """:class:`~farcall_common.store.ports.Queue` on redis-py.

    :param url: ``redis://host:port/db``, or ``rediss://`` for TLS.
    :param timeout_s: for connecting and for each answer.
    :param clock: a Lua expression for the server's clock; tests have another.
    """

    def __init__(self, url: str, *, timeout_s: float = 5.0, clock: str = SERVER_CLOCK) -> None:
        self._client = connect(url, timeout_s=timeout_s)
        self._scripts = Scripts(self._client, clock=clock)

    def ping(self) -> None:
        with mapped():
            self._client.ping()

    def close(self) -> None:
        self._client.close()

    # producing

    def enqueue(self, tasks: Sequence[QueuedTask]) -> int:
        # Tasks of one submit have the same lane and retry rules: those travel once.
        calls: list[Call] = []
        for rules, alike in itertools.groupby(tasks, _retry_rules):
            for batch in batches(list(alike)):
                endpoint_id = batch[0].endpoint_id
                packed = itertools.chain.from_iterable(map(_packed, batch))
                calls.append(("enqueue", endpoint_id, (endpoint_id, RESCUE_LEASE_S, *rules, *packed)))
        depth = 0
        for answer in self._scripts.run_many(calls, before=_places(tasks)):
            refusal(answer)
            depth = int(answer)
        return depth

    def cancel(
        self, endpoint_id: str, task_ids: Sequence[str], *, error: ErrorRecord | None = None
    ) -> Mapping[str, CancelOutcome]:
        result = codec.pack(transitions.cancelled_before_dispatch("", endpoint_id, error))
        outcomes: dict[str, CancelOutcome] = {}
        for batch in batches(task_ids):
            found = self._scripts.run("cancel", endpoint_id, endpoint_id, result, *batch)
            outcomes |= zip(batch, map(CancelOutcome, texts(found)), strict=True)
        return outcomes

    # owning

    def claim(
        self, forwarder_id: str, wanted: Sequence[tuple[str, str, Mapping[str, int]]], *, ttl_s: float
    ) -> Sequence[int | EndpointInUse]:
        calls: list[Call] = [
            ("claim", id_, (forwarder_id, ttl_s, spool_id, *_flat(weights))) for id_, spool_id, weights in wanted
        ]
        return [in_use(answer) or int(answer) for answer in self._scripts.run_many(calls)]

    def renew_ownership(
        self, forwarder_id: str, owned: Mapping[str, tuple[int, str]], *, ttl_s: float
    ) -> Sequence[str]:
        found: list[str] = []
        for batch in batches(list(owned.items())):
            calls: list[Call] = [
                ("renew_and_check", endpoint_id, (fence, forwarder_id, ttl_s, spool_id))
                for endpoint_id, (fence, spool_id) in batch
            ]
            answers = self._scripts.run_many(calls)
            found += [id_ for (id_, _), answer in zip(batch, answers, strict=True) if refusal(answer) or answer]
        return found

    def mark_disconnected(
        self, forwarder_id: str, owned: Sequence[tuple[str, int]], *, ttl_s: float
    ) -> Sequence[Fenced | QueueDataLost | None]:
        calls: list[Call] = [("renew_ownership", id_, (fence, forwarder_id, ttl_s, "")) for id_, fence in owned]
        return list(map(refusal, self._scripts.run_many(calls)))

    def maintain(
        self, forwarder_id: str, held: Mapping[str, HeldLeases], *, ttl_s: float, lease_s: float
    ) -> Mapping[str, MaintenanceResult | Fenced | QueueDataLost]:
        calls: list[Call] = []
        for endpoint_id, holding in held.items():
            fence = holding.fence
            calls.append(("renew_ownership", endpoint_id, (fence, forwarder_id, ttl_s, holding.spool_id)))
            calls += (("renew", endpoint_id, (fence, lease_s, *ids)) for ids in batches(holding.leases))
            calls += (("reap", endpoint_id, (fence, _REAPED)), ("outbox", endpoint_id, (_RESULTS,)))
        found: dict[str, MaintenanceResult | Fenced | QueueDataLost] = {}
        for (name, endpoint_id, _), answer in zip(calls, self._scripts.run_many(calls), strict=True):
            before = found.get(endpoint_id, MaintenanceResult((), ()))
            if not isinstance(before, MaintenanceResult):
                continue
            if refused := refusal(answer):
                found[endpoint_id] = refused
            elif name == "reap":
                found[endpoint_id] = MaintenanceResult(_leased_tasks(answer), ())
            elif name == "outbox":
                found[endpoint_id] = MaintenanceResult(before.reaped, _results(answer))
        return found

    def release(self, endpoint_id: str, forwarder_id: str, fence: int) -> None:
        self._scripts.run("release", endpoint_id, fence, forwarder_id)

    def evict(self, endpoint_id: str) -> None:
        self._scripts.run("evict", endpoint_id)

    def forget_endpoint(self, endpoint_id: str, *, limit: int) -> bool:
        submitters = self._submitters_at(endpoint_id)
        is_forgotten = bool(self._scripts.run("forget_endpoint", endpoint_id, limit, DELETED_TTL_S))
        gone = submitters - self._submitters_at(endpoint_id)
        pipeline = self._client.pipeline(transaction=False)
        for owner_id in gone:
            pipeline.srem(f"at:{owner_id}", endpoint_id)
        with mapped():
            pipeline.execute()
        return is_forgotten

    def _submitters_at(self, endpoint_id: str) -> set[str]:
        with mapped():
            return set(texts(self._client.hkeys(f"b:{{{endpoint_id}}}")))

    # consuming

    def lease(
        self, wanted: Mapping[str, tuple[int, int, int]], *, lease_s: float
    ) -> Mapping[str, Sequence[LeasedTask] | Fenced | QueueDataLost]:
        calls: list[Call] = [
            ("lease", endpoint_id, (fence, lease_s, min(BATCH, limit), reserve))
            for endpoint_id, (fence, limit, reserve) in wanted.items()
        ]
        return {
            endpoint_id: refusal(rows) or _leased_tasks(rows)
            for endpoint_id, rows in zip(wanted, self._scripts.run_many(calls), strict=True)
        }

    def unlease(self, endpoint_id: str, fence: int, task_ids: Sequence[str]) -> None:
        # The last batch first: within a script the oldest id becomes the next to leave, and so it must among batches.
        for batch in reversed(list(batches(task_ids))):
            self._scripts.run("unlease", endpoint_id, fence, *batch)

    def leased(self, owned: Sequence[tuple[str, int]]) -> Sequence[Mapping[str, int] | Fenced | QueueDataLost]:
        answers = self._scripts.run_many([("leased", endpoint_id, (fence,)) for endpoint_id, fence in owned])
        return [refusal(answer) or _attempts(answer) for answer in answers]

    def cancel_requests(self, owned: Sequence[tuple[str, int]]) -> Sequence[Sequence[str] | Fenced | QueueDataLost]:
        answers = self._scripts.run_many([("cancel_requests", endpoint_id, (fence,)) for endpoint_id, fence in owned])
        return [refusal(answer) or texts(answer) for answer in answers]

    def endpoints_with_activity(self, fences: Mapping[str, int]) -> Sequence[str]:
        found: list[str] = []
        for batch in batches(list(fences)):
            pipeline = self._client.pipeline(transaction=False)
            for endpoint_id in batch:
                tag = f"{{{endpoint_id}}}"
                pipeline.hmget(f"own:{tag}", "fence", "epoch")
                pipeline.exists(f"r:{tag}", f"x:{tag}")
            with mapped():
                answers = pipeline.execute()
            for endpoint_id, (fence, epoch), has_work in zip(batch, answers[::2], answers[1::2], strict=True):
                is_owned = epoch is not None and fence == str(fences[endpoint_id]).encode()
                if has_work or not is_owned:
                    found.append(endpoint_id)
        return found

    def ack(self, results: Sequence[tuple[int, Sequence[TaskResult]]]) -> Sequence[Fenced | QueueDataLost | None]:
        parts = [(index, fence, batch) for index, (fence, each) in enumerate(results) for batch in batches(each)]
        calls: list[Call] = [("ack", batch[0].endpoint_id, _ack_arguments(fence, batch)) for _, fence, batch in parts]
        refusals: list[Fenced | QueueDataLost | None] = [None] * len(results)
        for (index, _, _), answer in zip(parts, self._scripts.run_many(calls), strict=True):
            refusals[index] = refusals[index] or refusal(answer)
        return refusals

    def outbox(self, endpoint_id: str) -> Sequence[TaskResult]:
        return _results(self._scripts.run("outbox", endpoint_id, _RESULTS))

    def flushed(self, task_ids: Mapping[str, Sequence[str]]) -> None:
        calls: list[Call] = [
            ("flushed", endpoint_id, (MARKER_TTL_S, *batch))
            for endpoint_id, ids in task_ids.items()
            for batch in batches(ids)
        ]
        for answer in self._scripts.run_many(calls):
            refusal(answer)

    def restore(
        self,
        endpoint_id: str,
        fence: int,
        tasks: Sequence[QueuedTask],
        *,
        held: Mapping[str, int],
        lease_s: float,
    ) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for command in _places(tasks):
            pipeline.execute_command(*command)
        with mapped():
            pipeline.execute()
        for batch in batches(tasks):
            arguments = itertools.chain.from_iterable(
                (*_packed(task), *_retry_rules(task), held.get(task.task_id, "")) for task in batch
            )
            self._scripts.run("restore", endpoint_id, fence, lease_s, *arguments)

    def mark_restored(self, owned: Sequence[tuple[str, int]]) -> Sequence[Fenced | QueueDataLost | None]:
        calls: list[Call] = [("mark_restored", endpoint_id, (fence,)) for endpoint_id, fence in owned]
        return list(map(refusal, self._scripts.run_many(calls)))

    def find_missing(self, task_ids: Mapping[str, Sequence[str]]) -> frozenset[str]:
        calls: list[Call] = [
            ("missing", endpoint_id, batch) for endpoint_id, ids in task_ids.items() for batch in batches(ids)
        ]
        missing: list[str] = []
        for answer in self._scripts.run_many(calls):
            refusal(answer)
            missing += texts(answer)
        return frozenset(missing)

    def find_outboxes(self, endpoint_ids: Sequence[str]) -> Sequence[str]:
        found: list[str] = []
        for batch in batches(endpoint_ids):
            pipeline = self._client.pipeline(transaction=False)
            for endpoint_id in batch:
                pipeline.exists(f"o:{{{endpoint_id}}}")
            with mapped():
                answers = pipeline.execute()
            found += [endpoint_id for endpoint_id, has_results in zip(batch, answers, strict=True) if has_results]
        return found

    def read_checkpoint(self, name: str) -> str:
        with mapped():
            return (self._client.get(f"checkpoint:{name}") or b"").decode()

    def write_checkpoint(self, name: str, value: str, *, expected: str) -> bool:
        return bool(self._scripts.run_on("write_checkpoint", [f"checkpoint:{name}"], expected, value))

    def depth(self, endpoint_ids: Sequence[str]) -> int:
        waiting = 0
        for batch in batches(endpoint_ids):
            pipeline = self._client.pipeline(transaction=False)
            for endpoint_id in batch:
                pipeline.hget(f"c:{{{endpoint_id}}}", "waiting")
            with mapped():
                waiting += sum(int(each or 0) for each in pipeline.execute())
        return waiting

    def depth_of(self, endpoint_id: str, owner_id: str) -> tuple[int, int]:
        pipeline = self._client.pipeline(transaction=False)
        pipeline.hget(f"c:{{{endpoint_id}}}", "waiting")
        for lane in (owner_id, owner_id + LANE):
            pipeline.llen(f"q:{{{endpoint_id}}}:{lane}")
        with mapped():
            waiting, *own = pipeline.execute()
        return int(waiting or 0), sum(own)

    def reserve(self, endpoint_id: str, owner_id: str, count: int, *, most: int) -> int | None:
        waiting = int(self._reserve(endpoint_id, owner_id, count, most))
        return None if waiting < 0 else waiting

    def free(self, endpoint_id: str, owner_id: str, count: int) -> None:
        self._reserve(endpoint_id, owner_id, -count, 0)

    def _reserve(self, endpoint_id: str, owner_id: str, count: int, most: int) -> Any:
        names = (f"n:{{{endpoint_id}}}:{owner_id}", f"q:{{{endpoint_id}}}:{owner_id}")
        keys = [*names, names[1] + LANE]
        return self._scripts.run_on("reserve", keys, count, most)

    def bytes_of(self, owner_id: str) -> int:
        with mapped():
            endpoint_ids = sorted(texts(self._client.smembers(f"at:{owner_id}")))
        held, empty = 0, []
        for batch in batches(endpoint_ids):
            pipeline = self._client.pipeline(transaction=False)
            for endpoint_id in batch:
                pipeline.hget(f"b:{{{endpoint_id}}}", owner_id)
            with mapped():
                answers = pipeline.execute()
            held += sum(int(each or 0) for each in answers)
            empty += [endpoint_id for endpoint_id, each in zip(batch, answers, strict=True) if not each]
        for batch in batches(empty):
            with mapped():
                self._client.srem(f"at:{owner_id}", *batch)
        return held

    def recount_bytes(self, cursor: int) -> int:
        with mapped():
            cursor, keys = self._client.scan(cursor, match="b:{*}", count=_SCANNED)
        endpoint_ids = [key.removeprefix("b:{").removesuffix("}") for key in texts(keys)]
        for endpoint_id in endpoint_ids:
            submitters = texts(self._scripts.run("recount_bytes", endpoint_id, _RECOUNTED))
            places = [("SADD", f"at:{submitter}", endpoint_id) for submitter in submitters]
            self._scripts.run_many([], before=places)
        return int(cursor)

    def memory(self) -> QueueMemory:
        with mapped():
            found = self._client.info("memory")
        return QueueMemory(found["used_memory"], found.get("maxmemory") or found.get("total_system_memory") or 0)

    def set_limits(self, limits: Mapping[str, Mapping[str, RunningLimit]], *, complete: bool) -> None:
        calls: list[Call] = [
            ("set_limits", endpoint_id, (endpoint_id, int(complete), *_flat_limits(each)))
            for endpoint_id, each in limits.items()
        ]
        for batch in batches(calls):
            for answer in self._scripts.run_many(batch):
                refusal(answer)

    def take_tokens(
        self, bucket: str, tokens: int, *, rate_per_s: float, burst: int, in_debt: bool = False
    ) -> TokensTaken:
        taken, wait_s = self._scripts.run_on("take_tokens", [f"rate:{bucket}"], tokens, rate_per_s, burst, int(in_debt))
        return TokensTaken(int(taken), float(wait_s))

    def position(self, endpoint_id: str, task_id: str) -> QueuePosition:
        state, *numbers = self._scripts.run("position", endpoint_id, task_id)
        return QueuePosition(QueueState(state.decode()), *map(int, numbers))


def _attempts(found: Sequence[bytes]) -> dict[str, int]:
    """Leased tasks and attempts, which the script returns in turn."""
    return dict(zip(texts(found[::2]), map(int, found[1::2]), strict=True))


def _flat(weights: Mapping[str, int]) -> Iterable[str | int]:
    """Weights as arguments of the claim script."""
    return itertools.chain.from_iterable(weights.items())


def _flat_limits(limits: Mapping[str, RunningLimit]) -> Iterable[str | int]:
    for owner_id, limit in limits.items():
        yield from (owner_id, limit.max_running or "", limit.weight or "")


def _places(tasks: Iterable[QueuedTask]) -> list[Command]:
    """The commands that note where the tasks of submitters are, before they are there."""
    places = dict.fromkeys((task.payer_id, task.endpoint_id) for task in tasks)
    return [("SADD", f"at:{owner_id}", endpoint_id) for owner_id, endpoint_id in places]


def _packed(task: QueuedTask) -> tuple[str | bytes, ...]:
    """One task as an argument of the enqueue and restore scripts."""
    return task.task_id, codec.pack(task)


def _retry_rules(task: QueuedTask) -> tuple[str, int, int, int]:
    """Lane, idempotence, attempts: arguments of the enqueue and restore scripts that tasks of one submit share."""
    return task.lane, int(task.options.idempotent), task.options.max_attempts, task.attempt


def _ack_arguments(fence: int, results: Sequence[TaskResult]) -> list[str | bytes | int]:
    """Arguments of the ack script."""
    arguments: list[str | bytes | int] = [fence]
    for result in results:
        arguments += (result.task_id, codec.pack(result))
    return arguments


def _leased_tasks(rows: Iterable[Sequence[Any]]) -> list[LeasedTask]:
    return [
        LeasedTask(
            codec.unpack_task(task),
            attempt=attempt,
            enqueued_at=float(enqueued_at),
            leased_at=float(leased_at),
            cancel_requested=bool(stop),
        )
        for task, attempt, enqueued_at, stop, leased_at in rows
    ]


def _results(rows: Iterable[Sequence[bytes]]) -> list[TaskResult]:
    """Outbox entries, completed from their tasks."""
    found: list[TaskResult] = []
    for task_id, task, packed in rows:
        if result := codec.if_known(codec.unpack_result, packed):
            queued = codec.unpack_task(task)
            known = {"task_group_id": queued.task_group_id, "owner_id": queued.owner_id}
            found.append(msgspec.structs.replace(result, task_id=task_id.decode(), **known))
    return found
