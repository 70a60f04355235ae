"""The queue in Valkey: lists, a lease set and a hash per task, moved only by the scripts in ``lua/``.

All keys of an endpoint carry its id as hash tag, so that they share a slot and a script moves them in one step:

========================  ======  =====================================================================  =========
key                       type    content                                                                TTL
========================  ======  =====================================================================  =========
``own:{endpoint}``        hash    fence, forwarder, until, spool, epoch                                  none
``q:{endpoint}``          list    waiting task ids                                                       none
``l:{endpoint}``          zset    leased task ids by deadline                                            none
``x:{endpoint}``          set     leased tasks that should stop                                          none
``o:{endpoint}``          list    ended tasks that may not have reached the database                     none
``t:{endpoint}:<task>``   hash    the task, its state, attempt and result                                see below
``fwd:<forwarder>``       string  a live forwarder                                                       its own
``fwds``                  zset    forwarder ids by the time they count as dead                           none
``zap:<public key>``      string  whom a CURVE key speaks for                                            its own
``rate:<bucket>``         hash    tokens, at: a token bucket as it was at a moment                       full again
``wake:<forwarder>``      channel endpoint ids with work or cancellations; lossy                         --
``watch:<owner>``         zset    forwarders where the owner's clients wait, by when that is over        its own
``ends:<forwarder>``      channel ends that other forwarders recorded; lossy                             --
========================  ======  =====================================================================  =========

A task hash lives for ever until the database has the task's end; then a marker without payload and result stays for
:data:`MARKER_TTL_S`. An eviction policy of ``volatile-*`` therefore never drops a task.

**Losing everything.** A wipe takes ``own:{endpoint}`` with it. Its ``epoch`` field says that no open task of the
endpoint is missing; without it every consuming call raises QueueDataLost, until one forwarder has claimed the endpoint,
restored every page of open tasks from the database, and marked it restored, all under one fence: a second wipe in the
middle takes the fence along, and the rebuild fails instead of being declared complete. Enqueue and cancel work all the
while, for they need no other task; a restore leaves what it finds.

**Fences** rise by one, and never below the server's clock in microseconds: so they rise across a wipe too. Calls
compare for equality, so that a stale owner is refused even if the clock were set back.

**What the queue cannot promise alone.** Between a wipe and its restore nobody but the database knows what was
dispatched. A task with ``idempotent=False`` may be sent only with the permit of
:meth:`~farcall_common.store.ports.Records.record_moves`. And whatever the queue says to a reported end, the database
has the last word: record the end there before the endpoint may forget it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, Final, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.client import PubSub
from redis.commands.core import Script
from redis.exceptions import NoScriptError
from redis.retry import Retry

from farcall_common.errors import EndpointInUse, Fenced, QueueDataLost, Unavailable
from farcall_common.store import codec, moves
from farcall_common.store.model import (
    AckOutcome,
    CancelOutcome,
    ForwarderInfo,
    Holding,
    LeasedTask,
    PeerKey,
    QueuedTask,
    QueuePlace,
    QueueStanding,
    SharedEnds,
    Taken,
    TaskResult,
    Tended,
)

__all__ = ["MARKER_TTL_S", "ValkeyQueue"]

#: How long an ended task is remembered, so that a late enqueue or restore does not run it again.
MARKER_TTL_S: Final = 24 * 3600

#: The lease of a task that is enqueued although it may have started and must not start again (the queue had lost it):
#: time for its endpoint to be heard of before reap gives the task up.
RESCUE_LEASE_S: Final = 60.0

#: Ids per script call. Serverless caches take fewer than 4,000 arguments, a task has up to six.
_BATCH: Final = 500

#: Expired leases, and ends that may not have reached the database, that one call returns.
_REAPED: Final = 500
_ENDS: Final = 200

#: A script's name, an endpoint, and arguments.
_Call = tuple[str, str, Sequence[str | bytes | float]]

_SCRIPTS: Final = resources.files("farcall_common.store") / "lua"


class ValkeyQueue:
    """:class:`~farcall_common.store.ports.Queue` on redis-py.

    :param url: ``redis://host:port/db``, or ``rediss://`` for TLS.
    :param timeout_s: for connecting and for each answer.
    """

    def __init__(self, url: str, *, timeout_s: float = 5.0) -> None:
        # A connection that died idle is replaced at once; a server that is away is the caller's to wait for. Sending a
        # call twice because its first answer was lost does no harm: every script may be repeated.
        # Any, because the driver's types mix the answers of its blocking and its asynchronous client.
        self._client: Any = redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            health_check_interval=15,
            retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        )
        prelude = (_SCRIPTS / "prelude.lua").read_text()
        self._scripts: dict[str, Script] = {
            path.name.removesuffix(".lua"): self._client.register_script(prelude + path.read_text())
            for path in _SCRIPTS.iterdir()
            if path.name != "prelude.lua"
        }

    def ping(self) -> None:
        with _mapped():
            self._client.ping()

    def close(self) -> None:
        self._client.close()

    # producing

    def enqueue(self, tasks: Sequence[QueuedTask], *, now: float) -> None:
        for batch in _batches(tasks):
            endpoint_id = batch[0].endpoint_id
            arguments = itertools.chain.from_iterable(map(_task_arguments, batch))
            self._run("enqueue", endpoint_id, endpoint_id, now, now + RESCUE_LEASE_S, *arguments)

    def cancel(self, endpoint_id: str, task_ids: Sequence[str], *, now: float) -> Mapping[str, CancelOutcome]:
        end = codec.pack(moves.cancelled_while_waiting("", endpoint_id))
        outcomes: dict[str, CancelOutcome] = {}
        for batch in _batches(task_ids):
            found = self._run("cancel", endpoint_id, endpoint_id, now, end, *batch)
            outcomes |= zip(batch, map(CancelOutcome, _texts(found)), strict=True)
        return outcomes

    # owning

    def claim(self, endpoint_id: str, forwarder_id: str, *, spool_id: str = "", ttl_s: float, now: float) -> int:
        return int(self._run("claim", endpoint_id, forwarder_id, now + ttl_s, now, spool_id))

    def keep(
        self, endpoint_id: str, forwarder_id: str, fence: int, *, spool_id: str = "", ttl_s: float, now: float
    ) -> None:
        self._run("keep", endpoint_id, fence, forwarder_id, now + ttl_s, spool_id)

    def refresh(
        self, forwarder_id: str, owned: Mapping[str, tuple[int, str]], *, ttl_s: float, now: float
    ) -> Sequence[str]:
        found: list[str] = []
        for batch in _batches(list(owned)):
            pipeline = self._client.pipeline(transaction=False)
            for endpoint_id in batch:
                fence, spool_id = owned[endpoint_id]
                arguments = (fence, forwarder_id, now + ttl_s, spool_id, now)
                self._scripts["refresh"](keys=_keys(endpoint_id), args=arguments, client=pipeline)
            with _mapped():
                answers = pipeline.execute()
            found += [endpoint_id for endpoint_id, needs_a_look in zip(batch, answers, strict=True) if needs_a_look]
        return found

    def tend(
        self, forwarder_id: str, held: Mapping[str, Holding], *, ttl_s: float, lease_s: float, now: float
    ) -> Mapping[str, Tended | Fenced | QueueDataLost]:
        calls: list[_Call] = []
        for endpoint_id, holding in held.items():
            fence = holding.fence
            calls.append(("keep", endpoint_id, (fence, forwarder_id, now + ttl_s, holding.spool_id)))
            calls += (("renew", endpoint_id, (fence, now + lease_s, *ids)) for ids in _batches(holding.leases))
            calls += (("reap", endpoint_id, (fence, now, _REAPED)), ("outbox", endpoint_id, (_ENDS,)))
        found: dict[str, Tended | Fenced | QueueDataLost] = {}
        for (name, endpoint_id, _), answer in zip(calls, self._run_many(calls), strict=True):
            before = found.get(endpoint_id, Tended((), ()))
            if not isinstance(before, Tended):
                continue
            if refusal := _refusal(answer):
                found[endpoint_id] = refusal
            elif name == "reap":
                found[endpoint_id] = Tended(_reaped(answer), ())
            elif name == "outbox":
                found[endpoint_id] = Tended(before.reaped, [_ended(*row) for row in answer])
        return found

    def release(self, endpoint_id: str, forwarder_id: str, fence: int) -> None:
        self._run("release", endpoint_id, fence, forwarder_id)

    # consuming

    def lease(self, endpoint_id: str, fence: int, *, limit: int, lease_s: float, now: float) -> Sequence[LeasedTask]:
        leased: list[LeasedTask] = []
        while len(leased) < limit:
            rows = self._run("lease", endpoint_id, fence, now, now + lease_s, min(_BATCH, limit - len(leased)))
            leased += [_leased_task(row, leased_at=now) for row in rows]
            if len(rows) < _BATCH:
                break
        return leased

    def lease_many(
        self, wanted: Mapping[str, tuple[int, int]], *, lease_s: float, now: float
    ) -> Mapping[str, Sequence[LeasedTask] | Fenced | QueueDataLost]:
        calls: list[_Call] = [
            ("lease", endpoint_id, (fence, now, now + lease_s, min(_BATCH, limit)))
            for endpoint_id, (fence, limit) in wanted.items()
        ]
        return {
            endpoint_id: _refusal(rows) or [_leased_task(row, leased_at=now) for row in rows]
            for endpoint_id, rows in zip(wanted, self._run_many(calls), strict=True)
        }

    def renew(
        self, endpoint_id: str, fence: int, task_ids: Sequence[str], *, lease_s: float, now: float
    ) -> Sequence[str]:
        missing: list[str] = []
        for batch in _batches(task_ids):
            missing += _texts(self._run("renew", endpoint_id, fence, now + lease_s, *batch))
        return missing

    def unlease(self, endpoint_id: str, fence: int, task_ids: Sequence[str], *, now: float) -> None:  # noqa: ARG002
        # The last batch first: within a script the oldest id ends next to leave, and so it must be among batches.
        for batch in reversed(list(_batches(task_ids))):
            self._run("unlease", endpoint_id, fence, *batch)

    def leased(self, endpoint_id: str, fence: int) -> Mapping[str, int]:
        found = self._run("leased", endpoint_id, fence)
        return dict(zip(_texts(found[::2]), map(int, found[1::2]), strict=True))

    def cancel_requests(self, endpoint_id: str, fence: int) -> Sequence[str]:
        return _texts(self._run("cancel_requests", endpoint_id, fence))

    def stirring(self, fences: Mapping[str, int]) -> Sequence[str]:
        found: list[str] = []
        for batch in _batches(list(fences)):
            pipeline = self._client.pipeline(transaction=False)
            for endpoint_id in batch:
                tag = f"{{{endpoint_id}}}"
                pipeline.hmget(f"own:{tag}", "fence", "epoch")
                pipeline.llen(f"q:{tag}")
                pipeline.scard(f"x:{tag}")
            with _mapped():
                answers = pipeline.execute()
            for endpoint_id, (fence, epoch), waiting, stops in zip(
                batch, answers[::3], answers[1::3], answers[2::3], strict=True
            ):
                is_owned = epoch is not None and fence == str(fences[endpoint_id]).encode()
                if waiting or stops or not is_owned:
                    found.append(endpoint_id)
        return found

    def reap(self, endpoint_id: str, fence: int, *, now: float, limit: int = _REAPED) -> Sequence[LeasedTask]:
        return _reaped(self._run("reap", endpoint_id, fence, now, limit))

    def ack(self, fence: int, results: Sequence[TaskResult], *, now: float) -> Mapping[str, AckOutcome]:  # noqa: ARG002
        outcomes: dict[str, AckOutcome] = {}
        for batch in _batches(results):
            found = self._run("ack", batch[0].endpoint_id, *_end_arguments(fence, batch))
            for result, outcome in zip(batch, _texts(found), strict=True):
                outcomes.setdefault(result.task_id, AckOutcome(outcome))
        return outcomes

    def ack_many(
        self,
        ends: Sequence[tuple[int, Sequence[TaskResult]]],
        *,
        now: float,  # noqa: ARG002
    ) -> Sequence[Fenced | QueueDataLost | None]:
        parts = [(index, fence, batch) for index, (fence, results) in enumerate(ends) for batch in _batches(results)]
        calls: list[_Call] = [("ack", batch[0].endpoint_id, _end_arguments(fence, batch)) for _, fence, batch in parts]
        refusals: list[Fenced | QueueDataLost | None] = [None] * len(ends)
        for (index, _, _), answer in zip(parts, self._run_many(calls), strict=True):
            refusals[index] = refusals[index] or _refusal(answer)
        return refusals

    def outbox(self, endpoint_id: str, *, limit: int = _ENDS) -> Sequence[TaskResult]:
        return [_ended(*row) for row in self._run("outbox", endpoint_id, limit)]

    def flushed(self, endpoint_id: str, task_ids: Sequence[str]) -> None:
        self.flushed_many({endpoint_id: task_ids})

    def flushed_many(self, task_ids: Mapping[str, Sequence[str]]) -> None:
        calls: list[_Call] = [
            ("flushed", endpoint_id, (MARKER_TTL_S, *batch))
            for endpoint_id, ids in task_ids.items()
            for batch in _batches(ids)
        ]
        for answer in self._run_many(calls):
            _refusal(answer)

    def restore(
        self,
        endpoint_id: str,
        fence: int,
        tasks: Sequence[QueuedTask],
        *,
        held: Mapping[str, int],
        lease_s: float,
        now: float,
    ) -> None:
        for batch in _batches(tasks):
            arguments = itertools.chain.from_iterable(
                (*_task_arguments(task), held.get(task.task_id, "")) for task in batch
            )
            self._run("restore", endpoint_id, fence, now, now + lease_s, *arguments)

    def mark_restored(self, endpoint_id: str, fence: int) -> None:
        self._run("mark_restored", endpoint_id, fence)

    def depth(self, endpoint_id: str) -> int:
        with _mapped():
            return int(self._client.llen(f"q:{{{endpoint_id}}}"))

    def take(self, bucket: str, tokens: int, *, rate_per_s: float, burst: int, now: float) -> Taken:
        with _mapped():
            taken, wait_s = self._scripts["take"](keys=[f"rate:{bucket}"], args=[tokens, rate_per_s, burst, now])
        return Taken(int(taken), float(wait_s))

    def place(self, endpoint_id: str, task_id: str) -> QueuePlace:
        standing, ahead, depth = self._run("place", endpoint_id, task_id)
        return QueuePlace(QueueStanding(standing.decode()), int(ahead), int(depth))

    # forwarders, peers and wake-ups

    def announce(self, info: ForwarderInfo, *, ttl_s: float, now: float) -> None:
        with _mapped():
            self._client.set(f"fwd:{info.forwarder_id}", codec.pack(info), px=round(ttl_s * 1000))
            self._client.zadd("fwds", {info.forwarder_id: now + ttl_s})
            self._client.zremrangebyscore("fwds", "-inf", now)

    def withdraw(self, forwarder_id: str) -> None:
        with _mapped():
            self._client.zrem("fwds", forwarder_id)
            self._client.delete(f"fwd:{forwarder_id}")

    def forwarders(self, *, now: float) -> Sequence[ForwarderInfo]:
        with _mapped():
            alive = _texts(self._client.zrangebyscore("fwds", f"({now}", "+inf"))
            found = [self._client.get(f"fwd:{forwarder_id}") for forwarder_id in alive]
        infos = [codec.unpack_forwarder(data) for data in found if data]
        return [info for info in infos if not info.draining]

    def admit(self, key: PeerKey, *, ttl_s: float) -> None:
        with _mapped():
            self._client.set(f"zap:{key.public_key}", codec.pack(key), px=round(ttl_s * 1000))

    def find_peer(self, public_key: str) -> PeerKey | None:
        with _mapped():
            data = self._client.get(f"zap:{public_key}")
        return codec.unpack_peer(data) if data else None

    def listen(self, forwarder_id: str) -> ValkeyWakeUps:
        return ValkeyWakeUps(self._client, forwarder_id)

    # ends that forwarders tell one another

    def watch(self, owner_ids: Sequence[str], forwarder_id: str, *, ttl_s: float, now: float) -> frozenset[str]:
        fresh: set[str] = set()
        for batch in _batches(owner_ids):
            pipeline = self._client.pipeline(transaction=False)
            for owner_id in batch:
                pipeline.zremrangebyscore(f"watch:{owner_id}", "-inf", now)
                pipeline.zadd(f"watch:{owner_id}", {forwarder_id: now + ttl_s})
                pipeline.pexpire(f"watch:{owner_id}", round(ttl_s * 1000))
            with _mapped():
                answers = pipeline.execute()
            fresh |= {owner_id for owner_id, is_new in zip(batch, answers[1::3], strict=True) if is_new}
        return frozenset(fresh)

    def watchers(self, owner_ids: Sequence[str], *, now: float) -> Mapping[str, Sequence[str]]:
        pipeline = self._client.pipeline(transaction=False)
        for owner_id in owner_ids:
            pipeline.zrangebyscore(f"watch:{owner_id}", f"({now}", "+inf")
        with _mapped():
            answers = pipeline.execute()
        found: dict[str, list[str]] = {}
        for owner_id, forwarder_ids in zip(owner_ids, answers, strict=True):
            for forwarder_id in _texts(forwarder_ids):
                found.setdefault(forwarder_id, []).append(owner_id)
        return found

    def share(self, ends: Mapping[str, Sequence[SharedEnds]]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for forwarder_id, messages in ends.items():
            for message in messages:
                pipeline.publish(f"ends:{forwarder_id}", codec.pack(message))
        with _mapped():
            pipeline.execute()

    def _run(self, name: str, endpoint_id: str, *arguments: str | bytes | float) -> Any:
        with _mapped():
            return self._scripts[name](keys=_keys(endpoint_id), args=arguments)

    def _run_many(self, calls: Sequence[_Call]) -> list[Any]:
        """Run scripts (name, endpoint, arguments) in one round trip. An answer may be the error that it raised."""
        answers: list[Any] = [NoScriptError()] * len(calls)
        for _ in range(2):  # at first, and again when the server did not know a script
            todo = [index for index, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
            if not todo:
                break
            pipeline = self._client.pipeline(transaction=False)
            for index in todo:
                name, endpoint_id, arguments = calls[index]
                keys = _keys(endpoint_id)
                pipeline.evalsha(self._scripts[name].sha, len(keys), *keys, *arguments)
            with _mapped():
                for index, answer in zip(todo, pipeline.execute(raise_on_error=False), strict=True):
                    answers[index] = answer
                for name in {calls[index][0] for index in todo if isinstance(answers[index], NoScriptError)}:
                    self._client.script_load(self._scripts[name].script)
        return answers


class ValkeyWakeUps:
    """:class:`~farcall_common.store.ports.WakeUps` on a subscription of its own connection."""

    def __init__(self, client: Any, forwarder_id: str) -> None:
        self._subscription: PubSub = client.pubsub()
        self._ends_channel = f"ends:{forwarder_id}".encode()
        self._shared: list[SharedEnds] = []
        channels = (f"wake:{forwarder_id}", f"ends:{forwarder_id}")
        with _mapped():
            self._subscription.subscribe(*channels)
            # The server's word that we are subscribed: what is published from here on is heard.
            for _ in channels:
                self._subscription.get_message(timeout=5.0)

    def get(self, timeout_s: float) -> Sequence[str] | None:
        endpoint_ids: dict[str, None] = {}
        deadline = time.monotonic() + timeout_s
        with _mapped():
            while True:
                has_heard = bool(endpoint_ids or self._shared)
                wait_s = 0.0 if has_heard else max(0.0, deadline - time.monotonic())
                message = self._subscription.get_message(timeout=wait_s)
                if message is not None and message["type"] == "message":
                    if message["channel"] == self._ends_channel:
                        self._shared.append(codec.unpack_shared(message["data"]))
                    else:
                        endpoint_ids[message["data"].decode()] = None
                elif message is None and (has_heard or time.monotonic() >= deadline):
                    return list(endpoint_ids)

    def take_shared(self) -> Sequence[SharedEnds]:
        shared, self._shared = self._shared, []
        return shared

    def close(self) -> None:
        self._subscription.close()


def _refusal(answer: Any) -> Fenced | QueueDataLost | None:
    """The refusal that a script answered with, or None. Raises what it raised else."""
    if not isinstance(answer, redis.RedisError):
        return None
    try:
        with _mapped():
            raise answer
    except (Fenced, QueueDataLost) as refusal:
        return refusal


@contextlib.contextmanager
def _mapped() -> Iterator[None]:
    """The scripts' and the driver's errors as ours."""
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError, redis.OutOfMemoryError) as error:
        raise Unavailable(f"the queue does not answer: {error}") from error
    except redis.ResponseError as error:
        code, _, message = str(error).partition(" ")
        if code == "FENCED":
            raise Fenced(message) from error
        if code == "DATALOST":
            raise QueueDataLost(message) from error
        if code == "INUSE":
            raise EndpointInUse(message) from error
        raise


def _keys(endpoint_id: str) -> list[str]:
    """The keys of an endpoint, as the scripts take them."""
    tag = f"{{{endpoint_id}}}"
    return [f"own:{tag}", f"q:{tag}", f"l:{tag}", f"x:{tag}", f"o:{tag}", f"t:{tag}:"]


_Item = TypeVar("_Item")


def _batches(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    for start in range(0, len(items), _BATCH):
        yield items[start : start + _BATCH]


def _texts(values: Iterable[bytes]) -> list[str]:
    return [value.decode() for value in values]


def _task_arguments(task: QueuedTask) -> tuple[str | bytes | int, ...]:
    """One task as enqueue and restore take it."""
    return task.task_id, codec.pack(task), int(task.idempotent), task.max_attempts, task.attempt


def _end_arguments(fence: int, results: Sequence[TaskResult]) -> list[str | bytes | int]:
    """Ends as ack takes them."""
    arguments: list[str | bytes | int] = [fence]
    for result in results:
        arguments += (result.task_id, codec.pack(result))
    return arguments


def _leased_task(row: Sequence[Any], *, leased_at: float) -> LeasedTask:
    task, attempt, enqueued_at, stop = row[:4]
    return LeasedTask(
        codec.unpack_task(task),
        attempt=attempt,
        enqueued_at=float(enqueued_at),
        leased_at=leased_at,
        cancel_requested=bool(stop),
    )


def _reaped(rows: Iterable[Sequence[Any]]) -> list[LeasedTask]:
    return [_leased_task(row, leased_at=float(row[4])) for row in rows]


def _ended(task_id: bytes, task: bytes, result: bytes) -> TaskResult:
    """An outbox entry; what its reporter did not know comes from the task."""
    queued = codec.unpack_task(task)
    return dataclasses.replace(
        codec.unpack_result(result),
        task_id=task_id.decode(),
        task_group_id=queued.task_group_id,
        owner_id=queued.owner_id,
    )
