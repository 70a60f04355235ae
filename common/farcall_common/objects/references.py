"""References to objects, and what puts values in their place when a function is called."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
import threading
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from farcall_common import file_arguments, running
from farcall_common.errors import ConfigurationError, DeserializationError, FarcallError, ObjectDamaged, ObjectGone
from farcall_common.object_keys import lifetime_of
from farcall_common.objects.connectors import Bytes, Connector, ObjectConnector
from farcall_common.objects.encoding import HEAD_BYTES, decode

T = TypeVar("T")

_FORM: Final = 1
"""Version of a pickled reference. Other releases may add versions."""
_FORM_OF_ENDPOINT: Final = 2
"""Version of a pickled reference that names the endpoint of the object."""
_SEALED_FORM: Final = 3
"""Version of a pickled reference with the SHA-256 of the object's bytes."""
_ENDPOINT: Final = "FARCALL_ENDPOINT_ID"
"""Variable of workers."""
_OURS: Final[Mapping[str, str]] = {
    "directory": "farcall_common.objects.directory.Directory",
    "memory": "farcall_common.objects.memory.Memory",
    "s3": "farcall_common.objects.s3.S3",
    "valkey": "farcall_common.objects.valkey.Valkey",
}
_NAMES: Final = {path: name for name, path in _OURS.items()}
_MEMORY: Final = "memory"
_MOST_CONNECTORS: Final = 64


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Reference(Generic[T]):
    """A reference to an object in a store: small, and the same for all who have it.

    A function that is called with a reference as an argument gets the value. Within a list or another object it stays
    a reference, for :meth:`get`.

    :ivar key: of the object.
    :ivar connector: name of the class that reads it.
    :ivar config: what its connector is made from. May have a password.
    :ivar size_bytes: of the value as it is stored.
    :ivar endpoint_id: of the endpoint whose directory has it; empty if it is elsewhere, or has no endpoint.
    """

    key: Any
    connector: str
    config: Mapping[str, Any] = dataclasses.field(compare=False)
    size_bytes: int = dataclasses.field(compare=False)
    endpoint_id: str = dataclasses.field(default="", compare=False)
    _digest: bytes = dataclasses.field(default=b"", compare=False)
    """SHA-256 of the object's bytes, where tasks of another submitter could change them."""
    _copy: str = dataclasses.field(default="", compare=False)
    """Path of the copy that the endpoint of the running task has made."""

    def __repr__(self) -> str:
        return f"Reference({'/'.join(map(str, self.key))!r}, {self.connector}, {self.size_bytes:,} bytes)"

    def __reduce__(self) -> tuple[Any, ...]:
        fields = self.key, self.connector, dict(self.config), self.size_bytes
        if self.endpoint_id and (url := self._url()):
            file_arguments.note_read(url)
        if self._digest:
            return _reference, (_SEALED_FORM, *fields, self.endpoint_id, self._digest)
        if not self.endpoint_id:
            return _reference, (_FORM, *fields)
        return _reference, (_FORM_OF_ENDPOINT, *fields, self.endpoint_id)

    def _url(self) -> str:
        """The object as a file of its endpoint; empty if others cannot read it there: reads are counted by who has the
        directory."""
        path, key = self.config.get("path"), tuple(self.key)
        if not isinstance(path, str) or lifetime_of(key).reads is not None:
            return ""
        return f"{file_arguments.ENDPOINT}{self.endpoint_id}{urllib.parse.quote(path)}/{key[0]}"

    def get(self) -> T:
        """The value. Of an object with counted reads, this is one.

        Reading a value can run code that its writer chose.

        :raises ObjectGone: if it was evicted, or has expired, or was read as often as it may.
        :raises ObjectDamaged: if what is there is not the object.
        :raises DeserializationError: if the value cannot be read here.
        """
        data = _read_copy(self._copy) if self._copy else self._read()
        if data is None and self._is_elsewhere():
            raise ObjectGone(
                f"The object of {self!r} is not here, but at endpoint {self.endpoint_id}.",
                hint="Pass the reference itself to executor.submit, so that it is copied; one with counted reads is "
                "read at its endpoint only.",
            )
        if data is None:
            raise ObjectGone(f"The object of {self!r} is gone.")
        if self._digest and hashlib.sha256(data).digest() != self._digest:
            raise ObjectDamaged(
                f"The object of {self!r} was changed after it was put: its SHA-256 differs.",
                hint="Put it again. Another user of the endpoint may have changed the memory of its node.",
            )
        value: T = decode(memoryview(data), size=self.size_bytes)
        return value

    def _read(self) -> Bytes | None:
        """The bytes of the object. Those of a sealed one are a copy: the bytes that are checked are the ones used."""
        connector = self._connector()
        if self._digest and isinstance(connector, ObjectConnector):
            return connector.get_copy(self.key, most_bytes=HEAD_BYTES + self.size_bytes)
        if self.connector == _MEMORY and running.seals_memory and self.endpoint_id and not self._is_elsewhere():
            raise ObjectDamaged(
                f"The object of {self!r} has no seal, which every object in the memory of this endpoint has.",
                hint="Upgrade farcall in the environment of the task that put it.",
            )
        return connector.get(self.key)

    def exists(self) -> bool:
        """Whether the object is still there; of an object of another endpoint, whether there is a copy here."""
        return os.path.exists(self._copy) if self._copy else self._connector().exists(self.key)  # noqa: PTH110

    def evict(self) -> None:
        """Delete the object, if it is there. Those who have read it keep what they have."""
        self._connector().evict(self.key)

    def _connector(self) -> Connector:
        return connected(self.connector, self.config)

    def _is_elsewhere(self) -> bool:
        return bool(self.endpoint_id) and self.endpoint_id != os.environ.get(_ENDPOINT)


def _read_copy(path: str) -> memoryview | None:
    """A copy of an object, in memory that no one else changes; None if it is gone."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            data = bytearray(os.fstat(file.fileno()).st_size)
            return memoryview(data)[: file.readinto(data)]
    except FileNotFoundError:
        return None


def _reference(form: int, *fields: Any) -> Reference[Any]:
    """Reads a pickled reference."""
    if form in (_FORM_OF_ENDPOINT, _SEALED_FORM):
        file_arguments.use_files()
        reference: Reference[Any] = Reference(*fields)
        if reference._is_elsewhere() and (url := reference._url()):
            return dataclasses.replace(reference, _copy=file_arguments.path_of_copy(url))
        return reference
    if form != _FORM:
        raise DeserializationError(
            f"The reference has form {form}, of a newer release.", hint="Upgrade farcall on this side."
        )
    return Reference(*fields)


# -- connectors of this process ----------------------------------------------------------------------------------------

_connected: Final[dict[tuple[str, str], Connector]] = {}
_lock = threading.Lock()


def name_of(connector: Connector) -> str:
    """The name of a connector's class in references."""
    cls = type(connector)
    path = f"{cls.__module__}.{cls.__qualname__}"
    return _NAMES.get(path, path)


def connected(name: str, config: Mapping[str, Any]) -> Connector:
    """The connector of this process with a class and a configuration.

    :raises ConfigurationError: if it cannot be made here.
    """
    place = (name, repr(config))
    connector = _connected.get(place)
    if connector is None:
        connector = _class_of(name).from_config(dict(config))
        remember(connector, place)
    return connector


def remember(connector: Connector, place: tuple[str, str] | None = None) -> None:
    """Use this connector for references to what it stores."""
    with _lock:
        _connected[place or (name_of(connector), repr(connector.config()))] = connector
        if len(_connected) > _MOST_CONNECTORS:
            del _connected[next(iter(_connected))]  # the oldest: its connections end with the last use


def _forget() -> None:
    """In a child process: connections are its parent's."""
    global _lock
    _lock = threading.Lock()
    _connected.clear()


os.register_at_fork(after_in_child=_forget)


def _class_of(name: str) -> type[Connector]:
    module, _, attribute = _OURS.get(name, name).rpartition(".")
    try:
        found: type[Connector] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"The connector {name} of a reference cannot be imported: {error}.",
            hint="Install its package here, or put the object with one of Farcall's connectors.",
        ) from error
    return found


# -- in a worker -------------------------------------------------------------------------------------------------------


def resolved(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Arguments with the values of those that are references. A reference that is there twice is read once.

    :raises FarcallError: as :meth:`Reference.get`; says which argument.
    """
    named = [(f"argument {number}", value) for number, value in enumerate(args, start=1)]
    named += [(f"argument {name!r}", value) for name, value in kwargs.items()]
    values: dict[Reference[Any], Any] = {}
    for name, value in named:
        if type(value) is Reference and value not in values:
            try:
                values[value] = value.get()
            except FarcallError as error:
                message = f"The value for {name} cannot be read: {error.record.message}"
                raise type(error)(message, hint=error.hint) from error
    if not values:
        return args, kwargs
    return (
        [values[value] if type(value) is Reference else value for value in args],
        {name: values[value] if type(value) is Reference else value for name, value in kwargs.items()},
    )
