"""The agent's shell: one loop around the pure parts, the sockets, the spool and the threads for HTTP.

A turn takes in all that is there, lets the core decide once, makes that durable in one transaction, and only then tells
anybody. So batches form by themselves under load, and a single task waits for nothing.
"""

from __future__ import annotations

import collections
import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, Protocol

import zmq

from farcall_common.errors import FarcallError, ForwarderWaking, ProtocolError
from farcall_common.sockets import KEY_REFUSED
from farcall_common.waking import Waking
from farcall_common.wire import (
    PROTOCOL_VERSION,
    BlobGrant,
    BlobPiece,
    BlobTaken,
    CancelTasks,
    Capabilities,
    Envelope,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    ResultsRecorded,
    RunTasks,
    new_id,
)
from farcall_endpoint import protocol
from farcall_endpoint.agent import connection as c
from farcall_endpoint.agent.blobs import Blobs, BlobsMode
from farcall_endpoint.agent.core import AgentCore
from farcall_endpoint.agent.fleet import Fleet
from farcall_endpoint.agent.links import HANDSHAKE_DONE, Uplink
from farcall_endpoint.agent.reports import messages_to_cloud
from farcall_endpoint.agent.spool import MAX_ROW_BYTES, Spool, SpoolUnwritable
from farcall_endpoint.agent.spool_space import SpoolSpace
from farcall_endpoint.agent.tasks import Decisions, Demand, Task
from farcall_endpoint.agent.transfers import Background, Transfers
from farcall_endpoint.cloud import ConnectAnswer
from farcall_endpoint.shared import Frame, seen

_logger = logging.getLogger(__name__)

_KEEP_BYTES: Final = 16 * 1024
"""Payloads up to here stay in memory until they are dispatched; larger ones are read from the spool again."""
_STATUS_PERIOD_S: Final = 1.0
_FAREWELL_S: Final = 5.0
_RESERVE: Final = 16
"""Tasks that the cloud may send although others have used up the credit: of submitters that have none here."""
_MOST_NODES: Final = 100
"""So many are shown one by one in the status."""
_RATE_WINDOW_S: Final = 10.0


class Clock:
    """Monotonic seconds, and epoch seconds that never jump while the process lives."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def monotonic(self) -> float:
        """For deadlines."""
        return time.monotonic()

    def epoch(self) -> float:
        """For whatever others read, and for the core."""
        return time.monotonic() + self._offset_s


class Rate:
    """From a count that only grows, looked at every now and then. Instants are monotonic seconds."""

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, int]] = collections.deque()

    def per_s(self, count: int, *, now: float) -> float:
        """How fast the count has grown over the last ten seconds, as far as it was looked at."""
        self._seen.append((now, count))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _RATE_WINDOW_S:
            self._seen.popleft()
        since, former = self._seen[0]
        return (count - former) / (now - since) if now > since else 0.0


class FleetMaker(Protocol):
    """Makes a fleet, with what it needs of the agent."""

    def __call__(
        self,
        *,
        poller: zmq.Poller,
        function_body: Callable[[str], bytes],
        payload: Callable[[Task], Frame],
        demand: Callable[[], Demand],
    ) -> Fleet:
        """A fleet that has not started anything yet."""


class Agent:
    """One per process.

    :param transfer_memory_bytes: what large payloads and results on their way may take.
    :param ask_api: blocks; where the forwarders are. Raises FarcallError.
    :param on_connected: called with every session that opens.
    :param owner_id: the identity of the endpoint's owner as far as it is known; the API tells ``on_owner``.
    :param on_status: called at most once a second with numbers and troubles.
    """

    def __init__(
        self,
        *,
        endpoint_id: str,
        heartbeat_s: float,
        capabilities: Capabilities,
        core: AgentCore,
        connection: c.Connection,
        spool: Spool,
        uplink: Uplink,
        make_fleet: FleetMaker,
        poller: zmq.Poller,
        background: Background,
        transfers: Transfers,
        blobs: BlobsMode,
        transfer_memory_bytes: int,
        ask_api: Callable[[], ConnectAnswer],
        clock: Clock,
        on_connected: Callable[[], None],
        owner_id: str,
        on_owner: Callable[[str], None],
        on_status: Callable[[dict[str, object]], None],
    ) -> None:
        self._endpoint_id = endpoint_id
        self._heartbeat_s = heartbeat_s
        self._capabilities = capabilities
        self._core = core
        self._connection = connection
        self._spool = spool
        self._uplink = uplink
        self._fleet = make_fleet(
            poller=poller, function_body=self._function_body, payload=self._payload, demand=core.demand
        )
        self._fleet.owner_id = owner_id
        self._on_owner = on_owner
        self._poller = poller
        self._background = background
        self._ask_api = ask_api
        self._clock = clock
        self._transfer_memory_bytes = transfer_memory_bytes
        self._blobs = Blobs(
            blobs,
            core=core,
            background=background,
            transfers=transfers,
            clock=clock,
            say=self._say,
            memory_bytes=transfer_memory_bytes,
        )
        self._on_connected = on_connected
        self._rate = Rate()
        self._forwarder = ""
        self._waking = Waking()
        self._on_status = on_status
        self._instance_id = new_id()
        self._told_generation = 0
        self._functions: dict[str, bytes] = {}
        self._pressure = SpoolSpace()
        self._under_pressure = False
        self._status_at = 0.0
        self._stop_wanted: float | None = None
        self._kill_at: float | None = None
        self._fatal: FarcallError | None = None
        poller.register(background.fileno(), zmq.POLLIN)

    # -- life ----------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until stopped; then no child process is left, and what is unfinished is in the spool.

        :raises FarcallError: when trying again cannot help.
        """
        tasks, functions = self._spool.load()
        if tasks:
            _logger.info(
                "the spool holds %d tasks, %d of them finished", len(tasks), sum(t.end is not None for t in tasks)
            )
        self._core.restore(tasks, functions, now=self._clock.epoch())
        try:
            self._fleet.tend(now=self._clock.monotonic())
            self._follow(self._connection.start())
            while not (self._kill_at is not None and self._fleet.is_empty):
                self._turn()
            self._decide(self._clock.monotonic(), self._clock.epoch(), patient=False)
            if self._pressure.retry_at is not None and self._fatal is None:
                self._fatal = SpoolUnwritable(
                    "The endpoint was stopped while its spool could not be written. The ends of tasks that came since "
                    "are not kept: those tasks run again where they may, and count as lost where they may not."
                )
            self._follow([c.Close(politely=True)])
        finally:
            self._fleet.kill()
            self._uplink.close()
            self._fleet.close()
            self._background.close()
        if self._fatal is not None:
            raise self._fatal

    def stop(self, *, grace_s: float) -> None:
        """Ask for an orderly end; asked again, running tasks get no grace. May be called from a signal handler."""
        self._stop_wanted = grace_s if self._stop_wanted is None and self._kill_at is None else 0.0
        self._background.wake()

    def _turn(self) -> None:
        ready = {source for source, _ in self._poller.poll(self._timeout_ms())}
        now, epoch = self._clock.monotonic(), self._clock.epoch()
        if self._background.fileno() in ready:
            self._background.finish()
        self._hear_managers(ready, now, epoch)
        if not ready.isdisjoint(self._uplink.sockets):
            self._hear_cloud(now, epoch)
        for lost in self._fleet.tend(now=now, ready=ready):
            expected = lost.expected or self._kill_at is not None
            _logger.log(logging.INFO if expected else logging.ERROR, "%s: %s", lost.manager_id, lost.reason)
            reason = "the endpoint was stopped while it ran" if self._kill_at else lost.reason
            self._core.manager_lost(lost.manager_id, reason, expected=expected, unstarted=lost.unstarted, now=epoch)
        self._core.nodes(refusal=self._fleet.refusal, problem=self._fleet.problem)
        self._follow(self._connection.tick(now=now))
        self._blobs.tick()
        self._decide(now, epoch)
        self._wind_down(now)
        if now >= self._status_at:
            self._status_at = now + _STATUS_PERIOD_S
            self._spool.give_back()
            self._pressure.measured(self._spool.room())
            self._heed_pressure()
            try:
                self._on_status(self._status())
            except OSError as error:  # what nobody can read now is no reason to end
                _logger.debug("the status cannot be written: %s", error)

    def _timeout_ms(self) -> int:
        now, epoch = self._clock.monotonic(), self._clock.epoch()
        deadlines = (
            self._status_at,
            self._connection.next_deadline(),
            self._fleet.next_deadline(),
            self._blobs.next_deadline(),
            self._kill_at,
        )
        wait_s = min(deadline for deadline in deadlines if deadline is not None) - now
        due = self._core.next_deadline()
        if self._pressure.retry_at is not None:
            wait_s = min(wait_s, self._pressure.retry_at - now)
        elif due is not None:
            wait_s = min(wait_s, due - epoch)
        return max(0, int(wait_s * 1000) + 1)

    def _wind_down(self, now: float) -> None:
        if self._stop_wanted is not None:
            grace_s, self._stop_wanted = self._stop_wanted, None
            _logger.info("stopping; running tasks get %g s to finish", grace_s)
            self._core.drain()
            self._fleet.stop(grace_s=grace_s)
            self._kill_at = now + grace_s + _FAREWELL_S
        elif self._kill_at is not None and now >= self._kill_at:
            self._fleet.kill()
            self._kill_at = now + _FAREWELL_S

    def _status(self) -> dict[str, object]:
        report = self._core.report()
        return {
            "connected": self._connection.is_open,
            "trouble": self._connection.trouble,
            "managers": report.managers,
            "workers": report.total_workers,
            "idle_workers": report.idle_workers,
            "waiting_tasks": report.pending_tasks,
            "unfinished_tasks": report.outstanding_tasks,
            "finished_tasks": self._core.finished_tasks,
            "tasks_per_s": round(self._rate.per_s(self._core.finished_tasks, now=self._clock.monotonic()), 1),
            "forwarder": self._forwarder,
            "blocks": self._fleet.describe(offset_s=self._clock.epoch() - self._clock.monotonic()),
            "nodes": [_about(node) for node in self._fleet.nodes[:_MOST_NODES]],
            "problem": str(report.detail.get("problem", "")),
            "at": self._clock.epoch(),
        }

    # -- connection ----------------------------------------------------------------------------------------------------

    def _follow(self, actions: Iterable[c.Action]) -> None:
        now = self._clock.monotonic()
        for action in actions:
            match action:
                case c.AskApi():
                    self._background.submit(self._ask)
                case c.Dial(to=to):
                    self._dial(to, now)
                case c.Greet(ticket=ticket):
                    self._greet(ticket)
                case c.Opened(welcome=welcome):
                    _logger.info("connected to forwarder %s", welcome.forwarder_id)
                    if news := self._waking.awake(now=now):
                        _logger.info(news)
                    self._core.opened(welcome.forget)
                    self._blobs.opened(welcome.relay_piece_bytes)
                    self._status_at = now
                    self._on_connected()
                case c.Beat():
                    self._say(Heartbeat(at=self._clock.epoch(), report=self._core.report()))
                case c.Close(politely=politely):
                    if politely and self._connection.may_send(Goodbye):
                        self._say(Goodbye(reason="the endpoint was stopped"))
                    self._uplink.close(linger_ms=1000 if politely else 0)
                case c.Closed(reason=reason):
                    _logger.warning("not connected any more: %s", reason)
                    self._core.closed()
                    self._blobs.closed()
                    self._status_at = now
                case c.GiveUp(error=error):
                    _logger.error("giving up: %s", error)
                    self._fatal = error
                    self.stop(grace_s=0)

    def _ask(self) -> Callable[[], None]:
        """In a thread: ask the API."""
        try:
            answer = self._ask_api()
        except FarcallError as error:
            return lambda error=error: self._unanswered(error)  # type: ignore[misc]
        return lambda: self._answered(answer)

    def _answered(self, answer: ConnectAnswer) -> None:
        if answer.owner_id and answer.owner_id != self._fleet.owner_id:
            self._fleet.owner_id = answer.owner_id
            self._on_owner(answer.owner_id)
        forwarders = tuple(c.Address(address, key) for address, key in answer.forwarders)
        ttl_s = answer.ticket_expires_at - time.time()
        now = self._clock.monotonic()
        self._follow(self._connection.answered(forwarders, ticket=answer.ticket, ticket_ttl_s=ttl_s, now=now))

    def _unanswered(self, error: FarcallError) -> None:
        now = self._clock.monotonic()
        if not isinstance(error, ForwarderWaking):
            _logger.warning("the API gave no forwarder: %s", error)
        elif news := self._waking.asleep(now=now):  # not at each of the next tries
            _logger.warning("[%s] %s", error.record.code, news)
        self._follow(self._connection.unanswered(error, now=now))

    def _dial(self, to: c.Address, now: float) -> None:
        self._forwarder = to.address
        _logger.info("connecting to %s", to.address)
        try:
            self._uplink.open_socket(to)
        except zmq.ZMQError as error:
            self._follow(self._connection.lost(f"{to.address}: {error}", now=now))

    def _greet(self, ticket: str) -> None:
        self._told_generation = self._spool.generation
        self._say(
            Hello(
                endpoint_id=self._endpoint_id,
                ticket=ticket,
                instance_id=self._instance_id,
                spool_id=self._spool.spool_id,
                protocol_versions=(PROTOCOL_VERSION,),
                heartbeat_s=self._heartbeat_s,
                spool_generation=self._spool.generation,
                held=self._core.held(),
                capabilities=self._capabilities,
                reserve=_RESERVE,
                weights=dict(self._core.weights),
            )
        )

    def _hear_cloud(self, now: float, epoch: float) -> None:
        for fate in self._uplink.connection_events():
            if fate is HANDSHAKE_DONE:
                self._follow(self._connection.shaken(now=now))
            else:
                self._hear_forwarder(now, epoch)  # its last words
                _logger.warning("the way to the forwarder failed: %s", fate)
                self._follow(self._connection.lost(fate, key_refused=fate is KEY_REFUSED, now=now))
        self._hear_forwarder(now, epoch)

    def _hear_forwarder(self, now: float, epoch: float) -> None:
        try:
            for envelope in self._uplink.receive():
                self._follow(self._connection.received(envelope.message, now=now))
                self._obey(envelope, epoch)
        except ProtocolError as error:
            _logger.error("the forwarder broke the protocol: %s", error)
            self._follow(self._connection.lost(str(error), now=now))

    def _obey(self, envelope: Envelope, epoch: float) -> None:
        match envelope.message:
            case RunTasks() as message:
                self._core.run_tasks(message, envelope.frames, now=epoch)
            case CancelTasks(task_ids=task_ids):
                self._core.cancel(task_ids)
            case ResultsRecorded(tasks=refs):
                self._core.recorded(refs)
            case BlobGrant() as grant:
                self._core.granted(grant, now=epoch)
            case BlobPiece() | BlobTaken() as message:
                self._blobs.received(message, envelope.frames)
            case _:
                pass  # the session's own affair

    def _say(self, message: Message, frames: tuple[bytes, ...] = ()) -> None:
        self._connection.sent(message, now=self._clock.monotonic())
        self._uplink.send(Envelope(message, frames))

    # -- managers ------------------------------------------------------------------------------------------------------

    def _hear_managers(self, ready: Collection[object], now: float, epoch: float) -> None:
        size_bytes = 0
        for manager_id, message, bodies in self._fleet.receive(ready=ready, now=now):
            match message:
                case protocol.Registered() as registered:
                    _logger.info(
                        "%s on %s, pid %d: %d slots", manager_id, registered.hostname, registered.pid, registered.slots
                    )
                    self._core.manager_registered(manager_id, slots=registered.slots, ends_at=registered.ends_at)
                case protocol.Progress() as progress:
                    if progress.problem:
                        _logger.warning("%s: %s", manager_id, progress.problem)
                    self._core.progress(manager_id, progress, bodies, now=epoch)
            size_bytes += sum(map(len, bodies))
            if size_bytes > self._transfer_memory_bytes:
                return  # these go into the spool first; the rest waits where it is

    def _function_body(self, function_hash: str) -> bytes:
        return self._spool.function(function_hash)

    def _payload(self, task: Task) -> Frame:
        payload, task.payload = task.payload, None  # with the manager now; should that die, the spool has it
        if payload is None or len(payload) > MAX_ROW_BYTES:
            return self._spool.payload(task)  # a file, which a worker on this machine reads where it is
        return payload

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _decide(self, now: float, epoch: float, *, patient: bool = True) -> None:
        """Make durable what follows from this turn, then do it. What cannot be made durable now waits in the core."""
        retry_at = self._pressure.retry_at
        if retry_at is None or now >= retry_at or not patient:
            decisions = self._core.decide(now=epoch)
            try:
                self._spool.commit(decisions)
            except SpoolUnwritable as error:
                _logger.log(logging.ERROR if retry_at is None else logging.DEBUG, "%s", error)
                self._core.take_back(decisions, now=epoch)
                self._pressure.failed(str(error), now=now)
            else:
                self._pressure.written()
                if retry_at is not None:
                    _logger.info("the spool can be written again")
                self._act(decisions)
            if (retry_at is None) != (self._pressure.retry_at is None):
                self._status_at = now
        if self._pressure.retry_at is not None:
            self._cancel(self._core.urgent())

    def _heed_pressure(self) -> None:
        problem = self._pressure.problem
        news = bool(problem) != self._under_pressure
        self._under_pressure = bool(problem)
        self._core.spool_problem(problem)
        if news:
            _logger.warning("%s", problem or "there is room in the file system again")
            if self._connection.may_send(Heartbeat):
                self._follow([c.Beat()])

    def _cancel(self, cancels: Mapping[str, list[str]]) -> None:
        for manager_id, task_ids in cancels.items():
            self._fleet.cancel(manager_id, task_ids)

    def _act(self, decisions: Decisions) -> None:
        self._cancel(decisions.cancels)
        if self._spool.generation != self._told_generation and self._connection.may_send(Heartbeat):
            # Before those tasks start: an old copy of the spool, which does not know of it, is refused from then on.
            self._told_generation = self._spool.generation
            self._say(Heartbeat(at=self._clock.epoch(), spool_generation=self._told_generation))
        for manager_id, tasks in decisions.orders.items():
            self._fleet.order(manager_id, tasks)
        for task in (*decisions.accepted, *decisions.fetched):
            if task.payload is not None and len(task.payload) > _KEEP_BYTES:
                task.payload = None
        for task in decisions.fetches:
            self._blobs.fetch(task)
        for task, grant in decisions.uploads:
            self._blobs.upload(task, grant, functools.partial(self._body, task))
        self._blobs.settle()
        self._tell(decisions)
        for task in decisions.ended:
            if task.end is not None:
                task.end.body = None
        self._fleet.take()

    def _tell(self, decisions: Decisions) -> None:
        for envelope in messages_to_cloud(decisions, body=self._inline_body):
            if self._connection.may_send(type(envelope.message)):
                self._say(envelope.message, envelope.frames)

    def _body(self, task: Task) -> Frame:
        end = task.end
        return self._spool.body(task) if end is None or end.body is None else bytes(end.body)

    def _inline_body(self, task: Task) -> bytes:
        return bytes(seen(self._body(task)))


def _about(node: protocol.Registered) -> dict[str, object]:
    """A node as the status shows it."""
    has = node.capacity
    numbers = {} if has is None else {"cores": has.cores, "memory_bytes": has.memory_bytes}
    accelerators = [] if has is None else list(has.accelerators)
    named = {"hostname": node.hostname, "block_id": node.block_id, "slots": node.slots}
    return {**named, **numbers, "accelerators": accelerators}
