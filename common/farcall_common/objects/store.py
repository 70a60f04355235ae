"""Store of objects: ``from farcall import store``.

::

    reference = store.put(array)            # in a task, or in a program that has configured a store
    executor.submit(train, reference)       # train gets the array
    store.get(reference)

In a task the store is the endpoint's: in the memory of the node if the endpoint has one node only, else a directory
that its nodes share. A program chooses one with :func:`configure` or ``FARCALL_STORE``; that is used in a task, too, if
it is done there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import urllib.parse
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar

from farcall_common import file_arguments, running
from farcall_common.errors import ConfigurationError, Unsupported
from farcall_common.object_keys import checked_group, chosen_lifetime
from farcall_common.objects.connectors import Connector, ObjectConnector
from farcall_common.objects.directory import Directory as Directory  # all four: for use()
from farcall_common.objects.encoding import encode
from farcall_common.objects.memory import Memory as Memory
from farcall_common.objects.references import Reference, connected, name_of, remember
from farcall_common.objects.s3 import S3 as S3
from farcall_common.objects.valkey import SCHEMES
from farcall_common.objects.valkey import Valkey as Valkey

T = TypeVar("T")

VARIABLE: Final = "FARCALL_STORE"
_FORMS: Final = "s3://BUCKET/PREFIX, valkey://:PASSWORD@HOST:PORT/0, file:///SHARED/DIRECTORY, or memory:"
_OBJECTS: Final = "objects"
"""The directory of objects in those that an endpoint has for a submitter."""


class Store:
    """A store with a connector: one of ours, or of ProxyStore. May be used from any thread.

    ProxyStore's connectors know no lifetimes: what is put there stays until it is evicted.
    """

    def __init__(self, connector: Connector) -> None:
        self.connector: Final = connector
        remember(connector)

    def __repr__(self) -> str:
        return f"Store({self.connector!r})"

    def put(
        self,
        value: T,
        *,
        expires_s: float | None = None,
        reads: int | None = None,
        explicit: bool = False,
        group: str | None = None,
    ) -> Reference[T]:
        """See :func:`farcall.store.put`."""
        lifetime = chosen_lifetime(expires_s=expires_s, reads=reads, explicit=explicit, group=group)
        pieces = encode(value)
        connector = self.connector
        digest = b""
        if running.seals_memory and isinstance(connector, Memory):
            found = hashlib.sha256()
            for piece in pieces:
                found.update(piece)
            digest = found.digest()
        key: Any
        if isinstance(connector, ObjectConnector):
            key = lifetime.new_key()
            connector.write(key, pieces)
        elif expires_s is not None or reads is not None or group is not None:
            raise Unsupported(
                f"{type(connector).__name__} keeps objects until they are evicted.",
                hint="Use explicit=True, store.lifetime(), or one of Farcall's connectors.",
            )
        else:
            key = connector.put(b"".join(pieces))
        # Others find what is in a directory through the endpoint that has it.
        endpoint_id = os.environ.get("FARCALL_ENDPOINT_ID", "") if isinstance(connector, Directory) else ""
        if endpoint_id:
            file_arguments.use_files()
        size = sum(map(len, pieces[1:]))
        return Reference(key, name_of(connector), connector.config(), size, endpoint_id, digest)

    def get(self, reference: Reference[T]) -> T:
        """See :meth:`farcall.Reference.get`."""
        return reference.get()

    def exists(self, reference: Reference[Any]) -> bool:
        """See :meth:`farcall.Reference.exists`."""
        return reference.exists()

    def evict(self, reference: Reference[Any]) -> None:
        """See :meth:`farcall.Reference.evict`."""
        reference.evict()

    def evict_group(self, group: str) -> None:
        """See :func:`farcall.store.evict_group`."""
        if not isinstance(self.connector, ObjectConnector):
            raise Unsupported(f"{type(self.connector).__name__} has no groups.", hint="Use store.lifetime().")
        self.connector.evict_group(checked_group(group))

    def buffer(self, size: int) -> memoryview:
        """See :func:`farcall.store.buffer`."""
        # Sealed memory: another process could change the file before it is put, and so before it has a seal.
        if isinstance(self.connector, Memory) and not running.seals_memory:
            return self.connector.buffer(size)
        return memoryview(bytearray(size))

    def lifetime(self) -> ContextLifetime:
        """See :func:`farcall.store.lifetime`."""
        return ContextLifetime(self)


class ContextLifetime:
    """Evicts at the end of a ``with`` block what was put in it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._evictions = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._evictions.close()

    def put(self, value: T) -> Reference[T]:
        """Put a value until the block ends."""
        reference = self._store.put(value, explicit=True)
        self.add(reference)
        return reference

    def add(self, reference: Reference[Any]) -> None:
        """Evict this object, too."""
        self._evictions.callback(reference.evict)


# -- the store of this program or task ---------------------------------------------------------------------------------


def put(
    value: T,
    *,
    expires_s: float | None = None,
    reads: int | None = None,
    explicit: bool = False,
    group: str | None = None,
) -> Reference[T]:
    """Put a value into the store.

    Arrays are written as they lie in memory. What you change afterwards is not seen by others.

    :param value: anything that can be an argument of a task, of any size.
    :param expires_s: delete it when it was not used for so many seconds. The default is a day.
    :param reads: delete it after so many reads (1000 at most); a resolved argument is one.
    :param explicit: keep it until it is evicted.
    :param group: keep it until :func:`evict_group` is called with this name, for a day without use at most.
    :returns: a reference, for other tasks.
    :raises ConfigurationError: if no store is configured.
    :raises StoreFull: if there is no room.
    :raises SerializationError: if the value cannot be written.
    """
    return default_store().put(value, expires_s=expires_s, reads=reads, explicit=explicit, group=group)


def get(reference: Reference[T]) -> T:
    """The value of a reference of any store; see :meth:`farcall.Reference.get`."""
    return reference.get()


def exists(reference: Reference[Any]) -> bool:
    """Whether an object is still there."""
    return reference.exists()


def evict(reference: Reference[Any]) -> None:
    """Delete an object, if it is there. Those who have read it keep what they have."""
    reference.evict()


def evict_group(group: str) -> None:
    """Delete all objects that were put with this group."""
    default_store().evict_group(group)


def buffer(size: int) -> memoryview:
    """Memory of ``size`` bytes for a large value. One that contains it whole, such as
    ``numpy.frombuffer(store.buffer(size), dtype)``, is put without a copy if the store is in the node's memory. What is
    written after that is not seen by others.

    :raises StoreFull: if there is no room.
    """
    return default_store().buffer(size)


def lifetime() -> ContextLifetime:
    """A ``with`` block that evicts what was put in it::

    with store.lifetime() as lifetime:
        reference = lifetime.put(array)
    """
    return default_store().lifetime()


class _Chosen(NamedTuple):
    store: Store
    task_id: str | None
    """In which it is used: a worker runs other tasks later."""


_chosen: _Chosen | None = None


def configure(url: str) -> Store:
    """Choose the store of this program, or of the running task.

    :param url: ``s3://bucket/prefix``, ``valkey://[:password@]host:port/database`` (or ``valkeys://``, ``redis://``,
        ``rediss://``, ``unix://``), ``file:///shared/directory``, or ``memory:`` for processes of this machine.
    :raises ConfigurationError: if it is none of them, or a package is missing.
    """
    return use(connector_at(url))


def use(connector: Connector) -> Store:
    """Choose the store of this program, or of the running task, by its connector: one of ours, or of ProxyStore."""
    global _chosen
    store = Store(connector)
    _chosen = _Chosen(store, os.environ.get("FARCALL_TASK_ID"))
    return store


def default_store() -> Store:
    """The store of this program, or of the running task.

    :raises ConfigurationError: if there is none.
    """
    if _chosen is not None and _chosen.task_id == os.environ.get("FARCALL_TASK_ID"):
        return _chosen.store
    if url := os.environ.get(VARIABLE):
        return Store(connector_at(url))
    connector = _of_task()
    if connector is None:
        raise ConfigurationError(
            "This program has no store for objects.",
            hint=f"Call store.configure(URL), or set {VARIABLE}, to one of {_FORMS}. Tasks have one.",
        )
    return Store(connector)


def _of_task() -> Connector | None:
    """The store of the endpoint for the submitter of the running task."""
    try:
        task: Any = running.current()
    except ConfigurationError:
        return None
    if task.memory_dir is not None:
        return connected("memory", {"path": str(task.memory_dir / _OBJECTS)})
    return connected("directory", {"path": str(task.shared_dir / _OBJECTS)})


def connector_at(url: str) -> Connector:
    """The connector of an address, see :func:`configure`.

    :raises ConfigurationError: if it is none, or a package is missing.
    """
    scheme, _, rest = url.partition(":")
    if scheme == "s3":
        return connected("s3", {"url": url})
    if scheme in SCHEMES:
        return connected("valkey", {"url": url})
    if scheme == "memory" and not rest:
        return connected("memory", {"path": _private_memory()})
    if url.startswith("file:///"):
        return connected("directory", {"path": urllib.parse.unquote(url.removeprefix("file://"))})
    raise ConfigurationError(
        f"{scheme + ':' if scheme else 'An empty text'} is not the address of a store.", hint=f"Use one of {_FORMS}."
    )


def _private_memory() -> str:
    """A directory in the memory of this machine, for this user."""
    path = Path("/dev/shm", f"farcall-{os.getuid()}")  # noqa: S108 - checked here
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        state = path.lstat()
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be used for objects: {error.strerror}.", hint="Use file:///DIRECTORY instead of memory:."
        ) from error
    if not path.is_dir() or path.is_symlink() or state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise ConfigurationError(f"{path} is not a private directory of yours.", hint="Remove it.")
    return str(path / _OBJECTS)
