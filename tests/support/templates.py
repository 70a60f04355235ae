"""Templates in tests: started, forked from, and given tasks, as a manager does."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from farcall_common.payload import Serializer
from farcall_common.task_options import TaskOptions
from farcall_endpoint.contracts.manager_worker import Channel, Done, NewModules, Order, Packet, Ready, Run, channel_pair
from farcall_endpoint.environments.templates.templates import ForkedProcess, Template, TemplateSuspected, start_template
from farcall_endpoint.worker.boot import Boot, Descriptors
from tests.waiting import WAIT_S

ORDINARY_USER = 1001

_AS_USER = """
import os, sys
from farcall_endpoint.host.isolation import confinement, landlock
from farcall_endpoint.worker import namespaces, template
os.setgroups([])
os.setresgid(*[int(sys.argv[2])] * 3)
os.setresuid(*[int(sys.argv[2])] * 3)
namespaces.set_dumpable(True)
template.main(int(sys.argv[1]))
"""


@dataclasses.dataclass
class ForkedWorker:
    """A worker that is a fork, with the manager's ends."""

    process: ForkedProcess
    channel: Channel
    output: tuple[int, int]
    modules: list[str] = dataclasses.field(default_factory=list)

    def receive(self) -> Packet | None:
        """The next packet; None if the worker is gone."""
        return (received := self._receive()) and received[0]

    def _receive(self) -> tuple[Packet, Any] | None:
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        if not poll.poll(WAIT_S * 1000):
            raise TimeoutError("no packet of a worker")
        return self.channel.receive()

    def ready(self) -> ForkedWorker:
        """After its first packet."""
        packet = self.receive()
        assert isinstance(packet, Ready), self.stderr()
        return self

    def send(self, function: Callable[..., Any], *args: Any) -> None:
        """Send a task."""
        serializer = Serializer()
        body, payload = serializer.pack_function(function), serializer.pack_call(args)
        function_hash = hashlib.sha256(body).hexdigest()
        order = Order("t", 1, function_hash, len(payload), TaskOptions())
        self.channel.order(Run((order,), ((function_hash, len(body)),)), [body, payload])

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a task."""
        self.send(function, *args)
        return self.result()

    def result(self) -> Any:
        """The result of the task that was sent."""
        while True:
            received = self._receive()
            assert received is not None, self.stderr()
            packet, body = received
            if isinstance(packet, NewModules):
                self.modules += packet.names
            if isinstance(packet, Done):
                assert packet.error is None, packet.error
                return Serializer().deserialize(bytes(body))

    def stderr(self) -> str:
        """What it has written to standard error."""
        return os.pread(self.output[1], 100_000, 0).decode(errors="replace")

    def end(self) -> int:
        """Kill it, and free what belongs to it; its exit code."""
        self.process.kill()
        return self.ended()

    def ended(self) -> int:
        """Wait for its end; its exit code."""
        code = self.process.wait()
        self.channel.close()
        for descriptor in (self.process.pidfd, *self.output):
            os.close(descriptor)
        return code


def fork_worker(template: Template, *, variables: Mapping[str, str] | None = None, **boot: Any) -> ForkedWorker:
    """A worker, however slow this machine is. Variables are those of this process unless they are given."""
    channel, end, claims = channel_pair()
    output = (unnamed_file(), unnamed_file())
    try:
        what = Boot(variables=dict(os.environ if variables is None else variables), **{"directory": "/", **boot})
        process = _fork(template, what, Descriptors(end.fileno(), claims.fileno(), *output))
    except BaseException:
        channel.close()
        for descriptor in output:
            os.close(descriptor)
        raise
    finally:
        end.close()
        claims.close()
    return ForkedWorker(process, channel, output)


def _fork(template: Template, boot: Boot, descriptors: Descriptors) -> ForkedProcess:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return template.fork(boot, descriptors)
        except TemplateSuspected:
            assert time.monotonic() < deadline
            select.select([template], [], [], 1.0)
            template.serve()


@contextlib.contextmanager
def running_template(*, user: int | None = None, serves: bool = True, **options: Any) -> Iterator[Template]:
    """A template of this Python, which has ended when the block ends; ``user``: its user."""
    command: tuple[str, ...] = ()
    variables = options.pop("variables", dict(os.environ))
    if user is not None:
        # The interpreter of the tests may be where that user may not look: it changes when all is imported.
        command = (sys.executable, "-P", "-c", _AS_USER)
    process, template = _start(command, user, variables=variables, **options)
    try:
        wait_for(template, lambda: template.is_serving or template.is_over)
        if serves:
            assert template.is_serving, template.problem
        yield template
    finally:
        template.close()
        if not template.is_over and template.pid:
            os.kill(template.pid, signal.SIGKILL)  # the test has failed
            wait_for(template, lambda: template.is_over)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(WAIT_S)


def _start(
    command: tuple[str, ...], user: int | None, *, variables: Mapping[str, str], **options: Any
) -> tuple[subprocess.Popen[bytes], Template]:
    if user is None:
        process, connection = start_template(variables=variables)
        return process, Template(connection, **options)
    with tempfile.TemporaryDirectory() as directory:
        # ``start_template`` writes its own program behind: this one takes the last argument, the descriptor.
        wrapper = Path(directory) / "as-user"
        wrapper.write_text(f'#!/bin/sh\nfor last; do :; done\nexec {command[0]} -P -c "$PROGRAM" "$last" {user}\n')
        wrapper.chmod(0o755)
        process, connection = start_template((str(wrapper),), variables={**variables, "PROGRAM": _AS_USER})
        template = Template(connection, **options)
        wait_for(template, lambda: template.is_serving or template.is_over)  # then the file has been read
        return process, template


def wait_for(template: Template, condition: Callable[[], object]) -> None:
    """Serve a template until a condition holds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("a template did not get there")
        poll = select.poll()
        if not template.is_over:
            poll.register(template, select.POLLIN)
        poll.poll(20)
        template.serve()


def unnamed_file() -> int:
    """A descriptor of a file for output."""
    descriptor, name = tempfile.mkstemp()
    Path(name).unlink()
    # A file for appending, as a launcher opens it.
    reopened = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    os.close(descriptor)
    return reopened
