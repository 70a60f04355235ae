"""Scripted agent with one real manager process."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import zmq

from farcall_common.graphs import COLLECT, Graph, Input, Stage, pack_graph
from farcall_common.payload import Serializer
from farcall_common.task_options import Callee, TaskOptions
from farcall_endpoint.contracts import agent_manager
from farcall_endpoint.host.shared_memory import bytes_of
from farcall_endpoint.host.transport import fleet_socket, send_frames
from tests.support.endpoint.endpoint_process import wait_gone
from tests.waiting import WAIT_S

_STEP_MS: Final = 50


@dataclasses.dataclass(frozen=True)
class StageCall:
    """A stage of a graph. ``args`` have None in the places of ``inputs``; without a function it collects these."""

    function: Callable[..., Any] | None
    args: tuple[object, ...] = ()
    inputs: tuple[Input, ...] = ()
    needs: int = 0
    options: TaskOptions | None = None


class FakeAgent:
    """The agent of a manager that is started with it.

    :param options: further ones of the manager's command line.
    :param here: whether the manager may know this process, as on the same machine.
    """

    def __init__(self, directory: Path, *options: str, slots: int = 1, here: bool = True) -> None:
        self.registered: agent_manager.Registered | None = None
        self.progress: list[agent_manager.Progress] = []
        self.outputs: list[agent_manager.OutputRead] = []
        self.finished: dict[str, agent_manager.Finished] = {}
        self.tails: dict[str, bytes] = {}
        self.results: dict[str, bytes] = {}
        self.leaving = ""
        self._serializer = Serializer()
        self._identity = b""
        self._context = zmq.Context()
        self._socket = fleet_socket(self._context)
        address = f"ipc://{directory}/agent.sock"
        self._socket.bind(address)
        command = [sys.executable, "-P", "-m", "farcall_endpoint.manager", "--agent", address, "--block-id", "m"]
        command += ["--slots", str(slots), "--prefetch", "16", "--working-dir", str(directory), *options]
        command += ["--agent-pid", str(os.getpid())] if here else []
        self.manager = subprocess.Popen(command, start_new_session=True)

    def close(self) -> None:
        """End everything; nothing is left."""
        family = self.family()
        self.manager.kill()
        self.manager.wait()
        wait_gone(family)
        self._socket.close(linger=0)
        self._context.term()

    def family(self) -> list[psutil.Process]:
        """What the manager has started."""
        try:
            return psutil.Process(self.manager.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def workers(self) -> list[psutil.Process]:
        """The workers, also those that are about to become one."""
        return [process for process in self.family() if "farcall_endpoint.worker" in process.cmdline()]

    def listen(self, condition: Callable[[], object], *, timeout_s: float = WAIT_S, pinging: bool = False) -> None:
        """Receive the manager's messages until a condition holds; with ``pinging`` send heartbeats meanwhile.

        :raises TimeoutError: if it is not in time.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not so within {timeout_s} s")
            if self._socket.poll(_STEP_MS):
                self._take_in()
            if pinging and self.registered is not None:
                self.say(agent_manager.Ping())

    def say(self, message: agent_manager.FromAgent, bodies: list[bytes] | None = None, *, number: int = 0) -> None:
        """Send something to the manager, which must have spoken before."""
        send_frames(self._socket, [self._identity, *agent_manager.encode(message, bodies or [], number=number)])

    def run(
        self, task_id: str, function: Callable[..., Any], *args: object, submitter: str = "", **options: Any
    ) -> None:
        """Order a task of a submitter (empty: the endpoint's owner)."""
        body = self._serializer.pack_function(function)
        function_hash = hashlib.sha256(body).hexdigest()
        order = agent_manager.TaskOrder(task_id, 1, function_hash, 1, TaskOptions(**options), submitter=submitter)
        self.say(agent_manager.RunTasks((order,), ((function_hash, 0),)), [body, self._serializer.pack_call(args)])

    def run_graph(self, task_id: str, *calls: StageCall, output: int = -1, **options: Any) -> None:
        """Order a graph; its result is the value of the last call, or of another one."""
        bodies: dict[str, bytes] = {}
        stages: list[Stage] = []
        for call in calls:
            function_hash = ""
            if call.function is not None:
                body = self._serializer.pack_function(call.function)
                function_hash = hashlib.sha256(body).hexdigest()
                bodies.setdefault(function_hash, body)
            function = COLLECT if call.function is None else list(bodies).index(function_hash)
            name = "" if call.function is None else call.function.__name__
            stages.append(Stage(function, name, call.inputs, call.needs, call.options))
        packed = tuple(b"" if each.function is None else self._serializer.pack_call(each.args) for each in calls)
        payload = pack_graph(Graph(tuple(stages), packed, output % len(stages)))
        callees = tuple(Callee(function_id=each[:8], function_hash=each) for each in bodies)
        order = agent_manager.TaskOrder(
            task_id, 1, next(iter(bodies)), len(bodies), TaskOptions(callees=callees, **options)
        )
        functions = tuple((function_hash, number) for number, function_hash in enumerate(bodies))
        self.say(agent_manager.RunTasks((order,), functions), [*bodies.values(), payload])

    def value(self, task_id: str) -> Any:
        """The result of a task, when it has ended well."""
        self.listen(lambda: task_id in self.finished)
        assert self.finished[task_id].error is None, self.finished[task_id].error
        return self._serializer.deserialize(self.results[task_id])

    def read_output(
        self, *task_ids: str, at: int = 0, max_bytes: int = 65_536
    ) -> dict[str, agent_manager.RunningOutput]:
        """What the manager reads of tasks."""
        request_id, count = str(len(self.outputs)), len(self.outputs)
        wanted = tuple(agent_manager.WantedOutput(task_id, 1, at, at) for task_id in task_ids)
        self.say(agent_manager.ReadOutput(request_id, wanted, max_bytes))
        self.listen(lambda: len(self.outputs) > count)
        return {each.wanted.task_id: each for each in self.outputs[-1].tasks}

    def _take_in(self) -> None:
        self._identity, *frames = self._socket.recv_multipart()
        message, bodies = agent_manager.decode_from_manager(frames)
        if isinstance(message, agent_manager.Registered):
            self.registered = message
        elif isinstance(message, agent_manager.Progress):
            self.progress.append(message)
            self.finished.update({finished.task_id: finished for finished in message.finished})
            self.results |= {
                each.task_id: bytes(bytes_of(bodies[each.result]))
                for each in message.finished
                if each.result is not None
            }
            self.tails |= {
                each.task_id: bytes(bytes_of(bodies[each.output]))
                for each in message.finished
                if each.output is not None
            }
        elif isinstance(message, agent_manager.OutputRead):
            self.outputs.append(message)
        elif isinstance(message, agent_manager.Leaving):
            self.leaving = message.reason


@contextlib.contextmanager
def connected_agent(directory: Path, *options: str, slots: int = 1) -> Iterator[FakeAgent]:
    """An agent whose manager has a worker in each slot.

    :param options: as of :class:`FakeAgent`.
    """
    agent = FakeAgent(directory, *options, slots=slots)
    try:
        agent.listen(lambda: agent.progress and agent.progress[-1].workers == slots)
        yield agent
    finally:
        agent.close()
