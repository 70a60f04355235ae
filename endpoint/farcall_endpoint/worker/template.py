"""Template: a process with one thread that has imported what functions import, and whose forks are workers.

It runs inside an environment, so all that it imports is the environment's. It serves a manager through one socket
(:mod:`farcall_endpoint.contracts.fork_protocol`), runs no code of submitters, and imports only from Python's own
directories: each of its children may belong to another submitter.

A fork can also be a further template, a *branch*: it has what this one has imported, imports more itself, and serves
the manager through a connection of its own. It shares the memory of this one, and what goes wrong in it harms it alone.

When the connection to the manager ends, it serves no more forks, and ends with its last child. When it is killed, its
children are killed by the kernel.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NoReturn

from farcall_common.payload import Serializer
from farcall_common.payload.code import CloudPickleCode, PureSourceTextInspect
from farcall_endpoint.contracts.fork_protocol import (
    MAX_PACKET,
    Branch,
    Exited,
    Fork,
    Forked,
    FromTemplate,
    Imported,
    Importing,
    Kill,
    NotForked,
    Preload,
    Reap,
    Refused,
    Serving,
    Skipped,
    decode_from_manager,
    encode,
)
from farcall_endpoint.contracts.manager_worker import Channel, Order, Run, channel_pair
from farcall_endpoint.host import process_reaper
from farcall_endpoint.worker import __main__ as worker
from farcall_endpoint.worker import fork_hazards, imports, namespaces
from farcall_endpoint.worker.boot import Boot, Descriptors, connect, receive_boot, send_boot, take_on
from farcall_endpoint.worker.capture import Capture
from farcall_endpoint.worker.environment import set_all
from farcall_endpoint.worker.inbox import Inbox
from farcall_endpoint.worker.runner import Runner
from farcall_endpoint.worker.settings import WorkerSettings
from farcall_endpoint.worker.trusted_places import TrustedPlaces

#: What libraries of numerics read when they are loaded: their number of threads, which is one in a template. Numba is
#: none of them: it starts no thread before its first parallel function, and cannot be told another number later.
THREAD_VARIABLES: Final = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"),
    *("NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
)
_OPENBLAS: Final = (
    *("openblas_set_num_threads", "openblas_set_num_threads64_"),
    *("scipy_openblas_set_num_threads", "scipy_openblas_set_num_threads64_"),
)
_SETTERS: Final = {
    "openblas": ("OPENBLAS_NUM_THREADS", _OPENBLAS),
    "libmkl_rt": ("MKL_NUM_THREADS", ("MKL_Set_Num_Threads",)),
    "libgomp": ("OMP_NUM_THREADS", ("omp_set_num_threads",)),
    "libomp": ("OMP_NUM_THREADS", ("omp_set_num_threads",)),
    "libiomp": ("OMP_NUM_THREADS", ("omp_set_num_threads",)),
}
"""By a part of a library's name: the variable that it has read, and the names of the function that changes it."""
_RTLD_NOLOAD: Final = 4
_MT19937_BYTES: Final = 624 * 4
_REHEARSALS: Final = 10
"""Number of runs after which Python has specialized a function's code."""
_set_handler: Final = _signal.signal
"""The C function. Its wrapper in ``signal`` converts arguments and result to enums, which is slow."""
_SECONDS_MORE: Final = 5
"""Seconds after the import limit at which the template ends itself. The manager can report why, so it acts first."""
_OWN: Final = (
    *("farcall_endpoint.host.isolation.confinement", "farcall_endpoint.host.isolation.landlock"),
    *("farcall_common.payload.by_value", "dill", "dill.source", "cloudpickle"),
)
"""Modules that a worker itself imports on demand."""


def main(control: int) -> NoReturn:
    """Serve the manager at the other end of a socket of packets; its first packet says what to import."""
    connection = socket.socket(fileno=control)
    connection.set_inheritable(False)
    connection.setblocking(True)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os._exit(_Template(connection).run())


def boot(path: str, find_packages: Callable[[], object]) -> NoReturn:
    """Connect to the manager's Unix socket, and serve the manager; see :func:`main`."""
    connection = connect(path)
    find_packages()
    main(connection.detach())


class _Template:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._preload = Preload()
        self._children: dict[int, int] = {}  # process id by number
        self._ended: set[int] = set()  # numbers, reported but not reaped
        self._reaped: set[int] = set()  # numbers, to be reaped when they end
        self._pid = 0
        self._namespaces: namespaces.Namespaces | None = None
        self._descriptors: set[int] = set()
        self._kept: set[int] = set()
        self._setters: list[tuple[str, Callable[[int], Any]]] = []
        self._rehearsal: Rehearsal | None = None
        self._numpy_state: int | None = None

    def run(self) -> int:
        """The exit code."""
        packet = decode_from_manager(self._connection.recv(MAX_PACKET) or encode(Reap(0)))
        if not isinstance(packet, Preload):
            return 0  # the manager is gone
        self._preload = packet
        if packet.namespaces:
            writable, network = packet.writable, packet.network
            if missing := namespaces.missing(writable=writable, network=network):
                self._send(Refused("", missing))
                return 1
            self._namespaces = namespaces.enter(writable=writable, network=network)
        namespaces.set_dumpable(False)  # or a child could change what all later ones run
        return self._begin()

    def _begin(self) -> int:
        """Import, and serve; the exit code."""
        self._pid = os.getpid()
        with contextlib.suppress(OSError):
            process_reaper.adopt_orphans()
        awake, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self._descriptors = namespaces.open_descriptors()
        variables = {name: os.environ.get(name) for name in THREAD_VARIABLES}
        os.environ.update(dict.fromkeys(variables, "1"))
        for module in _OWN:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        # Python counts threads that a fork may lose, too; this process checks its threads before each fork.
        own = r"(__main__|farcall_endpoint\.worker\..*)\Z"
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning, own)
        try:
            if not self._import_all():
                return 1
            os.environ.update({name: value for name, value in variables.items() if value is not None})
            for name in [name for name, value in variables.items() if value is None]:
                del os.environ[name]
            self._setters = _thread_setters()
            self._numpy_state = _numpy_state()
            if self._rehearsal is None:
                self._rehearse()
            self._kept |= fork_hazards.kept_files(self._descriptors)
            imports.remember()
            gc.collect()
            gc.freeze()
            _return_free_memory()
            self._send(Serving(sys.version.split()[0], _private_bytes()))
            self._serve(awake)
        except OSError:  # the manager is gone
            pass
        return self._outlive()

    def _rehearse(self) -> None:
        with contextlib.suppress(Exception):  # it only saves time
            rehearsal = Rehearsal()
            _reseed(self._numpy_state)
            for _ in range(_REHEARSALS):
                rehearsal.run()
            namespaces.keep_only(namespaces.open_descriptors())
            self._rehearsal = rehearsal

    # -- imports -------------------------------------------------------------------------------------------------------

    def _import_all(self) -> bool:
        """Import the modules; False if that made this process unfit."""
        paths = list(sys.path)
        trusted = TrustedPlaces(self._preload.places, self._preload.private)
        sys.path[:] = filter(trusted.holds, paths)
        try:
            return self._import_each(trusted) and self._is_fit("")
        finally:
            sys.path[:] = paths  # tasks may import from all of them

    def _import_each(self, trusted: TrustedPlaces) -> bool:
        for module in self._preload.modules:
            if module in sys.modules:
                continue
            if reason := fork_hazards.is_forbidden(module):
                self._send(Skipped(module, reason))
                continue
            self._send(Importing(module))
            started_at, size_bytes = time.monotonic(), _resident_bytes()
            try:
                # Its default action ends this process, whatever the import does, and whether or not there is a manager.
                signal.alarm(int(self._preload.import_limit_s) + _SECONDS_MORE)
                problem = trusted.import_module(module)
            except BaseException as error:  # noqa: BLE001 - code of packages, which may also call sys.exit
                problem = f"its import raised {type(error).__name__}: {error}"[:500]
            signal.alarm(0)
            if not self._is_fit(module):
                return False
            if problem:
                self._send(Skipped(module, problem))
            else:
                self._send(Imported(module, time.monotonic() - started_at, max(0, _resident_bytes() - size_bytes)))
        return True

    def _is_fit(self, module: str) -> bool:
        hazard = fork_hazards.hazard(expected=self._descriptors)
        if hazard:
            self._send(Refused(module, f"after the import of {module}, {hazard}" if module else hazard))
        return not hazard

    # -- the manager's requests ----------------------------------------------------------------------------------------

    def _serve(self, awake: int) -> None:
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLIN)
        poll.register(awake, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == awake:
                    os.read(awake, 4096)
                    self._report_ended()
                elif not self._receive():
                    return

    def _receive(self) -> bool:
        """Do one request; False if the manager is gone."""
        data, descriptors, _, _ = socket.recv_fds(self._connection, MAX_PACKET, 1)
        if not data:
            return False
        match decode_from_manager(data):
            case Fork() | Branch() as fork:
                self._fork(fork, descriptors[0])
                os.close(descriptors[0])
            case Reap(number=number):
                if number in self._children:
                    self._reaped.add(number)
                    self._reap()
            case Kill(number=number):
                if number in self._children and number not in self._ended:
                    process_reaper.kill_trees({self._children[number]})
        return True

    def _fork(self, fork: Fork | Branch, end: int) -> None:
        if fork_hazards.thread_count() != 1:
            self._send(NotForked(fork.number, "the template has a second thread"))
            return
        try:
            if isinstance(fork, Fork) and self._namespaces is not None:
                pid = namespaces.fork_apart(self._namespaces)
            else:
                pid = os.fork()
        except OSError as error:
            self._send(NotForked(fork.number, str(error)))
            return
        if pid == 0:
            if isinstance(fork, Fork):
                self._be_child(fork, end)
            self._be_branch(fork, end)
        self._children[fork.number] = pid

    def _report_ended(self) -> None:
        for number, pid in self._children.items():
            if number in self._ended:
                continue
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
                self._ended.add(number)
                if number not in self._reaped:
                    self._send(Exited(number, code))
        self._reap()
        self._kill_orphans()

    def _reap(self) -> None:
        """Reap the children that have ended and whose ids the manager does not need."""
        for number in self._ended & self._reaped:
            os.waitpid(self._children.pop(number), 0)
            self._ended.discard(number)
            self._reaped.discard(number)

    def _kill_orphans(self) -> None:
        """Kill what ended children left running, and what this process has adopted."""
        orphans = process_reaper.own_children() - set(self._children.values())
        process_reaper.kill_trees(orphans)
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _outlive(self) -> int:
        """Without a manager: wait for the last child. Each ends by itself, as its own connection has ended."""
        while True:
            try:
                ended, _ = os.wait()
            except ChildProcessError:
                return 0
            self._children = {number: pid for number, pid in self._children.items() if pid != ended}
            self._kill_orphans()

    def _send(self, packet: FromTemplate) -> None:
        self._connection.send(encode(packet))

    # -- a branch ------------------------------------------------------------------------------------------------------

    def _be_branch(self, branch: Branch, end: int) -> NoReturn:
        """Serve another connection as a template, with all that this one has imported."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            self._send(Forked(branch.number))
            namespaces.die_with_parent()
            if os.getppid() != self._pid:
                os._exit(1)  # it had ended before that
            own = set() if self._namespaces is None else {self._namespaces.own}
            namespaces.keep_only({0, 1, 2, end} | self._kept | own)
            self._connection.detach()
            self._connection = socket.socket(fileno=end)
            self._children, self._ended, self._reaped = {}, set(), set()
            packet = decode_from_manager(self._connection.recv(MAX_PACKET) or encode(Reap(0)))
            if isinstance(packet, Preload):
                self._preload = packet
                code = self._begin()
        except BaseException:  # noqa: BLE001 - the end of a process
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)

    # -- a child -------------------------------------------------------------------------------------------------------

    def _be_child(self, fork: Fork, end: int) -> NoReturn:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            _set_handler(signal.SIGINT, signal.default_int_handler)
            _set_handler(signal.SIGHUP, _signal.SIG_DFL)
            _set_handler(signal.SIGCHLD, _signal.SIG_DFL)
            self._send(Forked(fork.number))
            namespaces.die_with_parent()
            if os.getppid() != (self._pid if self._namespaces is None else 0):
                os._exit(1)  # it had ended before that
            os.setsid()
            namespaces.keep_only({0, 1, 2, end} | self._kept)
            self._connection.detach()
            code = _work(
                *(end, self._setters, self._namespaces),
                rehearsal=self._rehearsal,
                numpy_state=self._numpy_state,
            )
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:  # noqa: BLE001 - the end of a process
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(BaseException):
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def _work(
    end: int,
    setters: Collection[tuple[str, Callable[[int], Any]]],
    apart: namespaces.Namespaces | None,
    *,
    rehearsal: Rehearsal | None,
    numpy_state: int | None,
) -> int:
    """Become a worker, and serve tasks until the manager is gone; the exit code."""
    if apart is not None:
        namespaces.separate(apart)
        namespaces.drop_privileges()
    _reseed(numpy_state)
    with socket.socket(fileno=end) as connection:
        if rehearsal is not None and not _is_readable(end):
            rehearsal.run()  # no task waits for this child yet
        received = receive_boot(connection)
    if received is None:
        return 0
    boot, descriptors = received
    for standard, descriptor in ((1, descriptors.stdout), (2, descriptors.stderr)):
        os.dup2(descriptor, standard)  # what goes wrong from here on is this worker's
    if boot.namespaces and apart is None:
        raise OSError("a worker that needs namespaces was forked without them")
    namespaces.set_dumpable(True)
    channel, claims = take_on(boot, descriptors)
    time.tzset()
    _restore_threads(setters, os.environ)
    worker.main(channel, claims)
    return 0


class Rehearsal:
    """A task that does nothing, run as a worker runs one: once in the template, so that the interpreter has specialized
    this code before it is shared; and in each child that waits for its worker's turn, whose memory is its own then."""

    def __init__(self) -> None:
        # As text, which is how most functions come.
        self._function = Serializer().pack_function(_nothing, strategies=(PureSourceTextInspect(), CloudPickleCode()))
        self._payload = Serializer().pack_call(())

    def run(self) -> None:
        """Run it. Leaves no descriptor and no variable."""
        descriptors, variables = namespaces.open_descriptors(), dict(os.environ)
        standard = [(number, os.dup(number)) for number in (1, 2)]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        manager, end, claims = channel_pair()
        channel = Channel(end, claims)
        try:
            send_boot(ours, Boot(variables=variables, directory="/"), Descriptors(0, 0, 1, 2))
            received = receive_boot(theirs)
            if received is not None:
                set_all(received[0].variables, merged=True)
            for number, _ in standard:
                os.dup2(os.memfd_create("rehearsal"), number)  # a worker's are files
            runner = Runner(Capture(), endpoint_id="", settings=WorkerSettings.of({}))
            order = Order("rehearsal", 1, "", len(self._payload))
            manager.order(Run((order,), (("", len(self._function)),)), [self._function, self._payload])
            inbox = Inbox(channel)
            packet = inbox.next()
            if packet is not None:
                worker.work(inbox, runner, packet, None)
                manager.receive()
        finally:
            for each in (ours, theirs, manager, channel):
                each.close()
            for number, kept in standard:
                os.dup2(kept, number)
            for name in set(os.environ) - set(variables):
                del os.environ[name]
            for descriptor in namespaces.open_descriptors() - descriptors:  # also of the runner, between two tasks
                os.close(descriptor)


def _nothing() -> None:
    pass


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _numpy_state() -> int | None:
    """The address of the state of NumPy's global generator, after a new seed, if it is where it was in all versions so
    far; None otherwise, or without NumPy. To write there takes a tenth of the time of ``numpy.random.seed``."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return None
    with contextlib.suppress(Exception):
        numpy_random.seed()  # also forgets half of a pair of normal numbers
        name, key, *_ = numpy_random.get_state()
        address = int(numpy_random.mtrand._rand._bit_generator.ctypes.state_address)
        if name == "MT19937" and ctypes.string_at(address, _MT19937_BYTES) == key.astype("uint32").tobytes():
            return address
    return None


def _reseed(numpy_state: int | None) -> None:
    """Give this child its own state where the template's is that of all: random numbers first.

    ``random`` does so by itself, as OpenSSL does from 1.1.1 on. A generator that a module made when it was imported
    (``numpy.random.default_rng()``) cannot be found: it is the same in all children.

    :param numpy_state: of :func:`_numpy_state`.
    """
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        if numpy_state is None:
            numpy_random.seed()
        else:
            ctypes.memmove(numpy_state, os.urandom(_MT19937_BYTES), _MT19937_BYTES)
    ssl = sys.modules.get("ssl")
    if ssl is not None:
        ssl.RAND_add(os.urandom(32), 32.0)
    tempfile.tempdir = None  # it was found by the template's variables
    uuid = sys.modules.get("uuid")
    if uuid is not None:  # of uuid1; uuid4 asks the kernel
        uuid._last_timestamp = None  # type: ignore[attr-defined]
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)


def _thread_setters() -> list[tuple[str, Callable[[int], Any]]]:
    """The functions that set the number of threads in libraries that are loaded, with the variable of each."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123
        paths = {line[line.index("/") :].strip() for line in file if "/" in line}
    found: list[tuple[str, Callable[[int], Any]]] = []
    for path in sorted(paths):
        for part, (variable, names) in _SETTERS.items():
            if part not in path.rpartition("/")[2]:
                continue
            try:
                library = ctypes.CDLL(path, mode=_RTLD_NOLOAD)
            except OSError:
                continue
            function = next((getattr(library, name) for name in names if hasattr(library, name)), None)
            if function is not None:
                found.append((variable, function))
    if (numexpr := sys.modules.get("numexpr")) is not None:
        found.append(("NUMEXPR_NUM_THREADS", numexpr.set_num_threads))
    return found


def _restore_threads(setters: Collection[tuple[str, Callable[[int], Any]]], environ: Mapping[str, str]) -> None:
    """Give libraries that were loaded with one thread the number of threads that this worker's variables say."""
    for variable, function in setters:
        wanted = environ.get(variable) or environ.get("OMP_NUM_THREADS") or str(len(os.sched_getaffinity(0)))
        if wanted.isdecimal() and wanted not in ("0", "1"):
            function(int(wanted))


def _return_free_memory() -> None:
    """Give free memory in the middle of the heap back to the system, where the C library can: a fork copies its page
    tables, and children that write there would copy its pages."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="utf-8") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * resource.getpagesize()


def _private_bytes() -> int:
    try:
        with open("/proc/self/smaps_rollup", encoding="utf-8") as file:  # noqa: PTH123
            return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Private_"))
    except OSError:
        return 0


if __name__ == "__main__":
    main(int(sys.argv[1]))
