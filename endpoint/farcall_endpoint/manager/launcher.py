"""Where workers come from. A launcher is a seam: a fresh process now, a fork from a prepared template later."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from farcall_endpoint.manager.processes import kill_tree
from farcall_endpoint.worker.capture import open_capture_file, read_tail
from farcall_endpoint.worker.channel import Channel, channel_pair

__all__ = ["FreshProcessLauncher", "WorkerLauncher", "WorkerProcess"]


@dataclasses.dataclass(frozen=True)
class WorkerProcess:
    """A worker as its manager holds it: the leader of its own session, so of its own process group.

    ``worker_end`` is a copy of the worker's socket: while it is open, what a worker sent can be read after its death.
    ``pidfd`` becomes readable at that.
    """

    process: subprocess.Popen[bytes]
    channel: Channel
    worker_end: socket.socket
    pidfd: int
    output: tuple[int, int]

    @property
    def pid(self) -> int:
        """Of the worker, and of its process group."""
        return self.process.pid

    def kill(self) -> None:
        """End the worker and everything that its tasks started, now."""
        kill_tree(self.pid)

    def tails(self) -> tuple[str, str]:
        """The last bytes of standard output and error, of a task that is running or has died."""
        stdout, stderr = (read_tail(descriptor) for descriptor in self.output)
        return stdout, stderr

    def bury(self) -> str:
        """Collect the dead process, end what is left of its group, and say how it died."""
        self.kill()
        code = self.process.wait()
        self.channel.close()
        self.worker_end.close()
        for descriptor in (self.pidfd, *self.output):
            os.close(descriptor)
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
            return f"killed by signal {-code}"
        return f"exit code {code}"


class WorkerLauncher(Protocol):
    """Starts workers."""

    def launch(self, worker_id: int, *, slot: int) -> WorkerProcess:
        """Start a worker; it says Ready on its channel when it is."""


class FreshProcessLauncher:
    """Starts each worker as a new interpreter of the manager's own environment.

    :param working_dir: where tasks run; must exist.
    :param environment: of the workers.
    """

    def __init__(self, *, working_dir: Path, environment: Mapping[str, str]) -> None:
        self._working_dir = working_dir
        self._environment = environment

    def launch(self, worker_id: int, *, slot: int) -> WorkerProcess:
        """Start a worker.

        :raises OSError: if the machine has no process, descriptor or disk left for it.
        """
        channel, worker_end, claims = channel_pair()
        output = (open_capture_file(self._working_dir), open_capture_file(self._working_dir))
        # -P: files in the working directory must not pass for modules
        command = [sys.executable, "-P", "-m", "farcall_endpoint.worker", str(worker_end.fileno()), str(claims)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output[0],
            stderr=output[1],
            pass_fds=(worker_end.fileno(), claims),
            cwd=self._working_dir,
            env={**self._environment, "FARCALL_WORKER_ID": str(worker_id), "FARCALL_WORKER_SLOT": str(slot)},
            start_new_session=True,  # a Ctrl-C on the terminal is the agent's business; the group can be killed whole
        )
        os.close(claims)
        return WorkerProcess(process, channel, worker_end, os.pidfd_open(process.pid), output)
