"""The agent's shell: one loop that feeds events to the cores and performs their actions.

A turn collects all events that are there, gives them to the core at once, writes the spool in one transaction, and only
then sends anything. So batches form under load, and a single task waits for nothing.
"""

from __future__ import annotations

import collections
import functools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, cast

import msgspec
import zmq

from farcall_common.environments import state_of
from farcall_common.errors import FarcallError, ForwarderWaking, ProtocolError
from farcall_common.event_log import EventLog, UserBytes
from farcall_common.sealing import CALL_LIFETIME_S, CLOCK_TOLERANCE_S
from farcall_common.sockets import KEY_REFUSED
from farcall_common.trace_ids import trace_ids
from farcall_common.waking import WakeNotices
from farcall_common.wire import (
    PROTOCOL_VERSION,
    BlobGrant,
    BlobPiece,
    BlobTaken,
    CancelTasks,
    Capabilities,
    EndpointReport,
    Envelope,
    FilePiece,
    FileWanted,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    OutputRequest,
    ResultsRecorded,
    RunTasks,
    new_id,
)
from farcall_endpoint.agent.core import actions as do
from farcall_endpoint.agent.core import connection as c
from farcall_endpoint.agent.core import events as ev
from farcall_endpoint.agent.core.agent import AgentCore
from farcall_endpoint.agent.core.calls import about_calls
from farcall_endpoint.agent.core.environments import ProblemsLogged
from farcall_endpoint.agent.core.reports import StatusReports, messages_of, tasks_received
from farcall_endpoint.agent.core.tasks import Task
from farcall_endpoint.agent.shell.blobs import Blobs, BlobsMode
from farcall_endpoint.agent.shell.file_pulls import FilePulls
from farcall_endpoint.agent.shell.files_for_others import FilesForOthers
from farcall_endpoint.agent.shell.fleet import Fleet
from farcall_endpoint.agent.shell.links import HANDSHAKE_DONE, Uplink
from farcall_endpoint.agent.shell.output import OutputAnswers
from farcall_endpoint.agent.shell.output_store import OutputStore
from farcall_endpoint.agent.shell.sealing import CallOpener
from farcall_endpoint.agent.shell.spool import Spool, SpoolUnwritable
from farcall_endpoint.agent.shell.transfers import Background, Transfers
from farcall_endpoint.contracts import agent_manager
from farcall_endpoint.contracts.agent_manager import PrewarmRequest
from farcall_endpoint.files.client import TransferClient
from farcall_endpoint.files.reading import ReadableFiles
from farcall_endpoint.host.shared_memory import Bytes, Frame, copy_of
from farcall_endpoint.services.cloud import ConnectAnswer
from farcall_endpoint.services.sweeper import Sweeper
from farcall_endpoint.services.valkey import ValkeyServers

_logger = logging.getLogger(__name__)

_STATUS_PERIOD_S: Final = 1.0
_LOGS_PERIOD_S: Final = 10.0
_LAST_REPORTS_S: Final = 5.0
_FORGET_PERIOD_S: Final = 3600.0
_RESERVE: Final = 16
"""Tasks that the cloud may send beyond the credit, for submitters that have no task here."""
_MOST_NODES: Final = 100
"""Maximum number of nodes in the status."""
_RATE_WINDOW_S: Final = 10.0


class Clock:
    """Monotonic seconds, and epoch seconds that never jump while the process lives."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def monotonic(self) -> float:
        """Seconds of a monotonic clock, for deadlines."""
        return time.monotonic()

    def epoch(self) -> float:
        """For whatever others read, and for the core."""
        return time.monotonic() + self._offset_s

    def wall(self) -> float:
        """The system's time, which may jump, for instants that a program on this machine compares with it."""
        return time.time()


class Rate:
    """Rate of a counter that is read now and then and only grows. Instants are monotonic seconds."""

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, int]] = collections.deque()

    def per_s(self, count: int, *, now: float) -> float:
        """Return the growth per second over the readings of the last ten seconds."""
        self._seen.append((now, count))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _RATE_WINDOW_S:
            self._seen.popleft()
        since, former = self._seen[0]
        return (count - former) / (now - since) if now > since else 0.0


class Agent:
    """One per process.

    :param transfer_memory_bytes: what large payloads and results on their way may take.
    :param ask_api: blocks; where the forwarders are. Raises FarcallError.
    :param on_connected: called with every session that opens.
    :param on_owner: called with the identity of the endpoint's owner when the API names another than the fleet has.
    :param on_status: called at most once a second with numbers and problems.
    :param on_events: called every ten seconds at most, and at the end, with the name and the JSON of a log that has
        grown.
    :param read_prewarms: returns what the owner wants warm.
    :param write_baselines: keeps how long functions take while the endpoint is idle.
    :param seed: of the cores' random numbers, for the logs.
    :param valkey: the servers of submitters, which this object closes.
    :param file_transfers: moves the files of tasks.
    :param readable_files: those that tasks at other endpoints may read; None: none.
    :param has_leftovers: whether a former process has left directories of tasks' files.
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
        output: OutputStore,
        opener: CallOpener,
        uplink: Uplink,
        fleet: Fleet,
        poller: zmq.Poller,
        background: Background,
        transfers: Transfers,
        blobs: BlobsMode,
        transfer_memory_bytes: int,
        ask_api: Callable[[], ConnectAnswer],
        clock: Clock,
        on_connected: Callable[[], None],
        on_owner: Callable[[str], None],
        on_status: Callable[[dict[str, object]], None],
        on_events: Callable[[str, bytes], None],
        seed: int,
        valkey: ValkeyServers,
        sweeper: Sweeper,
        file_transfers: TransferClient,
        readable_files: ReadableFiles | None = None,
        has_leftovers: Callable[[], bool] = lambda: False,
        read_prewarms: Callable[[], Sequence[PrewarmRequest]] = tuple,
        write_baselines: Callable[[Mapping[str, float]], None] = lambda _: None,
    ) -> None:
        self._endpoint_id = endpoint_id
        self._heartbeat_s = heartbeat_s
        self._capabilities = capabilities
        self._core = core
        self._events: list[ev.Event] = []  # of this turn
        self._connection = connection
        self._spool = spool
        self._output = output
        self._output_answers = OutputAnswers(output, find=core.task, ask=fleet.read_output, send=self._send_if_open)
        self._outputs_read: list[agent_manager.OutputRead] = []  # in this turn
        self._opener = opener
        self._uplink = uplink
        self._fleet = fleet
        self._on_owner = on_owner
        self._poller = poller
        self._background = background
        self._ask_api = ask_api
        self._clock = clock
        self._transfer_memory_bytes = transfer_memory_bytes
        self._blobs = Blobs(
            blobs,
            background=background,
            transfers=transfers,
            clock=clock,
            send=self._send,
            emit=self._on_blob,
            memory_bytes=transfer_memory_bytes,
        )
        self._valkey = valkey
        self._sweeper = sweeper
        self._sweep_at: float | None = 0.0  # None: while it sweeps
        self._on_connected = on_connected
        self._rate = Rate()
        self._forwarder = ""
        self._waking = WakeNotices()
        self._on_status = on_status
        self._read_prewarms = read_prewarms
        self._write_baselines = write_baselines
        self._file_transfers = file_transfers
        self._file_pulls = FilePulls(
            find=core.task,
            send=self._send_if_open,
            answer=file_transfers.answer,
            blobs=self._blobs,
            clock=clock,
        )
        self._files_for_others = FilesForOthers(
            readable_files, blobs=self._blobs, send=self._send_if_open, owner_or=fleet.owner_or, poller=poller
        )
        self._has_leftovers = has_leftovers
        self._on_events = on_events
        self._core_log = EventLog[ev.Event, float](ev.for_log, about={"slots": core.slots_hint, "seed": seed})
        self._connection_log = EventLog[c.Event, float](c.for_log, about={"heartbeat_s": heartbeat_s, "seed": seed})
        self._write_logs_at = 0.0
        self._forget_calls_at = 0.0
        self._instance_id = new_id()
        self._reported_generation = 0
        self._status_reports = StatusReports()
        self._has_unreported_events = False
        self._nodes = ev.NodesChanged("", "")
        self._draining: tuple[str, ...] = ()
        self._prewarms: Sequence[PrewarmRequest] = ()
        self._problems_logged = ProblemsLogged()
        self._measured = ev.SpoolMeasured(None)
        self._has_spool_problem = False
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
            finished = sum(task.result is not None for task in tasks)
            _logger.info("the spool holds %d tasks, %d of them finished", len(tasks), finished)
        restored = ev.Restored(tasks, sorted(functions), self._spool.signed_functions(), self._has_leftovers())
        self._events += [ev.OwnerKnown(self._fleet.owner_id), restored]
        try:
            self._handle(self._clock.monotonic())
            self._fleet.maintain(now=self._clock.monotonic())
            self._connect(c.Started())
            while not (self._kill_at is not None and self._fleet.is_empty):
                self._turn()
            self._events.append(ev.SpoolRetryOrdered())
            self._handle(self._clock.monotonic())
            if not self._core.can_write and self._fatal is None:
                self._fatal = SpoolUnwritable(
                    "The endpoint was stopped while its spool could not be written. Results since then are not kept: "
                    "those tasks run again where they may, and count as lost where they may not."
                )
            self._perform_connection(c.Close(politely=True))
        finally:
            self._fleet.kill()
            self._uplink.close()
            self._fleet.close()
            self._valkey.close()
            self._file_transfers.close()
            self._files_for_others.close()
            self._background.close()
            self._write_logs(self._clock.monotonic())
        if self._fatal is not None:
            raise self._fatal

    def stop(self, *, grace_s: float) -> None:
        """Request an orderly end; at the second request running tasks get no grace. Safe in a signal handler."""
        self._stop_wanted = grace_s if self._stop_wanted is None and self._kill_at is None else 0.0
        self._background.wake()

    def _turn(self) -> None:
        ready = {source for source, _ in self._poller.poll(self._timeout_ms())}
        now = self._clock.monotonic()
        if self._background.fileno() in ready:
            self._background.finish()
        self._files_for_others.finish(ready)
        self._receive_from_managers(ready, now)
        if not ready.isdisjoint(self._uplink.sockets):
            self._receive_from_cloud()
        for lost in self._fleet.maintain(now=now, ready=ready):
            expected = lost.expected or self._kill_at is not None
            _logger.log(logging.INFO if expected else logging.ERROR, "%s: %s", lost.manager_id, lost.reason)
            reason = "the endpoint was stopped while it ran" if self._kill_at else lost.reason
            self._problems_logged.forget(lost.manager_id)
            self._events.append(ev.ManagerLost(lost.manager_id, reason, expected, lost.unstarted))
        if self._fleet.draining != self._draining:
            self._draining = self._fleet.draining
            self._events.append(ev.ManagersDraining(self._draining))
        nodes = ev.NodesChanged(self._fleet.refusal, self._fleet.problem)
        if nodes != self._nodes:
            self._nodes = nodes
            self._events.append(nodes)
        due_at = self._connection.next_deadline()
        if due_at is not None and self._clock.monotonic() >= due_at:
            self._connect(c.Tick())
        self._blobs.tick()
        self._file_pulls.tick()
        self._receive_from_transfers()
        self._has_unreported_events |= bool(self._events)
        self._handle(now)
        if self._outputs_read:  # what their managers reported before is handled
            read, self._outputs_read = self._outputs_read, []
            self._output_answers.read(read)
        self._wind_down(now)
        if now >= self._status_at:
            self._status_at = now + _STATUS_PERIOD_S
            self._spool.give_back()
            if (prewarms := self._read_prewarms()) != self._prewarms:
                self._prewarms = prewarms
                self._events.append(ev.PrewarmRequested(prewarms))
                self._handle(now)
            self._measure_spool(now)
            self._report_spool_problem()
            self._valkey.maintain(self._busy_submitters)
            if self._sweep_at is not None and now >= self._sweep_at:
                self._sweep_at = None
                self._background.submit(self._sweep)
            if (baselines := self._core.baselines()) is not None:
                try:
                    self._write_baselines(baselines)
                    self._core.baselines_kept()
                except OSError as error:  # it is tried again
                    _logger.debug("baselines cannot be written: %s", error)
            try:
                self._on_status(self._status())
            except OSError as error:  # no reason to stop
                _logger.debug("the status cannot be written: %s", error)
        if now >= self._forget_calls_at:
            self._forget_calls_at = now + _FORGET_PERIOD_S
            self._output.expire(now=self._clock.epoch())
            self._spool.forget_calls(before=self._clock.epoch() - CALL_LIFETIME_S - CLOCK_TOLERANCE_S)
        if now >= self._write_logs_at:
            self._write_logs(now)
        self._report_status(now)

    def _write_logs(self, now: float) -> None:
        """Write the event logs that have grown, for bug reports."""
        self._write_logs_at = now + _LOGS_PERIOD_S
        logs: dict[str, EventLog[Any, float]] = {"tasks": self._core_log, "connection": self._connection_log}
        for name, log in logs.items():
            if not log.has_grown:
                continue
            try:
                self._on_events(name, log.to_json())
            except OSError as error:  # no reason to stop; the next time tries again
                _logger.debug("the event log of %s cannot be written: %s", name, error)
            else:
                log.has_grown = False

    def _timeout_ms(self) -> int:
        if self._events:  # an action had its outcome at once
            return 0
        now, epoch = self._clock.monotonic(), self._clock.epoch()
        deadlines = (
            self._status_at,
            self._connection.next_deadline(),
            self._status_reports.due_at if self._is_report_awaited() else None,
            self._fleet.next_deadline(),
            self._blobs.next_deadline(),
            self._file_transfers.next_deadline(),
            self._file_pulls.next_deadline(),
            self._kill_at,
        )
        wait_s = min(deadline for deadline in deadlines if deadline is not None) - now
        due = self._core.next_deadline()
        if due is not None:
            wait_s = min(wait_s, due - epoch)
        return max(0, int(wait_s * 1000) + 1)

    def _wind_down(self, now: float) -> None:
        if self._stop_wanted is not None:
            grace_s, self._stop_wanted = self._stop_wanted, None
            _logger.info("stopping; running tasks get %g s to finish", grace_s)
            self._events.append(ev.DrainOrdered())
            self._fleet.stop(grace_s=grace_s)
            self._kill_at = now + grace_s + _LAST_REPORTS_S
        elif self._kill_at is not None and now >= self._kill_at:
            self._fleet.kill()
            self._kill_at = now + _LAST_REPORTS_S

    def _status(self) -> dict[str, object]:
        report = self._report()
        return {
            "connected": self._connection.is_open,
            "connection_problem": self._connection.problem,
            "managers": report.managers,
            "workers": report.total_workers,
            "idle_workers": report.idle_workers,
            "isolation": self._fleet.isolation,
            **({} if self._core.allowed_signers is None else {"allowed_signers": self._core.allowed_signers}),
            "waiting_tasks": report.pending_tasks,
            "unfinished_tasks": report.outstanding_tasks,
            "finished_tasks": self._core.finished_tasks,
            "tasks_per_s": round(self._rate.per_s(self._core.finished_tasks, now=self._clock.monotonic()), 1),
            "forwarder": self._forwarder,
            "blocks": self._fleet.describe(offset_s=self._clock.epoch() - self._clock.monotonic()),
            "nodes": [_about(node) for node in self._fleet.nodes[:_MOST_NODES]],
            **self._about_environments(),
            **self._about_data(),
            **({"functions": functions} if (functions := self._core.functions(self._clock.epoch())) else {}),
            **self._core.latency_targets(),
            **({"graphs": graphs} if (graphs := self._core.running_graphs()) else {}),
            **({"progress": progress} if (progress := self._core.running_progress()) else {}),
            **({"transfers": transfers} if (transfers := list(map(_about_transfer, self._core.staging()))) else {}),
            "problem": str(report.detail.get("problem", "")),
            "blocked": self._fleet.blocked or self._core.spool_problem,
            "at": self._clock.wall(),
        }

    def _about_data(self) -> dict[str, object]:
        """Sizes of shared and cached data here, and the state of Valkey servers; empty values are left out."""
        sizes = {"shared_bytes": self._sweeper.shared_bytes, "memory_bytes": self._sweeper.memory_bytes}
        if (cache := self._file_transfers.cache_use) is not None:
            sizes |= {"files_cache_bytes": cache.used_bytes, "files_cache_budget_bytes": cache.budget_bytes}
        return {
            **{name: size for name, size in sizes.items() if size},
            **self._core.node_copies(),
            **({"valkey": servers} if (servers := self._valkey.describe()) else {}),
        }

    def _busy_submitters(self) -> set[str]:
        """The submitters of unfinished tasks, by their names at managers: empty for the owner."""
        return set(map(self._fleet.owner_or, self._core.busy_submitters()))

    def _sweep(self) -> Callable[[], None]:
        """In a thread: delete old files in the directories of tasks."""
        pause_s = self._sweeper.sweep()
        return lambda: self._swept(pause_s)

    def _swept(self, pause_s: float) -> None:
        self._sweep_at = self._clock.monotonic() + pause_s

    def _about_environments(self) -> dict[str, object]:
        """Tables of environments, if there are any, and those that ``prewarm`` knows by name."""
        rows = [
            {
                "environment": row["label"],
                "key": row["key"],
                "node": row["node"],
                "state": state_of(row),
                "warm": row["warm"],
                "busy": row["busy"],
                "starting": row["starting"],
                "since": row["since"] or None,
                "what": row["problem"] or row["text"],
                **({"retry_at": row["retry_at"]} if "retry_at" in row else {}),
            }
            for row in self._core.environments()
        ]
        tables = {
            "environments": rows,
            "waiting": self._core.waiting_reasons(self._clock.epoch()),
            "prewarm": self._core.prewarmed(),
            "known_environments": [msgspec.to_builtins(each) for each in self._core.known_environments()],
        }
        return {name: table for name, table in tables.items() if table}

    # -- connection ----------------------------------------------------------------------------------------------------

    def _connect(self, event: c.Event) -> None:
        """Give an event to the connection, and perform its actions."""
        now = self._clock.monotonic()
        self._connection_log.add([event], now)
        for action in self._connection.handle([event], now):
            self._perform_connection(action)

    def _perform_connection(self, action: c.Action) -> None:
        match action:
            case c.Deliver(envelope=envelope):
                self._deliver(envelope)
            case c.RequestForwarders():
                self._background.submit(self._request_forwarders)
            case c.OpenSocket(to=to):
                self._open_socket(to)
            case c.SendHello(ticket=ticket):
                self._send_hello(ticket)
            case c.Opened(welcome=welcome):
                _logger.info("connected to forwarder %s", welcome.forwarder_id)
                if notice := self._waking.on_awake(now=self._clock.monotonic()):
                    _logger.info(notice)
                self._events.append(ev.SessionOpened(welcome.forget))
                self._blobs.opened(welcome.relay_piece_bytes)
                self._file_pulls.opened(welcome.file_piece_bytes)
                self._status_reports.restart(heartbeat_s=welcome.heartbeat_s)
                self._status_at = self._clock.monotonic()
                self._on_connected()
            case c.SendHeartbeat():
                self._send_report(self._report(), self._clock.monotonic())
            case c.Close(politely=politely):
                if politely and self._connection.may_send(Goodbye):
                    self._send(Goodbye(reason="the endpoint was stopped"))
                self._uplink.close(linger_ms=1000 if politely else 0)
            case c.Closed(reason=reason):
                _logger.warning("not connected any more: %s", reason)
                self._events.append(ev.SessionClosed())
                self._blobs.closed()
                self._file_pulls.closed()
                self._files_for_others.closed()
                self._status_at = self._clock.monotonic()
            case c.Log(message=message):
                _logger.error(message)
            case c.GiveUp(error=error):
                _logger.error("giving up: %s", error)
                self._fatal = error
                self.stop(grace_s=0)
            case _:
                raise TypeError(f"no rule for {action}")

    def _request_forwarders(self) -> Callable[[], None]:
        """In a thread: request the forwarders' addresses."""
        try:
            answer = self._ask_api()
        except FarcallError as error:
            return lambda error=error: self._api_failed(error)  # type: ignore[misc]
        return lambda: self._answered(answer)

    def _answered(self, answer: ConnectAnswer) -> None:
        if answer.owner_id and answer.owner_id != self._fleet.owner_id:
            self._fleet.owner_id = answer.owner_id
            self._events.append(ev.OwnerKnown(answer.owner_id))
            self._on_owner(answer.owner_id)
        forwarders = tuple(c.Address(address, key) for address, key in answer.forwarders)
        ttl_s = answer.ticket_expires_at - time.time()
        self._connect(c.ApiAnswered(forwarders, answer.ticket, ttl_s))

    def _api_failed(self, error: FarcallError) -> None:
        if not isinstance(error, ForwarderWaking):
            _logger.warning("the API named no forwarder: %s", error)
        elif notice := self._waking.on_waking(now=self._clock.monotonic()):  # not at each retry
            _logger.warning("[%s] %s", error.record.code, notice)
        self._connect(c.ApiFailed(error.record, is_foreign=error.is_foreign))

    def _open_socket(self, to: c.Address) -> None:
        self._forwarder = to.address
        _logger.info("connecting to %s", to.address)
        try:
            self._uplink.open_socket(to)
        except zmq.ZMQError as error:
            self._connect(c.ConnectionLost(f"{to.address}: {error}"))

    def _send_hello(self, ticket: str) -> None:
        self._reported_generation = self._spool.generation
        self._send(
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

    def _receive_from_cloud(self) -> None:
        for event in self._uplink.connection_events():
            if event is HANDSHAKE_DONE:
                self._connect(c.HandshakeDone())
            else:
                self._receive_messages()  # those that came before the end
                _logger.warning("the connection to the forwarder failed: %s", event)
                self._connect(c.ConnectionLost(event, key_refused=event is KEY_REFUSED))
        self._receive_messages()

    def _receive_messages(self) -> None:
        try:
            for envelope in self._uplink.receive():
                self._connect(c.Received(envelope))
        except ProtocolError as error:
            self._connect(c.MalformedReceived(str(error)))

    def _deliver(self, envelope: Envelope) -> None:
        match envelope.message:
            case RunTasks() as message:
                if traces := trace_ids(task.traceparent for task in message.tasks):
                    _logger.info("tasks of the traces %s have come", traces)
                self._events.append(tasks_received(message, envelope.frames, self._opener.open))
            case CancelTasks(task_ids=task_ids):
                self._events.append(ev.CancelRequested(task_ids))
            case ResultsRecorded(tasks=refs):
                self._events.append(ev.ResultsRecorded(refs))
            case BlobGrant() as grant:
                if not self._files_for_others.granted(grant):
                    self._events.append(ev.BlobGranted(grant))
            case OutputRequest() as message:
                self._output_answers.requested(message)
            case FileWanted() as message:
                self._files_for_others.requested(message)
            case FilePiece() as message:
                self._file_pulls.received(message)
            case BlobPiece() | BlobTaken() as message:
                self._blobs.received(message, envelope.frames)
            case message:
                raise TypeError(f"no rule for {type(message).__name__}")

    def _on_blob(self, event: ev.Event) -> None:
        if isinstance(event, ev.PayloadFetched) and (task := self._core.find(event.task_id, event.seq)) is not None:
            payload, opened = self._opener.open(task.spec, event.payload.bodies[0] or b"")
            event = ev.PayloadFetched(event.task_id, event.seq, UserBytes([payload]), opened)
        self._events.append(event)

    def _send(self, message: Message, frames: tuple[bytes, ...] = ()) -> None:
        self._connect(c.Sent(message))
        self._uplink.send(Envelope(message, frames))

    # -- managers ------------------------------------------------------------------------------------------------------

    def _receive_from_managers(self, ready: Collection[object], now: float) -> None:
        size_bytes = 0
        for manager_id, message, bodies in self._fleet.receive(ready=ready, now=now):
            match message:
                case agent_manager.Registered() as registered:
                    _logger.info(
                        "%s on %s, pid %d: %d slots", manager_id, registered.hostname, registered.pid, registered.slots
                    )
                    self._events.append(
                        ev.ManagerRegistered(
                            manager_id,
                            registered.slots,
                            registered.ends_at,
                            registered.hostname,
                            registered.environments,
                            registered.image,
                            registered.latency_workers,
                        )
                    )
                case agent_manager.Progress() as progress:
                    if progress.problem:
                        _logger.warning("%s: %s", manager_id, progress.problem)
                    for level, text in self._problems_logged.changes(manager_id, progress.environments):
                        _logger.log(level, "%s: %s", manager_id, text)
                    results = UserBytes(cast("list[Bytes]", bodies))  # only those of calls are in files
                    self._events.append(ev.ManagerProgress(manager_id, progress, results))
                case agent_manager.OutputRead() as read:
                    self._outputs_read.append(read)
                case agent_manager.FilesReported() as report:
                    self._events.append(ev.CopiesReported(manager_id, report))
                case agent_manager.Ending(task_id=task_id):
                    self._events.append(ev.WorkerEnding(manager_id, task_id))
                case agent_manager.ValkeyRequested(submitter=submitter):
                    self._valkey.requested(manager_id, submitter, payer=self._core.payer_of(submitter))
                case message:
                    self._events.append(about_calls(manager_id, message, bodies))
            size_bytes += sum(map(len, bodies))
            if size_bytes > self._transfer_memory_bytes:
                return  # these go into the spool first; the rest waits where it is

    # -- files of tasks ------------------------------------------------------------------------------------------------

    def _receive_from_transfers(self) -> None:
        reports, lost = self._file_transfers.receive()
        if reports and (reports := self._file_pulls.reported(reports)):
            self._events.append(ev.TransfersReported(reports))
        if lost:
            self._file_pulls.process_lost()
            self._events.append(ev.TransfersLost(lost))

    # -- actions -------------------------------------------------------------------------------------------------------

    def _handle(self, now: float) -> None:
        """Give the events of this turn to the core and perform its actions. Outcomes of the spool are events, too."""
        events = self._events.copy()
        self._events.clear()
        could_write = self._core.can_write
        while (answer := self._perform(self._decide(events))) is not None:
            events = [answer]
        if self._core.can_write:  # nothing waits in memory
            self._blobs.settle()
            self._fleet.take()
        if self._core.can_write is not could_write:
            self._status_at = now
            if not could_write:
                _logger.info("the spool can be written again")

    def _decide(self, events: Sequence[ev.Event]) -> Sequence[do.Action]:
        epoch = self._clock.epoch()
        if events:  # before they are handled: a defect is in the log
            self._core_log.add(events, epoch)
        actions = self._core.handle(events, epoch)
        if actions and not events:
            self._core_log.add((), epoch)
        return actions

    def _perform(self, actions: Sequence[do.Action]) -> ev.SpoolWritten | ev.SpoolWriteFailed | None:
        """Perform actions in order, none after a failed write. The outcome of the write, if there is one."""
        answer = None
        for action in actions:
            match action:
                case do.WriteSpool():
                    try:
                        self._spool.commit(action)
                    except SpoolUnwritable as error:
                        _logger.log(logging.ERROR if self._core.can_write else logging.DEBUG, "%s", error)
                        return ev.SpoolWriteFailed(str(error))
                    answer = ev.SpoolWritten()
                    self._report_generation()
                case do.RunTasks(manager_id=manager_id, tasks=tasks):
                    self._fleet.order(manager_id, tasks)
                case do.CancelTasks(manager_id=manager_id, task_ids=task_ids):
                    self._fleet.cancel(manager_id, task_ids)
                case do.ReturnTasks(manager_id=manager_id, task_ids=task_ids):
                    self._fleet.take_back(manager_id, task_ids)
                case do.PassOn():
                    self._fleet.pass_on(action)
                case do.Prewarm(manager_id=manager_id, environment=environment, count=count, retry=retry):
                    self._fleet.prewarm(manager_id, environment, count, retry=retry)
                case do.FetchPayloads(tasks=tasks):
                    for task in tasks:
                        self._blobs.fetch(task)
                case do.UploadResults(uploads=uploads):
                    for task, grant in uploads:
                        self._blobs.upload(task, grant, functools.partial(self._body, task))
                case do.KeepOutput(outputs=outputs):
                    self._output.keep(outputs, now=self._clock.epoch())
                case do.CopyFiles(manager_id=manager_id, copies=copies):
                    self._fleet.copy_files(manager_id, copies)
                case do.MoveFiles(orders=orders):
                    self._file_transfers.order(orders)
                case do.LogFiles(messages=messages):
                    for message in messages:
                        _logger.warning("%s", message)
                case do.LogSigner(name=name, function_hash=function_hash, principals=principals):
                    _logger.info("function %s (%.12s) is signed by %s", name, function_hash, principals)
                case _:
                    self._send_reports(action)
        return answer

    def _send_if_open(self, message: Message) -> None:
        if self._connection.may_send(type(message)):
            self._send(message)

    def _report_generation(self) -> None:
        """Before tasks start that may not run twice: the cloud then refuses older copies of the spool."""
        if self._spool.generation != self._reported_generation and self._connection.may_send(Heartbeat):
            self._reported_generation = self._spool.generation
            self._send(Heartbeat(at=self._clock.epoch(), spool_generation=self._reported_generation))

    def _report(self) -> EndpointReport:
        """The present numbers."""
        return msgspec.structs.replace(
            self._core.report(), blocks=self._fleet.block_count, pending_blocks=self._fleet.pending_blocks
        )

    def _is_report_awaited(self) -> bool:
        """Whether the numbers may have changed since the last comparison, and can be sent."""
        return self._has_unreported_events and self._connection.may_send(Heartbeat)

    def _report_status(self, now: float) -> None:
        """Send the numbers if they have changed. One comparison for most turns of a busy agent."""
        if now < self._status_reports.due_at or not self._connection.may_send(Heartbeat):
            return
        self._has_unreported_events = False
        report = self._report()
        if self._status_reports.is_due(report, now=now):
            self._send_report(report, now)

    def _send_report(self, report: EndpointReport, now: float) -> None:
        self._send(Heartbeat(at=self._clock.epoch(), report=report))
        self._status_reports.sent(report, now=now)

    def _send_reports(self, action: do.Action) -> None:
        for envelope in messages_of(action, body=self._inline_body):
            if self._connection.may_send(type(envelope.message)):
                self._send(envelope.message, envelope.frames)

    def _measure_spool(self, now: float) -> None:
        room = self._spool.room()
        measured = ev.SpoolMeasured(room if room is not None and room[0] < room[1] else None)
        if measured != self._measured:
            self._measured = measured
            self._events.append(measured)
            self._handle(now)

    def _report_spool_problem(self) -> None:
        problem = self._core.spool_problem
        if bool(problem) is not self._has_spool_problem:
            self._has_spool_problem = bool(problem)
            _logger.warning("%s", problem or "there is room in the file system again")

    def _body(self, task: Task) -> Frame:
        result = task.result
        return self._spool.body(task) if result is None or result.body is None else bytes(result.body)

    def _inline_body(self, task: Task) -> bytes:
        return bytes(copy_of(self._body(task)))


def _about_transfer(row: Mapping[str, Any]) -> dict[str, object]:
    """A task whose files move, as the status shows it."""
    return {
        "task_id": row["task_id"],
        "state": "staging-to-node" if row.get("to_node") else row["state"],
        "files": f"{row['files_done']}/{row['files']}",
        "done_bytes": row["bytes"],
        "total_bytes": row.get("total"),
        "url": row.get("url", ""),
        "since": row["since"],
        "problem": row.get("problem", ""),
    }


def _about(node: agent_manager.Registered) -> dict[str, object]:
    """A node as the status shows it."""
    has = node.capacity
    numbers = {} if has is None else {"cores": has.cores, "memory_bytes": has.memory_bytes}
    accelerators = [] if has is None else list(has.accelerators)
    named = {"hostname": node.hostname, "block_id": node.block_id, "slots": node.slots}
    return {**named, **numbers, "accelerators": accelerators}
