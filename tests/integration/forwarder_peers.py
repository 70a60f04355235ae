"""Peers of forwarders under test: a cloud that submits tasks, agents, clients; forwarders as threads and processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import httpx
import pytest
import zmq

from farcall_common import wire
from farcall_common.sockets import client_socket
from farcall_common.store import StoreSettings, open_stores
from farcall_common.store.model import Endpoint, Function, PeerKey, PeerKind, QueuedTask, Task
from farcall_common.store.settings import Stores
from farcall_common.wire import TaskState
from farcall_forwarder.core.policy import Policy
from farcall_forwarder.service import Service
from farcall_forwarder.settings import Settings
from tests.integration.store_servers import Valkey
from tests.support.stores import TICKET_KEY
from tests.task_fields import with_options
from tests.waiting import WAIT_S, wait_until

HEARTBEAT_S = 60.0
"""These peers send messages only on a test's request, and would seem dead with a shorter one."""
FUNCTION_BODY = b"packed function"

#: Short periods, so that half a minute in production takes a second here.
FAST = Policy(
    return_s=0.0,
    lease_s=1.5,
    maintenance_s=0.25,
    sweep_s=0.25,
    min_heartbeat_s=0.2,
    announce_s=0.2,
    presence_s=0.5,
    redirect_spread_s=0.0,
    drain_s=10.0,
    drain_grace_s=0.3,
)

M = TypeVar("M", bound=wire.Message)


class Listening(Protocol):
    """A forwarder that peers can connect to."""

    @property
    def address(self) -> str: ...
    @property
    def server_key(self) -> str: ...


class Watched(Protocol):
    """A forwarder with a health check."""

    @property
    def health_url(self) -> str: ...


class RunningForwarder:
    """A forwarder in a thread with its own event loop."""

    def __init__(self, stores: Stores, policy: Policy = FAST) -> None:
        settings = Settings(host="127.0.0.1", port=0, health_port=0)
        self.service = Service(settings, policy, stores)
        self.error: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="forwarder")
        self._thread.start()
        wait_until(lambda: bool(self.service.ready) or not self._thread.is_alive(), "the forwarder is ready")

    def _run(self) -> None:
        try:
            self._task = self._loop.create_task(self.service.run())
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 -- raised in the test that waits for it
            self.error = error
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    @property
    def address(self) -> str:
        return self.service.ready["address"]

    @property
    def server_key(self) -> str:
        return self.service.ready["server_key"]

    @property
    def health_url(self) -> str:
        return self.service.ready["health_url"]

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def drain(self) -> None:
        """Drain, as SIGTERM does."""
        self._loop.call_soon_threadsafe(self.service.drain)

    def kill(self) -> None:
        """End without any message, as far as a thread can."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._task.cancel)
        self.join()

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the forwarder does not end"


@dataclasses.dataclass
class Cloud:
    """The part of the API that forwarders depend on."""

    stores: Stores
    owner_id: str = dataclasses.field(default_factory=wire.new_id)
    function_id: str = dataclasses.field(default_factory=wire.new_id)

    def __post_init__(self) -> None:
        digest = hashlib.sha256(FUNCTION_BODY).hexdigest()
        self.function = Function(self.function_id, self.owner_id, "double", FUNCTION_BODY, digest)
        self.stores.functions.add_function(self.function)

    def add_endpoint(self) -> str:
        endpoint_id = wire.new_id()
        self.stores.endpoints.put_endpoint(Endpoint(endpoint_id, self.owner_id, f"test-{endpoint_id}"))
        return endpoint_id

    def tasks(self, endpoint_id: str, count: int, **fields: Any) -> list[Task]:
        """Tasks that are not submitted yet."""
        group_id, owner_id = fields.pop("task_group_id", wire.new_id()), fields.pop("owner_id", self.owner_id)
        return [
            Task(
                task_id=wire.new_task_id(),
                task_group_id=group_id,
                owner_id=owner_id,
                endpoint_id=endpoint_id,
                function_id=self.function_id,
                function_hash=self.function.body_hash,
                submitted_at=dt.datetime.now(dt.UTC),
                **with_options({"payload": b"payload %d" % number} | fields),
            )
            for number in range(count)
        ]

    def submit(self, tasks: Sequence[Task]) -> list[str]:
        """Write tasks ahead and queue them."""
        self.stores.tasks.add_tasks(tasks)
        self.enqueue(tasks)
        return [task.task_id for task in tasks]

    def enqueue(self, tasks: Sequence[Task]) -> None:
        self.stores.queue.enqueue([QueuedTask.of(task) for task in tasks])

    def submit_new(self, endpoint_id: str, count: int, **fields: Any) -> list[str]:
        return self.submit(self.tasks(endpoint_id, count, **fields))

    def task(self, task_id: str) -> Task:
        return self.stores.tasks.get_tasks([task_id])[task_id]

    def states(self, task_ids: Sequence[str]) -> set[TaskState]:
        return {task.state for task in self.stores.tasks.get_tasks(task_ids).values()}

    def until_all(self, task_ids: Sequence[str], state: TaskState) -> None:
        """Wait until all tasks are in this state; fail when one has ended in another one."""

        def are_all() -> bool:
            tasks = self.stores.tasks.get_tasks(task_ids).values()
            wrong = [task for task in tasks if task.state.is_terminal and task.state is not state]
            assert not wrong, f"{len(wrong)} of {len(tasks)} tasks, the first: {wrong[0]}"
            return all(task.state is state for task in tasks)

        wait_until(are_all, f"all tasks are {state}")


class Peer:
    """One connection to a forwarder, with its own key."""

    kind: PeerKind
    role: wire.Role

    def __init__(self, cloud: Cloud, subject: str, forwarder: Listening, *, admitted: bool = True) -> None:
        self.cloud = cloud
        self.subject = subject
        public, self.secret_key = zmq.curve_keypair()
        self.key = PeerKey(public.decode(), self.kind, subject)
        if admitted:
            if self.kind is PeerKind.AGENT:  # as the API does when it issues a ticket
                now = dt.datetime.now(dt.UTC)
                cloud.stores.endpoints.add_endpoint_key(subject, self.key.public_key, at=now, most=100)
            cloud.stores.queue.admit(self.key, ttl_s=600)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.connect(forwarder)

    def connect(self, forwarder: Listening) -> None:
        """Open a new connection and begin a session."""
        self.disconnect()
        socket = client_socket(
            self._context,
            server_key=forwarder.server_key,
            public_key=self.key.public_key,
            secret_key=self.secret_key.decode(),
        )
        socket.sndtimeo = round(1000 * WAIT_S)  # a connection that was refused takes nothing, for ever
        self.prepare(socket)
        socket.connect(forwarder.address)
        self.socket = socket
        self.session = wire.Session(self.role, heartbeat_s=HEARTBEAT_S, now=time.monotonic())
        self._unread: list[wire.Envelope] = []

    def prepare(self, socket: zmq.Socket[bytes]) -> None:
        """For tests that misuse a socket."""

    def disconnect(self) -> None:
        if hasattr(self, "socket"):
            self.socket.close()

    def close(self) -> None:
        self.disconnect()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ticket(self) -> str:
        return self.cloud.stores.tickets.issue(self.key, expires_at=time.time() + 600)

    def say(self, message: wire.Message, *frames: bytes) -> None:
        self.session.sent(message, now=time.monotonic())
        self.socket.send_multipart(wire.encode(wire.Envelope(message, frames)))

    def _receive(self, timeout_s: float) -> wire.Envelope | None:
        if not self.socket.poll(max(0, round(timeout_s * 1000))):
            return None
        envelope = wire.decode(self.socket.recv_multipart())
        self.session.received(envelope.message, now=time.monotonic())
        self.on_message(envelope)
        return envelope

    def on_message(self, envelope: wire.Envelope) -> None:
        """Automatic reaction of a peer to a message."""

    def hear(self, kind: type[M], *, timeout_s: float = WAIT_S) -> tuple[M, tuple[bytes, ...]]:
        """The next message of a kind; others are kept for later."""
        deadline = time.monotonic() + timeout_s
        for index, kept in enumerate(self._unread):
            if isinstance(kept.message, kind):
                del self._unread[index]
                return kept.message, kept.frames
        while time.monotonic() < deadline:
            if (envelope := self._receive(deadline - time.monotonic())) is not None:
                if isinstance(envelope.message, kind):
                    return envelope.message, envelope.frames
                self._unread.append(envelope)
        raise AssertionError(f"no {kind.__name__} within {timeout_s} s, but {[e.message for e in self._unread][:5]}")

    def hears_no(self, kind: type[wire.Message], *, for_s: float) -> bool:
        """Whether no message of this kind arrives for a while."""
        try:
            self.hear(kind, timeout_s=for_s)
        except AssertionError:
            return True
        return False


class Agent(Peer):
    """An agent whose spool is a dict."""

    kind = PeerKind.AGENT
    role = wire.Role.AGENT

    def __init__(
        self, cloud: Cloud, endpoint_id: str, forwarder: Listening, *, spool_id: str = "", admitted: bool = True
    ) -> None:
        self.instance_id = wire.new_id()
        self.spool_id = spool_id or wire.new_id()
        self.spool: dict[str, wire.TaskSpec] = {}
        self.payloads: dict[str, bytes] = {}
        self.functions: dict[str, bytes] = {}
        self.received: list[wire.TaskSpec] = []
        self.accepts = True
        super().__init__(cloud, endpoint_id, forwarder, admitted=admitted)

    def hello(self, **fields: Any) -> wire.Hello:
        held = tuple(wire.HeldTask(task_id=id_, attempt=spec.attempt) for id_, spec in self.spool.items())
        values: dict[str, Any] = {
            "endpoint_id": self.subject,
            "ticket": self.ticket,
            "instance_id": self.instance_id,
            "spool_id": self.spool_id,
            "protocol_versions": (wire.PROTOCOL_VERSION,),
            "heartbeat_s": HEARTBEAT_S,
            "held": held,
        }
        return wire.Hello(**(values | fields))

    def open_session(self, *, credit: int = 0, **fields: Any) -> wire.Welcome:
        self.say(self.hello(**fields))
        welcome, _ = self.hear(wire.Welcome)
        for ref in welcome.forget:
            self.spool.pop(ref.task_id, None)
        if credit:
            self.say(wire.Credit(tasks=credit))
        return welcome

    def is_let_in(self, forwarder: Listening) -> bool:
        """Whether a Hello on a new connection is welcomed, not refused."""
        self.connect(forwarder)
        self.say(self.hello())
        deadline = time.monotonic() + WAIT_S
        while (envelope := self._receive(deadline - time.monotonic())) is not None:
            if isinstance(envelope.message, wire.Welcome | wire.Refused):
                return isinstance(envelope.message, wire.Welcome)
        raise AssertionError("the forwarder says nothing")

    def on_message(self, envelope: wire.Envelope) -> None:
        match envelope.message:
            case wire.RunTasks(tasks=tasks, functions=functions):
                self.functions |= {f.function_hash: envelope.frames[f.body] for f in functions}
                for spec in tasks:
                    assert spec.function_hash in self.functions
                    if spec.payload is not None:
                        self.payloads[spec.task_id] = envelope.frames[spec.payload]
                self.received += tasks
                if self.accepts:
                    self.accept(tasks)
            case wire.ResultsRecorded(tasks=refs):
                for ref in refs:
                    self.spool.pop(ref.task_id, None)

    def accept(self, specs: Sequence[wire.TaskSpec]) -> None:
        """Put tasks into the spool, and report that."""
        self.spool |= {spec.task_id: spec for spec in specs}
        refs = tuple(wire.TaskRef(task_id=spec.task_id, attempt=spec.attempt) for spec in specs)
        self.say(wire.TasksAccepted(tasks=refs))

    def take(self, count: int, *, timeout_s: float = WAIT_S) -> list[wire.TaskSpec]:
        """Receive until ``count`` tasks have arrived since the session's start or the last take."""
        deadline = time.monotonic() + timeout_s
        while len(self.received) < count:
            assert time.monotonic() < deadline, f"{len(self.received)} of {count} tasks within {timeout_s} s"
            if (envelope := self._receive(0.2)) is not None:
                self._unread.append(envelope)
        taken, self.received = self.received[:count], self.received[count:]
        self._unread = [kept for kept in self._unread if not isinstance(kept.message, wire.RunTasks)]
        return taken

    def finish(self, specs: Sequence[wire.TaskSpec], body: bytes = b"result") -> None:
        """Report success, inline."""
        results = tuple(
            wire.ResultSpec(task_id=spec.task_id, attempt=spec.attempt, state=TaskState.SUCCESS, result=index)
            for index, spec in enumerate(specs)
        )
        self.say(wire.TaskResults(results=results), *[body] * len(specs))

    def until_recorded(self, task_ids: Sequence[str]) -> None:
        """Wait until the forwarder has acknowledged the record of these results."""
        missing = set(task_ids)
        while missing:
            recorded, _ = self.hear(wire.ResultsRecorded)
            missing -= {ref.task_id for ref in recorded.tasks}

    def serve(self, count: int) -> None:
        """Run tasks as they arrive, and return their credit, until ``count`` are recorded."""
        recorded: set[str] = set()
        deadline = time.monotonic() + 2 * WAIT_S
        while len(recorded) < count:
            assert time.monotonic() < deadline, f"{len(recorded)} of {count} recorded"
            envelope = self._receive(0.2)
            if envelope is None:
                continue
            match envelope.message:
                case wire.RunTasks(tasks=tasks):
                    self.finish(tasks)
                    self.say(wire.Credit(tasks=len(tasks)))
                case wire.ResultsRecorded(tasks=refs):
                    recorded |= {ref.task_id for ref in refs}
                case _:
                    pass


class Client(Peer):
    """A client with a result stream."""

    kind = PeerKind.CLIENT
    role = wire.Role.CLIENT

    def open(self, *groups: str, cursor: str | None = None) -> wire.StreamOpened:
        request = wire.OpenStream(
            ticket=self.ticket,
            protocol_versions=(wire.PROTOCOL_VERSION,),
            heartbeat_s=HEARTBEAT_S,
            task_group_ids=groups,
            cursor=cursor,
        )
        self.say(request)
        opened, _ = self.hear(wire.StreamOpened)
        self.cursor = opened.cursor
        return opened

    def results(self, count: int) -> dict[str, tuple[wire.StreamResult, bytes | None]]:
        """Results by task id, with their bodies, as soon as ``count`` have arrived."""
        found: dict[str, tuple[wire.StreamResult, bytes | None]] = {}
        while len(found) < count:
            ready, frames = self.hear(wire.ResultsReady)
            self.cursor = ready.cursor
            for result in ready.results:
                found[result.task_id] = (result, None if result.result is None else frames[result.result])
        return found


class ForwarderProcess:
    """``python -m farcall_forwarder``."""

    def __init__(self, environ: dict[str, str], directory: Path) -> None:
        ready_file = directory / f"ready-{wire.new_id()}.json"
        command = [sys.executable, "-m", "farcall_forwarder", "--ready-file", str(ready_file)]
        command += ["--host", "127.0.0.1", "--port", "0", "--health-port", "0"]
        self.log = directory / f"{ready_file.stem}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=os.environ | environ, stderr=log)
        wait_until(lambda: ready_file.exists() or self.process.poll() is not None, "the forwarder is ready")
        assert self.process.poll() is None, self.log.read_text()
        ready = json.loads(ready_file.read_text())
        self.address = ready["address"]
        self.server_key = ready["server_key"]
        self.health_url = ready["health_url"]

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        """It must still run when the block ends."""
        yield self
        assert self.process.poll() is None, self.log.read_text()

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)


Start = Callable[..., ForwarderProcess]


@contextlib.contextmanager
def forwarding(stores: Stores, policy: Policy = FAST) -> Iterator[RunningForwarder]:
    """A forwarder that ends with the block, and must still run by then."""
    forwarder = RunningForwarder(stores, policy)
    try:
        yield forwarder
    finally:
        was_alive = forwarder.is_alive
        forwarder.kill()
    if forwarder.error is not None:
        raise forwarder.error
    assert was_alive, "the forwarder has ended"


def health(forwarder: Watched) -> tuple[int, dict[str, Any]]:
    """Status code and JSON of the health check."""
    answer = httpx.get(forwarder.health_url, timeout=WAIT_S, trust_env=False)
    return answer.status_code, answer.json()


def check(forwarder: Watched, path: str) -> int:
    """Status code of another check of the forwarder's health port."""
    url = forwarder.health_url.replace("/healthz", path)
    return httpx.get(url, timeout=WAIT_S, trust_env=False).status_code


def counter(forwarder: Watched, name: str) -> int:
    return int(health(forwarder)[1]["counters"].get(name, 0))


@pytest.fixture
def environ(s3_environment: None, postgres_url: str, valkey: Valkey) -> dict[str, str]:
    """Settings of this test's real stores."""
    return {
        "FARCALL_DATABASE_URL": postgres_url,
        "FARCALL_QUEUE_URL": valkey.url,
        "FARCALL_BLOB_BUCKET": "farcall-test",
        "FARCALL_TICKET_KEY": TICKET_KEY,
    }


@pytest.fixture
def stores(environ: dict[str, str]) -> Iterator[Stores]:
    """PostgreSQL, Valkey and S3."""
    opened = open_stores(StoreSettings.from_environment(environ), max_connections=6)
    yield opened
    opened.close()


@pytest.fixture
def start(environ: dict[str, str], tmp_path: Path) -> Iterator[Start]:
    """Starts forwarder processes; kills those that still run at the end."""
    started: list[ForwarderProcess] = []

    def start_one(**variables: str) -> ForwarderProcess:
        started.append(ForwarderProcess(environ | variables, tmp_path))
        return started[-1]

    yield start_one
    for forwarder in started:
        forwarder.process.kill()
        forwarder.process.wait()


@pytest.fixture
def cloud(stores: Stores) -> Cloud:
    return Cloud(stores)


@pytest.fixture
def forwarder(stores: Stores) -> Iterator[RunningForwarder]:
    with forwarding(stores) as running:
        yield running


@pytest.fixture
def endpoint_id(cloud: Cloud) -> str:
    return cloud.add_endpoint()
