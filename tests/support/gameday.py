"""Game day of the cloud tier: steady load, connected endpoints and a client of the API; counts of what each got."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from typing import Any, Final, Self

import httpx
import zmq
from zmq.utils.monitor import recv_monitor_message

import farcall
from benchmarks.forwarder.peers import PeerLoop, SimulatedEndpoint
from farcall_common import wire
from farcall_common.store import Endpoint, PeerKind, Stores
from farcall_localstack import Tier
from farcall_localstack.deploy import Deployer
from farcall_localstack.server import READY_FILE
from tests.waiting import WAIT_S, wait_until

_SERVE_S: Final = 0.05
_PROBE_S: Final = 0.25
_RETRY_S: Final = 0.5
#: A session that is not admitted within this time connects again, in seconds.
_ADMIT_S: Final = 30.0
#: A line of LocalStack's log about a request to the API, with its status.
_STATUS: Final = re.compile(r"/_aws/execute-api/.* => (\d{3})$", re.MULTILINE)
#: Of an internal error, and of API Gateway in place of the API.
_NOT_OURS: Final = frozenset({500, 502, 504})
#: Codes that say that a store is away, or a part that needs it.
_AWAY: Final = frozenset({"UNAVAILABLE", "STORAGE_LOW"})


def square(number: int) -> int:
    return number * number


class Load:
    """A user's program: one executor that submits tasks at a steady rate, until :meth:`finish`."""

    def __init__(self, client: farcall.Client, endpoint_id: str, *, rate_per_s: float = 10.0) -> None:
        self._executor = farcall.Executor(endpoint_id, client=client)
        self._pause_s = 1 / rate_per_s
        self._futures: list[farcall.ComputeFuture[int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._submit, name="load")
        self._thread.start()

    def _submit(self) -> None:
        while not self._stop.wait(self._pause_s):
            self._futures.append(self._executor.submit(square, len(self._futures)))

    @property
    def submitted(self) -> int:
        return len(self._futures)

    @property
    def answered(self) -> int:
        """Tasks with the right value."""
        done = [(number, future) for number, future in enumerate(self._futures) if future.done()]
        return sum(not future.exception() and future.result() == number * number for number, future in done)

    def wait_answered(self, more: int) -> None:
        """Wait until tasks that are submitted from now on have answers, as many as that."""
        first = len(self._futures)
        wait_until(lambda: sum(future.done() for future in self._futures[first:]) >= more, "new tasks have results")

    def finish(self) -> None:
        """Submit no more, and wait for all results.

        :raises AssertionError: if a task has another outcome than its value.
        """
        self._stop.set()
        self._thread.join(WAIT_S)
        _, open_ = wait(self._futures, timeout=WAIT_S)
        wrong = [future for future in self._futures if future.done() and future.exception()]
        assert not open_, f"{len(open_)} of {self.submitted} tasks have no answer"
        assert not wrong, f"{len(wrong)} of {self.submitted} tasks failed, the first: {wrong[0].exception()!r}"
        assert self.answered == self.submitted

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        self._executor.shutdown(wait=False, cancel_futures=True)


@dataclasses.dataclass(eq=False)
class _Session(SimulatedEndpoint):
    """An endpoint that does what a forwarder asks for, as an agent does."""

    connect_at: float | None = None  # monotonic; None while it is connected, or connects
    connected_at: float = 0.0
    is_redirected: bool = False
    monitor: zmq.Socket[bytes] | None = None

    def receive(self, message: wire.Message) -> None:
        match message:
            case wire.Redirect(retry_after_s=retry_after_s):
                self.is_redirected = True
                self.connect_at = time.monotonic() + retry_after_s
            case wire.Refused(error=error) if error.get("retryable"):
                self.is_redirected = True  # the forwarder ends the connection after its word
                self.connect_at = time.monotonic() + (error.get("retry_after_s") or _RETRY_S)
            case _:
                super().receive(message)


class Sessions:
    """Simulated endpoints, each with a connection and a session of its own: how many were redirected, and how many were
    cut without a word."""

    def __init__(self, stores: Stores, count: int) -> None:
        self.redirected = 0
        self.cut = 0
        self._stores = stores
        wait_until(stores.queue.forwarders, "a forwarder has announced itself")
        self._forwarder = stores.queue.forwarders()[0]  # behind a load balancer all have one address and key
        self._sessions = [self._register(number) for number in range(count)]
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="sessions")
        self._thread.start()

    def _register(self, number: int) -> _Session:
        session = _Session(wire.new_id(), PeerKind.AGENT)
        self._stores.endpoints.put_endpoint(Endpoint(session.subject, wire.new_id(), f"session-{number}"))
        now = dt.datetime.now(dt.UTC)
        self._stores.endpoints.add_endpoint_key(session.subject, session.key.public_key, at=now)
        self._stores.queue.admit(session.key, ttl_s=3600)
        return session

    @property
    def count(self) -> int:
        return len(self._sessions)

    def wait_open(self) -> None:
        """Wait until each endpoint has a session."""

        def are_open() -> bool:
            if self._error:
                raise self._error
            return all(session.is_open and session.connect_at is None for session in self._sessions)

        wait_until(are_open, "each endpoint has a session")

    def _run(self) -> None:
        try:
            with PeerLoop(self._stores.tickets) as loop:
                self._connect(loop, self._sessions)
                while not self._stop.is_set():
                    loop.serve(_SERVE_S)
                    self._watch_peers(loop)
                for session in self._sessions:
                    self._disconnect(loop, session)
        except BaseException as error:
            self._error = error
            raise

    def _watch_peers(self, loop: PeerLoop) -> None:
        now = time.monotonic()
        for session in self._sessions:
            if _is_disconnected(session):
                loop.drain(session)  # messages from before the end
                if not session.is_redirected:
                    self.cut += 1
                    session.connect_at = now
            if session.connect_at is None and not session.is_open and now - session.connected_at > _ADMIT_S:
                session.connect_at = now
        due = [session for session in self._sessions if session.connect_at is not None and session.connect_at <= now]
        if due:
            self.redirected += sum(session.is_redirected and session.is_open for session in due)
            for session in due:
                self._disconnect(loop, session)
            self._connect(loop, due)

    def _connect(self, loop: PeerLoop, sessions: Sequence[_Session]) -> None:
        loop.connect(sessions, self._forwarder)
        for session in sessions:
            assert session.socket is not None
            session.monitor = session.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            session.is_redirected, session.connect_at, session.connected_at = False, None, time.monotonic()

    @staticmethod
    def _disconnect(loop: PeerLoop, session: _Session) -> None:
        if session.socket is not None:
            assert session.monitor is not None
            session.socket.disable_monitor()
            session.monitor.close()
            session.monitor = None
            loop.disconnect([session])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)


def _is_disconnected(session: _Session) -> bool:
    if session.monitor is None:
        return False
    found = False
    with contextlib.suppress(zmq.Again):
        while True:
            recv_monitor_message(session.monitor, zmq.NOBLOCK)
            found = True
    return found


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer of the API: status 0 if the connection ended without one."""

    path: str
    status: int
    code: str
    has_retry_after: bool
    took_s: float


class Probe:
    """A client of the API that repeats nothing, and a load balancer that asks the forwarders whether they live."""

    #: A path that needs the database, and one that needs no store.
    STORED: Final = "/v3/functions"
    PLAIN: Final = "/v2/version"

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._log = tier.directory / "localstack.log"
        self._log_began = self._log.stat().st_size
        self.answers: list[Answer] = []
        #: Forwarders that did not answer `/livez`, by task. One that ends does so shortly before it has ended.
        self._silent: dict[str, str] = {}
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(work,), name="probe")
            for work in (lambda: self._ask(self.STORED), lambda: self._ask(self.PLAIN), self._check_forwarders)
        ]
        for thread in self._threads:
            thread.start()

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._stop.wait(_PROBE_S):
            work()

    def _ask(self, path: str) -> None:
        began = time.monotonic()
        headers = {"Authorization": f"Bearer {self._tier.token}"}
        try:
            found = httpx.get(f"{self._tier.api_url}{path}", headers=headers, timeout=WAIT_S)
        except httpx.TransportError as error:
            self.answers.append(Answer(path, 0, repr(error), False, time.monotonic() - began))
            return
        code = ""
        if not found.is_success:
            with contextlib.suppress(ValueError, AttributeError):
                code = str(found.json().get("code", ""))
        took_s = time.monotonic() - began
        self.answers.append(Answer(path, found.status_code, code, "retry-after" in found.headers, took_s))

    def _check_forwarders(self) -> None:
        for pid_file in self._tier.directory.glob("tasks/*/pid"):
            try:
                url = json.loads((pid_file.parent / READY_FILE).read_text(encoding="utf-8"))["health_url"]
                httpx.get(url.replace("/healthz", "/livez"), timeout=WAIT_S).raise_for_status()
            except FileNotFoundError:
                continue
            except httpx.HTTPError as error:
                self._silent[pid_file.parent.name] = repr(error)

    def dead(self) -> list[str]:
        """Forwarders that run and did not answer `/livez`, and those that ECS stopped for their health."""
        running = [pid_file.parent.name for pid_file in self._tier.directory.glob("tasks/*/pid")]
        ecs = Deployer(self._tier.endpoint_url).client("ecs")
        stopped = ecs.list_tasks(cluster=self._tier.name, desiredStatus="STOPPED")["taskArns"]
        tasks = ecs.describe_tasks(cluster=self._tier.name, tasks=stopped)["tasks"]
        return [
            *(f"{task}: {self._silent[task]}" for task in running if task in self._silent),
            *(each["taskArn"] for each in tasks if "health checks" in each["stoppedReason"]),
        ]

    def count(self, path: str) -> Counter[str]:
        """Numbers of answers to a path, by status and code."""
        return Counter(f"{each.status} {each.code}".strip() for each in self.answers if each.path == path)

    def statuses(self) -> Counter[int]:
        """Statuses of the answers to all clients, also to the load's, by LocalStack's log."""
        with self._log.open("rb") as log:
            log.seek(self._log_began)
            return Counter(int(found[1]) for found in _STATUS.finditer(log.read().decode(errors="replace")))

    def check(self) -> None:
        """:raises AssertionError: if the API gave an answer that a client cannot act on, or a forwarder was dead."""
        assert not (statuses := self.statuses()).keys() & _NOT_OURS, statuses
        untyped = [
            each
            for each in self.answers
            if each.status != 200 and not (each.status == 503 and each.code in _AWAY and each.has_retry_after)
        ]
        assert not untyped, f"{len(untyped)} of {len(self.answers)} answers, the first: {untyped[:3]}"
        assert {each.status for each in self.answers if each.path == self.PLAIN} == {200}, self.count(self.PLAIN)
        assert not (dead := self.dead()), dead

    def wait_stored(self) -> None:
        """Wait until the next answer from the database."""
        first = len(self.answers)
        wait_until(
            lambda: any(each.path == self.STORED and each.status == 200 for each in self.answers[first:]),
            "the API uses the database",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S)


@dataclasses.dataclass
class Day:
    """All that runs while an event happens."""

    load: Load
    sessions: Sessions
    probe: Probe
    began: float = dataclasses.field(default_factory=time.monotonic)
    #: Seconds from the end of the event until a new task had its result.
    recovered_s: float = 0.0

    def event_over(self) -> None:
        """Wait until the database, new tasks and all sessions are as before the event."""
        over = time.monotonic()
        self.probe.wait_stored()
        self.load.wait_answered(5)
        self.sessions.wait_open()
        self.recovered_s = time.monotonic() - over

    def figures(self) -> dict[str, Any]:
        """The measured result, for a report."""
        return {
            "submitted": self.load.submitted,
            "answered": self.load.answered,
            "sessions": self.sessions.count,
            "redirected": self.sessions.redirected,
            "cut": self.sessions.cut,
            "of the API": dict(self.probe.statuses()),
            "slowest_s": round(max((each.took_s for each in self.probe.answers), default=0.0), 1),
            "recovered_s": round(self.recovered_s, 1),
            "took_s": round(time.monotonic() - self.began, 1),
        }


#: Measured results of all events so far, by name.
FIGURES: Final[dict[str, dict[str, Any]]] = {}


@contextlib.contextmanager
def game_day(
    name: str, tier: Tier, stores: Stores, client: farcall.Client, endpoint_id: str, *, sessions: int
) -> Iterator[Day]:
    """Load, sessions and a probe around an event, whose figures go to :data:`FIGURES`. Afterwards no task may be lost,
    no session cut without a redirect, and each answer of the API must be typed.

    :raises AssertionError: otherwise.
    """
    with Sessions(stores, sessions) as connected, Load(client, endpoint_id) as load, Probe(tier) as probe:
        day = Day(load, connected, probe)
        connected.wait_open()
        load.wait_answered(5)
        try:
            yield day
            day.event_over()
            load.finish()
        finally:
            FIGURES[name] = day.figures()
        probe.check()
        assert connected.cut == 0, f"{connected.cut} of {connected.count} sessions were cut"
