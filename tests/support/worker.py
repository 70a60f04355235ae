"""A real worker process, with the test in place of its manager."""

from __future__ import annotations

import collections
import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from farcall_common.payload import DATA_STRATEGIES, Serializer
from farcall_common.payload.functions import FunctionTable, Included
from farcall_common.task_options import TaskOptions
from farcall_endpoint.contracts.manager_worker import (
    CallOrder,
    Done,
    InputOrder,
    Order,
    Packet,
    Ready,
    Run,
    channel_pair,
)
from farcall_endpoint.host.shared_memory import Body, Frame, FrameList, bytes_of, cut
from farcall_endpoint.worker.settings import WorkerSettings
from tests.waiting import WAIT_S

P = TypeVar("P")

_END_S = 20.0
_serializer = Serializer()
_values = Serializer(allowed=DATA_STRATEGIES)


class WorkerUnderTest:
    """Sends orders and receives packets, each with a limit of time."""

    def __init__(self, directory: Path, settings: WorkerSettings, variables: Mapping[str, str], python: str) -> None:
        self.channel, end, claims = channel_pair()
        self._known: set[str] = set()
        self._received: collections.deque[tuple[Packet, Body]] = collections.deque()
        self.directory = directory
        directory.mkdir(exist_ok=True)
        with contextlib.ExitStack() as files:
            streams = [files.enter_context((directory.parent / name).open("ab+")) for name in ("stdout", "stderr")]
            self.process = subprocess.Popen(
                [python, "-m", "farcall_endpoint.worker", str(end.fileno()), str(claims.fileno())],
                pass_fds=(end.fileno(), claims.fileno()),
                cwd=directory,
                env={**os.environ, "FARCALL_ENDPOINT_ID": "e", **settings.to_variables(), **variables},
                stdout=streams[0],
                stderr=streams[1],
                start_new_session=True,
            )
        end.close()
        claims.close()
        assert isinstance(self.receive()[0], Ready)

    def receive(self) -> tuple[Packet, Body]:
        """The next packet of the worker."""
        while not self._received:
            self._poll(select.POLLIN)
        return self._received.popleft()

    def send(self, packet: Packet, body: Sequence[Frame] = ()) -> None:
        """Send a packet as soon as there is room for it. As a manager, it reads what the worker sends meanwhile."""
        while not self._poll(select.POLLIN | select.POLLOUT) & select.POLLOUT:
            pass
        self.channel.send(packet, body)

    def _poll(self, events: int) -> int:
        poll = select.poll()
        poll.register(self.channel.fileno(), events)
        found = poll.poll(WAIT_S * 1000)
        assert found, "the worker sends or reads nothing"
        if found[0][1] & select.POLLIN:
            received = self.channel.receive_shared()
            assert received is not None, "the worker has ended"
            self._received.append(received)
        return found[0][1]

    def expect(self, kind: type[P]) -> tuple[P, Body]:
        """The next packet, which has this type."""
        packet, body = self.receive()
        assert isinstance(packet, kind), packet
        return packet, body

    def order(
        self,
        function: Callable[..., Any] | None,
        *args: object,
        inputs: Sequence[tuple[InputOrder, Sequence[Frame]]] = (),
        call: CallOrder | None = None,
        task_id: str = "t",
        payload: bytes | None = None,
        options: TaskOptions | None = None,
        data_only: bool = False,
        kwargs: Mapping[str, object] | None = None,
        also: Sequence[str] = (),
        included: Included | None = None,
        files_dir: str = "",
        attempt: int = 1,
        submitter: str = "",
    ) -> None:
        """Send a call; without a function it collects its inputs. ``also``: tasks with the same function behind it."""
        body: list[Frame] = []
        functions: list[tuple[str, int]] = []
        function_hash = ""
        if function is not None:
            packed = FunctionTable(included).get(function, is_stage=True)
            code, function_hash = packed.body, packed.hash
            if function_hash not in self._known:
                self._known.add(function_hash)
                functions.append((function_hash, len(code)))
                body.append(code)
        payload = _serializer.pack_call(args, kwargs) if payload is None else payload
        order = Order(
            task_id,
            attempt,
            function_hash,
            len(payload),
            options or TaskOptions(),
            data_only=data_only,
            call=call,
            files_dir=files_dir,
            submitter=submitter,
        )
        others = [msgspec.structs.replace(order, task_id=name) for name in also]
        body += [payload, *[part for _, each in inputs for part in each], *[payload for _ in also]]
        self.channel.order(Run((order, *others), tuple(functions)), body)

    def run(self, function: Callable[..., Any] | None, *args: object, **order: Any) -> Done:
        """The end of a call, without its value."""
        self.order(function, *args, **order)
        return self.expect(Done)[0]

    def values(self, function: Callable[..., Any] | None, *args: object, **order: Any) -> list[Any]:
        """The values of a call that ends well, one for each buffer."""
        self.order(function, *args, **order)
        done, body = self.expect(Done)
        assert done.error is None, done.error
        return values_of(done, body)

    def close(self) -> None:
        """End the worker, as a manager that ends does."""
        self.channel.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:  # its task waits for what never comes
            self.process.kill()
            self.process.wait()
            raise


def values_of(done: Done, body: Body) -> list[Any]:
    """The values in a body."""
    return [value_of(frame) for frame in cut(body, done.parts or (len(body),))]


def value_of(frame: Body) -> Any:
    """The value in a buffer."""
    assert not isinstance(frame, FrameList)
    return _values.deserialize(bytes_of(frame))


@contextlib.contextmanager
def worker_under_test(
    tmp_path: Path,
    settings: WorkerSettings | None = None,
    *,
    variables: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> Iterator[WorkerUnderTest]:
    """A worker that runs in a directory below ``tmp_path``."""
    worker = WorkerUnderTest(tmp_path / "home", settings or WorkerSettings(), variables or {}, python)
    try:
        yield worker
    finally:
        worker.close()
