"""LocalStack as a process, and everything it starts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final

import psutil

from farcall_common.errors import Unavailable
from farcall_localstack.bundles import THIS_PYTHON
from farcall_localstack.engines import postgres_bin, valkey_server

__all__ = [
    "HOST",
    "READY_FILE",
    "LocalStackServer",
    "answers",
    "end_group",
    "group_members",
    "is_localstack",
    "remove_state",
]

HOST: Final = "127.0.0.1"
READY_FILE: Final = "ready.json"
_START_TIMEOUT_S: Final = 300.0  # a machine under load takes many times the usual five
_STOP_TIMEOUT_S: Final = 6.0
_KILL_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.05
_ATTEMPTS: Final = 3  # another process may take a free port between our look and LocalStack's bind
_LOG_TAIL_BYTES: Final = 4000

_PROGRAM: Final = "localstack.runtime.main"

# What LocalStack and the plugin keep in the directory besides logs.
_SCRATCH: Final = "tmp"
_STATE: Final = (_SCRATCH, "cache", "code", "filesystem", "objects", "snapshots", "targets")

# How the forwarder's task differs from the one on AWS: any free port, loopback only, and nobody waits for it to drain.
_TASK_ENVIRONMENT: Final = {
    "FARCALL_FORWARDER_HOST": HOST,
    "FARCALL_FORWARDER_PORT": "0",
    "FARCALL_FORWARDER_HEALTH_PORT": "0",
    "FARCALL_FORWARDER_ADVERTISE": "{address}",  # its own, or the load balancer's
    "FARCALL_FORWARDER_DRAIN_S": "1",
    "FARCALL_FORWARDER_READY_FILE": f"{{task}}/{READY_FILE}",
}


class LocalStackServer:
    """One LocalStack in host mode with our plugin, its state in ``directory``.

    It leads a process group of its own, in which its children stay, so that ending the group ends all of it. It also
    ends when this process does, however this process ends, unless it has been let go. With ``database_certificate``, a
    PEM file with its key, its databases speak TLS.
    """

    def __init__(self, python: Path, *, directory: Path, database_certificate: Path | None = None) -> None:
        self._python = python
        self._database_certificate = database_certificate
        self.directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        # Not below the state directory: root runs PostgreSQL as another user, who must be able to enter it.
        self.database_directory = Path(tempfile.mkdtemp(prefix="farcall-localstack-db-"))
        self.database_directory.chmod(0o711)
        self.port = 0

    @property
    def pid(self) -> int:
        """LocalStack's process id, which is its process group's id too."""
        assert self._process is not None
        return self._process.pid

    @property
    def url(self) -> str:
        """Where every AWS API is."""
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        """Start it and wait until it answers.

        :raises Unavailable: if it ends or does not answer in time.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            self.port = _free_port()
            self._launch()
            try:
                self._wait_until_healthy()
            except Unavailable:
                self._end()
                if attempt == _ATTEMPTS:
                    raise
            else:
                return

    def let_go(self) -> None:
        """Leave it running when this process ends."""
        assert self._lifeline is not None
        os.write(self._lifeline, b".")

    def stop(self) -> None:
        """End LocalStack and everything it started, and remove all but the logs."""
        self._end()
        remove_state(self.directory, self.database_directory)

    def _launch(self) -> None:
        self._scratch.mkdir(exist_ok=True)
        theirs, self._lifeline = os.pipe()
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [self._python, "-m", _PROGRAM],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**self._environment(), "FARCALL_LOCALSTACK_LIFELINE_FD": str(theirs)},
                    cwd=self.directory,
                    pass_fds=(theirs,),
                    start_new_session=True,
                )
        finally:
            os.close(theirs)

    def _end(self) -> None:
        if self._process is not None:
            end_group(self._process.pid)
            self._process.wait()
            self._process = None
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    @property
    def _scratch(self) -> Path:
        return self.directory / _SCRATCH

    @property
    def _log(self) -> Path:
        return self.directory / "localstack.log"

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.directory),
            "LANG": "C.UTF-8",
            "TMPDIR": str(self._scratch),
            # plux keeps what it found in the environment here; a cache of its own is never stale.
            "XDG_CACHE_HOME": str(self.directory / "cache"),
            "FILESYSTEM_ROOT": str(self.directory / "filesystem"),
            "GATEWAY_LISTEN": f"{HOST}:{self.port}",
            "LOCALSTACK_HOST": f"{HOST}:{self.port}",
            "DISABLE_EVENTS": "1",
            "SKIP_SSL_CERT_DOWNLOAD": "1",
            "DNS_ADDRESS": "0",
            "LAMBDA_RUNTIME_EXECUTOR": "process",
            # A function that starts too slowly is started once more beside it, and each makes the others slower.
            "LAMBDA_RUNTIME_ENVIRONMENT_TIMEOUT": "150",
            "FARCALL_LOCALSTACK_PYTHON": sys.executable,
            "FARCALL_LOCALSTACK_PYTHON_TAG": THIS_PYTHON,
            "FARCALL_LOCALSTACK_POSTGRES_BIN": str(postgres_bin()),
            "FARCALL_LOCALSTACK_VALKEY": str(valkey_server()),
            "FARCALL_LOCALSTACK_DIRECTORY": str(self.directory),
            "FARCALL_LOCALSTACK_DATABASE_DIRECTORY": str(self.database_directory),
            "FARCALL_LOCALSTACK_TASK_ENVIRONMENT": json.dumps(_TASK_ENVIRONMENT),
            "FARCALL_LOCALSTACK_TASK_READY_FILE": READY_FILE,
            **(
                {"FARCALL_LOCALSTACK_DATABASE_CERTIFICATE": str(self._database_certificate)}
                if self._database_certificate
                else {}
            ),
        }

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            if answers(f"{self.url}/_localstack/health"):
                return
            if self._process.poll() is not None:
                raise Unavailable(f"LocalStack ended with status {self._process.returncode}: {self._log_tail()}")
            if time.monotonic() > deadline:
                raise Unavailable(f"LocalStack does not answer after {_START_TIMEOUT_S:.0f} s: {self._log_tail()}")
            time.sleep(_POLL_S)

    def _log_tail(self) -> str:
        return self._log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()


def remove_state(directory: Path, database_directory: Path | None = None) -> None:
    """Remove what a LocalStack that has ended left behind, except its logs."""
    leftovers = [*(directory / name for name in _STATE), *directory.glob("tasks/*/tmp"), *directory.glob("tasks/*/pid")]
    for leftover in (*leftovers, *([database_directory] if database_directory else [])):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def is_localstack(pid: int) -> bool:
    """Whether that process runs and is a LocalStack: numbers of processes are given out again."""
    try:
        return _PROGRAM in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False


def answers(url: str, *, token: str | None = None, timeout_s: float = 30.0) -> bool:
    """Whether a GET of ``url`` succeeds."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - loopback
    try:
        with urllib.request.urlopen(request, timeout=timeout_s):  # noqa: S310
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def end_group(group: int) -> None:
    """End a LocalStack and its process group: asked at first, then by force.

    LocalStack's shutdown stops our children at once, but it then may wait for threads of its own; there is nothing in
    them that we would miss, so it is not waited for once it is alone.
    """
    with contextlib.suppress(ProcessLookupError):  # of one that was killed there is nobody to ask
        os.kill(group, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while time.monotonic() < deadline and group_members(group) - {group}:
            time.sleep(_POLL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while group_members(group):
        if time.monotonic() > deadline:
            raise Unavailable(f"processes of group {group} cannot be ended: {sorted(group_members(group))}")
        time.sleep(_POLL_S)


def group_members(group: int) -> set[int]:
    """The living processes of a process group."""
    members = set()
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.add(process.pid)
    return members


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
