"""Directory of an endpoint: its files, and the lock of its agent.

::

    <home>/endpoints/<name>/
        config.yaml         the configuration
        endpoint.json       its id in the cloud, the identity of its owner, and the API that made its credential
        curve.public        its CURVE key pair in Z85 (the secret one readable by its owner alone)
        curve.secret
        credential.secret   its credential for that API, which can connect it and do nothing else
        sealing.secret      its identity, and the keys with which it opens sealed calls
        globus.json         its login at Globus, for files of tasks
        globus/             its transfers at Globus
        spool.sqlite3       tasks and results
        spool.bodies/       those of their bodies that are large
        output.sqlite3      the end of what recent tasks printed
        endpoint.log        log of the agent; rotated files are endpoint.log.1, .2, ...
        logs/               logs of the managers, and output of crashed processes
        daemon.pid          the running agent; locked for as long as it lives
        status.json         its last status
        prewarm.json        environments of which the owner wants workers warm
        baselines.json      how long functions take while the endpoint is idle
        events-*.jsonl      its last events, for bug reports
        tasks_working_dir/  where tasks run

A process id alone proves nothing: it may be another process by now, or one on another node that shares this directory.
So ``daemon.pid`` names the host and the time at which the process started, and the agent holds a lock on the file,
which the kernel drops at its death. All of these files can be removed while it runs; so it also holds an abstract
socket (unix(7)), named after the number of the directory. It has no file that could be removed, and the kernel drops
it with the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import errno
import fcntl
import json
import logging
import math
import os
import re
import socket
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import psutil

from farcall_common.credentials import Credentials, from_environment, read_settings
from farcall_common.errors import ConfigurationError, EndpointInUse, FarcallError
from farcall_common.files import make_directory, write_whole
from farcall_endpoint.contracts.agent_manager import PrewarmRequest
from farcall_endpoint.host.transport import CurveKeys, new_curve_keys

if TYPE_CHECKING:
    from farcall_common.sealing import SealingSecrets

_logger = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_START_TOLERANCE_S: Final = 2.0
_prewarms: Final = msgspec.json.Decoder(tuple[PrewarmRequest, ...])
_baselines: Final = msgspec.json.Decoder(dict[str, float])


@dataclasses.dataclass(frozen=True)
class AgentProcess:
    """The process that runs an endpoint. ``started_at`` is the process's own start in epoch seconds."""

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
                f"{name!r} is not a valid endpoint name.", hint="Use letters, digits, dots, dashes and underscores."
            )
        return cls(home / "endpoints" / name)

    @property
    def name(self) -> str:
        """The endpoint's local name."""
        return self.path.name

    @property
    def config_file(self) -> Path:
        """The configuration."""
        return self.path / "config.yaml"

    @property
    def spool_file(self) -> Path:
        """Tasks and results."""
        return self.path / "spool.sqlite3"

    @property
    def bodies_directory(self) -> Path:
        """The large arguments and results of the spool."""
        return self.spool_file.with_suffix(".bodies")

    @property
    def output_file(self) -> Path:
        """The end of what recent tasks printed."""
        return self.path / "output.sqlite3"

    @property
    def payers_file(self) -> Path:
        """Service accounts that have had tasks, with their creators."""
        return self.path / "payers"

    @property
    def log_file(self) -> Path:
        """The log of the agent."""
        return self.path / "endpoint.log"

    @property
    def globus_login_file(self) -> Path:
        """The login at Globus; readable by its owner alone."""
        return self.path / "globus.json"

    @property
    def log_dir(self) -> Path:
        """The logs of managers."""
        return self.path / "logs"

    @property
    def console_file(self) -> Path:
        """Output of a detached agent and its children that bypasses their logs."""
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
        """Create the directory with a new key pair.

        :raises ConfigurationError: if it exists already, or cannot be created.
        """
        if self.exists:
            raise ConfigurationError(
                f"The endpoint {self.name} is already configured.", hint=f"Edit {self.config_file}, or delete it first."
            )
        try:
            make_directory(self.path, mode=0o700)
            self.path.chmod(0o700)
            self.close_to_others()
            keys = new_curve_keys()
            _write(self.path / "curve.public", keys.public)
            _write(self.path / "curve.secret", keys.secret)
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be created: {error.strerror}.") from error

    def require(self) -> None:
        """:raises ConfigurationError: if the endpoint was never configured."""
        if not self.exists:
            raise ConfigurationError(
                f"There is no endpoint {self.name} in {self.path.parent}.",
                hint=f"Create it with `farcall-endpoint configure {self.name}`.",
            )

    def require_writable(self) -> None:
        """:raises ConfigurationError: if an agent cannot keep its files here."""
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise ConfigurationError(
                f"{self.path} cannot be written to.",
                hint="Its file system is read only, or the directory is not yours; set FARCALL_HOME to another place.",
            )

    def close_to_others(self) -> None:
        """Take the right to write in the endpoint's directory, and in those above it up to Farcall's, from other users:
        they could put another configuration in place of the endpoint's. Directories of other owners stay as they are.
        """
        for each in (self.path, self.path.parent, self.path.parent.parent):
            state = each.stat()
            if not state.st_mode & 0o022 or state.st_mode & stat.S_ISVTX:
                continue
            try:
                each.chmod(stat.S_IMODE(state.st_mode) & ~0o022)
            except OSError:  # it belongs to another user
                _logger.warning("Other users can write in %s, and replace the files of this endpoint", each)
            else:
                _logger.warning("Other users could write in %s; its mode is changed", each)

    def read_keys(self) -> CurveKeys:
        """The endpoint's key pair.

        :raises ConfigurationError: if it is missing, or other users may read the secret key.
        """
        try:
            secret = _read_secret(self.path / "curve.secret")
            return CurveKeys((self.path / "curve.public").read_text().strip(), secret)
        except OSError as error:
            raise ConfigurationError(
                f"The key pair in {self.path} cannot be read: {error.strerror}.",
                hint="Delete the endpoint and configure it again.",
            ) from error

    def read_endpoint_id(self) -> str | None:
        """The id in the cloud; None before the first start."""
        data = _read_json(self.path / "endpoint.json")
        return str(data["endpoint_id"]) if data and "endpoint_id" in data else None

    def write_endpoint_id(self, endpoint_id: str) -> None:
        """Store the id from the cloud."""
        _write(self.path / "endpoint.json", json.dumps({"endpoint_id": endpoint_id}))

    def read_owner_id(self) -> str:
        """The identity of the endpoint's owner; empty until the API has named it."""
        data = _read_json(self.path / "endpoint.json") or {}
        return str(data.get("owner_id", ""))

    def write_owner_id(self, owner_id: str) -> None:
        """Keep the identity of the endpoint's owner."""
        data = _read_json(self.path / "endpoint.json") or {}
        _write(self.path / "endpoint.json", json.dumps({**data, "owner_id": owner_id}))

    def read_credential(self) -> Credentials | None:
        """The endpoint's credential and its API; None if it has none.

        :raises ConfigurationError: if other users may read it, or it cannot be read.
        """
        path = self.path / "credential.secret"
        api_url = (_read_json(self.path / "endpoint.json") or {}).get("api_url")
        if not api_url:  # of a former registration
            return None
        try:
            return Credentials(str(api_url), _read_secret(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error.strerror}.", hint="Delete it.") from error

    def write_credential(self, credential: Credentials) -> None:
        """Keep the endpoint's credential.

        :raises OSError: if it cannot be written.
        """
        data = _read_json(self.path / "endpoint.json") or {}
        _write(self.path / "credential.secret", credential.token)
        _write(self.path / "endpoint.json", json.dumps({**data, "api_url": credential.api_url}))

    def read_sealing(self) -> SealingSecrets | None:
        """The keys for sealed calls; None if there are none yet.

        :raises ConfigurationError: if other users may read them, or they cannot be read.
        """
        from farcall_common.sealing import SealingSecrets  # here, because it would slow every other command down

        path = self.path / "sealing.secret"
        try:
            return SealingSecrets.from_bytes(_read_secret(path).encode())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{path} cannot be read: {error}.",
                hint="Restore it from a backup. Without it, the endpoint gets an identity that users must accept.",
            ) from error

    def make_sealing(self, *, rotate: bool = False) -> SealingSecrets:
        """The keys for sealed calls, made if there are none; with a new sealing key if they are to ``rotate``.

        :raises ConfigurationError: as :meth:`read_sealing`, and if they cannot be written.
        """
        from farcall_common.sealing import SealingSecrets

        found, now = self.read_sealing(), time.time()
        if found is not None and not rotate:
            return found
        made = SealingSecrets.new(now=now) if found is None else found.rotated(now=now)
        try:
            _write(self.path / "sealing.secret", made.to_bytes().decode())
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be written to: {error.strerror}.") from error
        return made

    def find_login(self, *, home: Path, environ: Mapping[str, str]) -> Credentials | None:
        """The login of the endpoint's owner; None if there is none, and the endpoint has a credential.

        :raises ConfigurationError: if there is neither, or a setting is invalid.
        """
        try:
            return Credentials.resolve(environ=environ, home=home)
        except ConfigurationError:
            credential = self.read_credential()
            named = from_environment("api_url", environ) or read_settings(home).get("api_url")
            if credential is None or (named and named.rstrip("/") != credential.api_url):
                raise
            return None

    def read_status(self) -> dict[str, Any]:
        """The agent's last status; empty if it has none."""
        return _read_json(self.path / "status.json") or {}

    def write_status(self, status: dict[str, Any]) -> None:
        """Replace the status; on a full disk, overwrite the file in place.

        :raises OSError: if that fails, too.
        """
        path, text = self.path / "status.json", json.dumps(status)
        try:
            _write(path, text)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            _overwrite(path, text)

    def read_prewarms(self) -> Sequence[PrewarmRequest]:
        """Return the owner's pre-warming requests; none if the file is missing or cannot be read."""
        try:
            return _prewarms.decode((self.path / "prewarm.json").read_bytes())
        except (OSError, msgspec.DecodeError):
            return ()

    def write_prewarms(self, requests: Sequence[PrewarmRequest]) -> None:
        """Replace the owner's pre-warming requests.

        :raises ConfigurationError: if the file cannot be written.
        """
        try:
            write_whole(self.path / "prewarm.json", msgspec.json.encode(requests), mode=0o600)
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be written to: {error.strerror}.") from error

    def read_baselines(self) -> Mapping[str, float]:
        """How long functions take while the endpoint is idle, in seconds; nothing if that is not known."""
        try:
            found = _baselines.decode((self.path / "baselines.json").read_bytes())
        except (OSError, msgspec.DecodeError):
            return {}
        return {key: seconds for key, seconds in found.items() if 0 < seconds < math.inf}

    def write_baselines(self, baselines: Mapping[str, float]) -> None:
        """Replace them.

        :raises OSError: if that is not possible.
        """
        write_whole(self.path / "baselines.json", msgspec.json.encode(baselines), mode=0o600)

    def events_file(self, name: str) -> Path:
        """The agent's event log of this name: ``tasks`` or ``connection``."""
        return self.path / f"events-{name}.jsonl"

    def write_events(self, name: str, data: bytes) -> None:
        """Replace an event log.

        :raises OSError: if it cannot be written.
        """
        write_whole(self.events_file(name), data, mode=0o600)

    def read_agent(self) -> AgentProcess | None:
        """The process that runs the endpoint, or ran it when it died; None after an orderly shutdown."""
        if (holder := self._holder()) is not None:
            return holder
        data = _read_json(self.pid_file)
        try:
            return AgentProcess(int(data["pid"]), float(data["started_at"]), str(data["hostname"])) if data else None
        except (KeyError, TypeError, ValueError):
            return None

    def _holder(self) -> AgentProcess | None:
        """The process on this machine that is the endpoint's agent, by its socket."""
        try:
            pid = _socket_holder(self._socket_name(), pid_file=os.path.realpath(self.pid_file))
            return None if pid is None else AgentProcess(pid, psutil.Process(pid).create_time(), socket.gethostname())
        except (OSError, psutil.Error):
            return None

    def _socket_name(self) -> bytes:
        """Name of the abstract socket that the agent holds. It has the directory's inode number, which a move keeps."""
        state = self.path.stat()
        return f"\0farcall-endpoint-{os.getuid()}-{state.st_dev:x}-{state.st_ino:x}".encode()

    def archive_spool(self) -> Path | None:
        """Rename the spool, so that the next start creates an empty one. None if there is no spool.

        :raises EndpointInUse: while a process has it open.
        """
        with self.lock():
            if not self.spool_file.exists():
                return None
            # The database, and the parts of it that wait to be written into it.
            kept = self.path / f"spool-{dt.datetime.now(dt.UTC):%Y-%m-%dT%H%M%S}.sqlite3"
            for suffix in ("-wal", "-shm", ""):
                with contextlib.suppress(FileNotFoundError):
                    Path(f"{self.spool_file}{suffix}").rename(f"{kept}{suffix}")
            with contextlib.suppress(FileNotFoundError):
                self.bodies_directory.rename(kept.with_suffix(".bodies"))
            return kept

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Be the one agent of this endpoint.

        :raises EndpointInUse: naming the process that is.
        """
        with contextlib.ExitStack() as stack:
            descriptor = os.open(self.pid_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                other = self.read_agent()
                who = f"process {other.pid} on {other.hostname}" if other else "another process"
                raise self._in_use(who) from error
            stack.enter_context(self._held_socket())
            data = json.dumps(dataclasses.asdict(AgentProcess.current())).encode()
            try:
                os.ftruncate(descriptor, os.pwrite(descriptor, data, 0))
            except OSError as error:
                raise ConfigurationError(
                    f"{self.pid_file} cannot be written: {error.strerror}.", hint="Make room, or raise the quota."
                ) from error
            # Emptied at an orderly shutdown, also after an error; not empty and not locked means a crash.
            try:
                yield
            except FarcallError:
                os.ftruncate(descriptor, 0)
                raise
            os.ftruncate(descriptor, 0)

    def _held_socket(self) -> socket.socket:
        """Bind the abstract socket, which identifies the agent even if all files are removed.

        :raises EndpointInUse: naming the process that has it.
        """
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        for _ in range(2):  # its holder may just have ended
            try:
                held.bind(self._socket_name())
            except OSError as error:
                if (other := self._holder()) is not None:
                    held.close()
                    raise self._in_use(f"process {other.pid} on {other.hostname}") from error
            else:
                break
        return held  # not bound if another user has the name: that is not an agent of this user

    def _in_use(self, who: str) -> EndpointInUse:
        return EndpointInUse(
            f"The endpoint {self.name} is run by {who}.", hint=f"`farcall-endpoint stop {self.name}` stops it."
        )

    @property
    def script_dir(self) -> Path:
        """Directory for the scripts and the output of a batch system's jobs."""
        return self.path / "submit_scripts"


def _socket_holder(name: bytes, *, pid_file: str) -> int | None:
    """Return the process on this machine that has a socket of that abstract name, if this user may see it.

    The name of a socket may contain a line break, with which another user can add false rows to the kernel's list. But
    no other user can make a process of ours open the file, and that is checked too.
    """
    line_end = b" @" + name[1:]
    rows = [line.split() for line in _sockets() if line.endswith(line_end)]
    sockets = {f"socket:[{row[6].decode(errors='replace')}]" for row in rows if len(row) > 6}
    for process in Path("/proc").glob("[0-9]*") if sockets else ():
        files = _open_files(process)
        if not files.isdisjoint(sockets) and not files.isdisjoint((pid_file, f"{pid_file} (deleted)")):
            return int(process.name)
    return None


def _open_files(process: Path) -> set[str]:
    """Return the open files of a process, by its directory in /proc; none if it has ended or is another user's."""
    files: set[str] = set()
    with contextlib.suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                files.add(str(descriptor.readlink()))
    return files


def _sockets() -> list[bytes]:
    try:
        return Path("/proc/net/unix").read_bytes().splitlines()
    except OSError:
        return []


def list_endpoints(home: Path) -> list[EndpointDirectory]:
    """All endpoints that were configured, by name."""
    base = home / "endpoints"
    found = [EndpointDirectory(path) for path in sorted(base.iterdir())] if base.is_dir() else []
    return [directory for directory in found if directory.exists]


def _write(path: Path, text: str) -> None:
    """Replace a file as a whole, readable by its owner alone."""
    write_whole(path, text.encode(), mode=0o600)


def _read_secret(path: Path) -> str:
    """:raises ConfigurationError: if other users may read it.
    :raises OSError: if it cannot be read.
    """
    if path.stat().st_mode & 0o077:
        raise ConfigurationError(f"{path} is readable by other users.", hint=f"chmod 600 {path}")
    return path.read_text().strip()


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
