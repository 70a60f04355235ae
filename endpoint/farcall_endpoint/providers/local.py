"""Local provider: blocks on the agent's machine, each of one manager process."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
from collections.abc import Collection, Mapping, Sequence

from farcall_endpoint.host.pipe import Pipe, pipe_pair
from farcall_endpoint.providers.base import BlockStatus, Phase


class LocalProvider:
    """A :class:`Provider` that starts each manager in its own session: Ctrl-C in the terminal reaches only the agent.

    :param environment: environment variables of the managers.
    """

    walltime_s: float | None = None

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._epoll = select.epoll()

    def fileno(self) -> int:
        """A descriptor that is readable if a manager has ended whose block is not closed yet."""
        return self._epoll.fileno()

    def changed(self) -> None:
        """No operation: descriptors of processes are level-triggered."""

    def start(
        self,
        command: Sequence[str],
        *,
        block_id: str,  # noqa: ARG002 - for schedulers, which show it
        environment: Mapping[str, str],
        image: str = "",
    ) -> LocalBlock:
        assert not image, "no pod"
        pipe, there = pipe_pair()
        with there:
            arguments = [*command, "--agent-fd", str(there.fileno()), "--agent-pid", str(os.getpid())]
            return self.spawn(arguments, environment, pipe=pipe, descriptors=(there.fileno(),))

    def spawn(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        pipe: Pipe | None = None,
        descriptors: Collection[int] = (),
    ) -> LocalBlock:
        """Start a process, which inherits descriptors, with these variables in addition to the provider's."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**self._environment, **environment},
            pass_fds=tuple(descriptors),
            start_new_session=True,
        )
        return LocalBlock(process, self._epoll, pipe)

    def close(self) -> None:
        self._epoll.close()


class LocalBlock:
    """A :class:`Block` of one manager process on this machine."""

    def __init__(self, process: subprocess.Popen[bytes], epoll: select.epoll, pipe: Pipe | None) -> None:
        self.pipe = pipe
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._epoll: select.epoll | None = epoll
        epoll.register(self._pidfd, select.EPOLLIN)

    def status(self) -> BlockStatus:
        code = self._process.poll()
        if code is None:
            return BlockStatus(Phase.RUNNING)
        if self._epoll is not None:
            self._epoll.unregister(self._pidfd)
            self._epoll = None
        return BlockStatus(Phase.ENDED, f"killed by signal {-code}" if code < 0 else f"exit code {code}")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def close(self) -> None:
        self._process.wait()
        os.close(self._pidfd)
        if self.pipe is not None:
            self.pipe.close()
