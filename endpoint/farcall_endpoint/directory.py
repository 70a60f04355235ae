"""An endpoint's directory: its files, and who may use it.

::

    <home>/endpoints/<name>/
        config.yaml         what the user decides
        endpoint.json       the id that the cloud gave it
        curve.public        its CURVE key pair in Z85 (the secret one readable by its owner alone)
        curve.secret
        spool.sqlite3       tasks and results
        endpoint.log        the agent's; the older ones are endpoint.log.1, .2, ...
        logs/               of the managers, and what processes print when they crash
        daemon.pid          the running agent; locked for as long as it lives
        status.json         what it says about itself
        tasks_working_dir/  where tasks run

A process id alone proves nothing: it may be another process by now, or one on another node that shares this directory.
So ``daemon.pid`` names the host and the time at which the process started, and the agent holds a lock on the file,
which the kernel drops at its death.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil

from farcall_common.errors import ConfigurationError, EndpointInUse, FarcallError
from farcall_endpoint.transport import CurveKeys, new_curve_keys

__all__ = ["AgentProcess", "EndpointDirectory", "list_endpoints"]

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_START_TOLERANCE_S: Final = 2.0
_MAX_IPC_BYTES: Final = 100
"""Unix socket addresses end at 107 bytes on Linux."""


@dataclasses.dataclass(frozen=True)
class AgentProcess:
    """Who runs an endpoint. ``started_at`` is the process's own start in epoch seconds."""

    pid: int
    started_at: float
    hostname: str

    @classmethod
    def current(cls) -> AgentProcess:
        """This process."""
        return cls(os.getpid(), psutil.Process().create_time(), socket.gethostname())

    def is_here(self) -> bool:
        """Whether it runs on this machine."""
        return self.hostname == socket.gethostname()

    def find(self) -> psutil.Process | None:
        """The live process on this machine, or None when it is gone or its id belongs to another by now."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started_at) < _START_TOLERANCE_S
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            return None


@dataclasses.dataclass(frozen=True)
class EndpointDirectory:
    """The files of one endpoint."""

    path: Path

    @classmethod
    def of(cls, home: Path, name: str) -> EndpointDirectory:
        """The directory of a named endpoint.

        :raises ConfigurationError: if the name cannot be one of a directory.
        """
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"{name!r} is no name for an endpoint.", hint="Use letters, digits, dots, dashes and underscores."
            )
        return cls(home / "endpoints" / name)

    @property
    def name(self) -> str:
        """The endpoint's local name."""
        return self.path.name

    @property
    def config_file(self) -> Path:
        """What the user decides."""
        return self.path / "config.yaml"

    @property
    def spool_file(self) -> Path:
        """Tasks and results."""
        return self.path / "spool.sqlite3"

    @property
    def log_file(self) -> Path:
        """The log of the agent."""
        return self.path / "endpoint.log"

    @property
    def log_dir(self) -> Path:
        """The logs of managers."""
        return self.path / "logs"

    @property
    def console_file(self) -> Path:
        """What a detached agent and its children print past their logs: last words."""
        return self.log_dir / "console.log"

    @property
    def pid_file(self) -> Path:
        """Names the running agent."""
        return self.path / "daemon.pid"

    @property
    def exists(self) -> bool:
        """Whether the endpoint was configured."""
        return self.config_file.exists()

    def create(self) -> None:
        """Make the directory with a new key pair.

        :raises ConfigurationError: if it is there already, or cannot be made.
        """
        if self.exists:
            raise ConfigurationError(
                f"The endpoint {self.name} is configured already.", hint=f"Edit {self.config_file}, or delete it first."
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.chmod(0o700)
            keys = new_curve_keys()
            _write(self.path / "curve.public", keys.public)
            _write(self.path / "curve.secret", keys.secret)
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be made: {error.strerror}.") from error

    def require(self) -> None:
        """:raises ConfigurationError: if the endpoint was never configured."""
        if not self.exists:
            raise ConfigurationError(
                f"There is no endpoint {self.name} in {self.path.parent}.",
                hint=f"Make it with `farcall-endpoint configure {self.name}`.",
            )

    def require_writable(self) -> None:
        """:raises ConfigurationError: if an agent cannot keep its files here."""
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise ConfigurationError(
                f"{self.path} cannot be written to.",
                hint="Its file system is read only, or the directory is not yours; set FARCALL_HOME to another place.",
            )

    def read_keys(self) -> CurveKeys:
        """The endpoint's key pair.

        :raises ConfigurationError: if it is missing, or others may read the secret half.
        """
        secret = self.path / "curve.secret"
        try:
            if secret.stat().st_mode & 0o077:
                raise ConfigurationError(f"{secret} may be read by others.", hint=f"chmod 600 {secret}")
            return CurveKeys((self.path / "curve.public").read_text().strip(), secret.read_text().strip())
        except OSError as error:
            raise ConfigurationError(
                f"The key pair in {self.path} cannot be read: {error.strerror}.", hint="Configure the endpoint anew."
            ) from error

    def read_endpoint_id(self) -> str | None:
        """The id that the cloud gave; None before the first start."""
        data = _read_json(self.path / "endpoint.json")
        return str(data["endpoint_id"]) if data and "endpoint_id" in data else None

    def write_endpoint_id(self, endpoint_id: str) -> None:
        """Keep the id that the cloud gave."""
        _write(self.path / "endpoint.json", json.dumps({"endpoint_id": endpoint_id}))

    def read_status(self) -> dict[str, Any]:
        """What the agent last said about itself; empty when it never did."""
        return _read_json(self.path / "status.json") or {}

    def write_status(self, status: dict[str, Any]) -> None:
        """Say something about oneself; on a full disk, in the place of what was said before.

        :raises OSError: if that cannot be done either.
        """
        path, text = self.path / "status.json", json.dumps(status)
        try:
            _write(path, text)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            _overwrite(path, text)

    def read_agent(self) -> AgentProcess | None:
        """Who runs the endpoint, or did when it died; None after an orderly end."""
        data = _read_json(self.pid_file)
        try:
            return AgentProcess(int(data["pid"]), float(data["started_at"]), str(data["hostname"])) if data else None
        except (KeyError, TypeError, ValueError):
            return None

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Be the one agent of this endpoint.

        :raises EndpointInUse: naming the process that is.
        """
        descriptor = os.open(self.pid_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                other = self.read_agent()
                who = f"process {other.pid} on {other.hostname}" if other else "another process"
                raise EndpointInUse(
                    f"The endpoint {self.name} is run by {who}.", hint=f"`farcall-endpoint stop {self.name}` ends it."
                ) from error
            data = json.dumps(dataclasses.asdict(AgentProcess.current())).encode()
            try:
                os.ftruncate(descriptor, os.pwrite(descriptor, data, 0))
            except OSError as error:
                raise ConfigurationError(
                    f"{self.pid_file} cannot be written: {error.strerror}.", hint="Make room, or raise the quota."
                ) from error
            # Left empty at an orderly end, also one with an error of ours; full and unlocked, it tells of a crash.
            try:
                yield
            except FarcallError:
                os.ftruncate(descriptor, 0)
                raise
            os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)

    @property
    def script_dir(self) -> Path:
        """For the scripts and the output of a batch system's jobs."""
        return self.path / "submit_scripts"

    def fleet_address(self) -> str:
        """Where the agent's managers on this machine find it: a socket that only this user can reach."""
        socket_path = self.path / "managers.sock"
        if len(os.fsencode(socket_path)) > _MAX_IPC_BYTES:
            private = Path(tempfile.gettempdir()) / f"farcall-{os.getuid()}"
            private.mkdir(mode=0o700, exist_ok=True)
            state = private.lstat()
            if state.st_uid != os.getuid() or state.st_mode & 0o077:
                raise ConfigurationError(f"{private} is not a private directory of yours.", hint="Remove it.")
            socket_path = private / f"{self.path.stat().st_ino:x}.sock"
        return f"ipc://{socket_path}"


def list_endpoints(home: Path) -> list[EndpointDirectory]:
    """All endpoints that were configured, by name."""
    base = home / "endpoints"
    found = [EndpointDirectory(path) for path in sorted(base.iterdir())] if base.is_dir() else []
    return [directory for directory in found if directory.exists]


def _write(path: Path, text: str) -> None:
    """Replace a file as a whole, readable by its owner alone."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _overwrite(path: Path, text: str) -> None:
    """Write over the bytes of a file, which needs no room. Who reads just then may see no JSON."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, os.pwrite(descriptor, text.encode(), 0))
    finally:
        os.close(descriptor)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None
