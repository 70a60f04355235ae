"""References to objects, and what puts values in their place when a function is called."""

from __future__ import annotations

import dataclasses
import importlib
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from farcall_common.errors import ConfigurationError, DeserializationError, FarcallError, ObjectGone
from farcall_common.objects.connectors import Connector
from farcall_common.objects.encoding import decode

T = TypeVar("T")

_FORM: Final = 1
"""Of a pickled reference. Another release may write more."""
_OURS: Final[Mapping[str, str]] = {
    "directory": "farcall_common.objects.directory.Directory",
    "memory": "farcall_common.objects.memory.Memory",
    "s3": "farcall_common.objects.s3.S3",
    "valkey": "farcall_common.objects.valkey.Valkey",
}
_NAMES: Final = {path: name for name, path in _OURS.items()}
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
    """

    key: Any
    connector: str
    config: Mapping[str, Any] = dataclasses.field(compare=False)
    size_bytes: int = dataclasses.field(compare=False)

    def __repr__(self) -> str:
        return f"Reference({'/'.join(map(str, self.key))!r}, {self.connector}, {self.size_bytes:,} bytes)"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reference, (_FORM, self.key, self.connector, dict(self.config), self.size_bytes)

    def get(self) -> T:
        """The value. Of an object with counted reads, this is one.

        Reading a value can run code that its writer chose.

        :raises ObjectGone: if it was evicted, or has expired, or was read as often as it may.
        :raises ObjectDamaged: if what is there is not the object.
        :raises DeserializationError: if the value cannot be read here.
        """
        data = self._connector().get(self.key)
        if data is None:
            raise ObjectGone(f"The object of {self!r} is gone.")
        value: T = decode(memoryview(data), size=self.size_bytes)
        return value

    def exists(self) -> bool:
        """Whether the object is still there."""
        return self._connector().exists(self.key)

    def evict(self) -> None:
        """Delete the object, if it is there. Those who have read it keep what they have."""
        self._connector().evict(self.key)

    def _connector(self) -> Connector:
        return connected(self.connector, self.config)


def _reference(form: int, *fields: Any) -> Reference[Any]:
    """Reads a pickled reference."""
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
