"""``LocalTier``: a context manager that runs a local tier, for tests, benchmarks and the demo."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from farcall_common.errors import FarcallError, Unavailable
from farcall_local.control import launch
from farcall_local.engines import Valkey
from farcall_local.postgres_files import forget_database
from farcall_local.process import log_tail
from farcall_local.state import TierState

_STOP_WITHIN_S = 120.0
_POLL_S = 0.02


class LocalTier:
    """PostgreSQL, Valkey, blobs, API and forwarder as processes of this machine, for the duration of the ``with``
    block.

    ``directory`` keeps the data for the next time; without it a temporary one is used and removed at the end. Each name
    in ``users`` becomes a user with its own token; ``token`` is that of the first. The tier ends when the process that
    entered the block ends, however it ends.

    :raises FarcallError: on entering, if the tier cannot start; with the end of the log.
    """

    def __init__(self, directory: Path | None = None, *, users: Sequence[str] = ("me",)) -> None:
        self._temporary = directory is None
        self._users = users
        self.directory = directory or Path(tempfile.mkdtemp(prefix="farcall-local-"))
        self._supervisor: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._supervisor = launch(self.directory, users=self._users, until_eof=True)
        except FarcallError:
            self._remove_if_temporary(keep_logs=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._supervisor is not None
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.close()  # the supervisor stops at the end of its input
        try:
            self._supervisor.wait(timeout=_STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()  # and the kernel ends its children
            self._supervisor.wait()
        self._remove_if_temporary(keep_logs=False)

    @property
    def state(self) -> TierState:
        """The state last written by the supervisor."""
        state = TierState.read(self.directory)
        assert state is not None
        return state

    @property
    def api_url(self) -> str:
        return self.state.api_url

    @property
    def token(self) -> str:
        return self.state.token

    @property
    def tokens(self) -> Mapping[str, str]:
        """The token of each identity, by name."""
        return self.state.tokens

    def environment(self) -> dict[str, str]:
        """The environment variables of a client or an endpoint of this tier."""
        return {"FARCALL_API_URL": self.api_url, "FARCALL_TOKEN": self.token}

    def log_path(self, name: str) -> Path:
        """The log of a process: supervisor, postgres, valkey, blobs, api or forwarder."""
        return self.directory / "logs" / f"{name}.log"

    def pid(self, name: str) -> int | None:
        """The process id of a part, or None while it is down."""
        return self.state.processes[name].pid

    def kill(self, name: str, *, signal_number: int = signal.SIGKILL) -> int:
        """Kill a part; the supervisor restarts it. Returns the id of the killed process."""
        pid = self.wait_up(name)
        os.kill(pid, signal_number)
        return pid

    def wait_up(self, name: str, *, other_than: int | None = None, within_s: float = 240.0) -> int:
        """Wait until a part runs, as another process than ``other_than`` if given; returns its process id.

        :raises Unavailable: after ``within_s`` seconds.
        """
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            pid = self.pid(name)
            if pid is not None and pid != other_than:
                return pid
            time.sleep(_POLL_S)
        raise Unavailable(f"{name} did not start within {within_s:g} s:\n{log_tail(self.log_path(name))}")

    def wipe_queue(self) -> None:
        """Delete all of Valkey's data, as if the node were lost.

        :raises Unavailable: if Valkey does not do it.
        """
        password = urllib.parse.urlsplit(self.state.queue_url).password
        assert password is not None
        answer = asyncio.run(Valkey(self.directory, password).command("FLUSHALL SYNC"))
        if answer != "+OK":
            raise Unavailable(f"cannot wipe Valkey: {answer}")

    def _remove_if_temporary(self, *, keep_logs: bool) -> None:
        if not self._temporary:
            return
        forget_database(self.directory)
        if not keep_logs:
            shutil.rmtree(self.directory, ignore_errors=True)
            return
        for path in self.directory.iterdir():
            if path.name != "logs":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
