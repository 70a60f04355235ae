"""Connectors: where the bytes of objects are. The interface is ProxyStore's, and ours add lifetimes to it."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, Protocol, Self

from farcall_common.object_keys import EXPLICIT, Key
from farcall_common.payload import Piece

Bytes = bytes | bytearray | memoryview


class Connector(Protocol):
    """Connector of a store, ours or ProxyStore's (``proxystore.connectors.protocols.Connector``)."""

    def close(self) -> None:
        """Close connections."""

    def config(self) -> dict[str, Any]:
        """What :meth:`from_config` makes the connector from, in another process."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Connector:
        """The connector of a :meth:`config`."""

    def evict(self, key: Any) -> None:
        """Delete an object, if it is there."""

    def exists(self, key: Any) -> bool:
        """Whether an object is there."""

    def get(self, key: Any) -> Bytes | None:
        """The bytes of an object; None if it is gone."""

    def put(self, obj: Any) -> Any:
        """Store bytes; returns their key."""


class ObjectConnector(abc.ABC):
    """A connector of ours: objects have lifetimes (see :mod:`~farcall_common.object_keys`).

    ``put`` and ``new_key``, which ProxyStore calls, make objects that stay until they are evicted. ``close`` deletes
    nothing. May be used from any thread.
    """

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The connector of a :meth:`config`."""
        return cls(**config)

    @abc.abstractmethod
    def config(self) -> dict[str, Any]:
        """What :meth:`from_config` makes the connector from, in another process."""

    @abc.abstractmethod
    def write(self, key: Key, pieces: Sequence[Piece]) -> None:
        """Store an object in pieces, as a whole or not at all.

        :raises StoreFull: if there is no room.
        :raises StoreDenied: if this user may not.
        :raises StoreUnavailable: if the store does not answer.
        """

    @abc.abstractmethod
    def get(self, key: Key) -> memoryview | None:
        """The bytes of an object, in memory that no one else changes; None if it is gone. A read of those that an
        object may have."""

    def get_copy(self, key: Key, *, most_bytes: int) -> memoryview | None:  # noqa: ARG002 - of what others can change
        """Return what :meth:`get` returns, in memory that no other process can change.

        :raises ObjectDamaged: if the object has more than ``most_bytes``.
        """
        return self.get(key)

    @abc.abstractmethod
    def exists(self, key: Key) -> bool:
        """Whether an object is there."""

    @abc.abstractmethod
    def evict(self, key: Key) -> None:
        """Delete an object, if it is there."""

    @abc.abstractmethod
    def evict_group(self, group: str) -> None:
        """Delete all objects of a group."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Close connections. Objects stay."""

    def new_key(self, obj: Any = None) -> Key:  # noqa: ARG002 - a part of the interface
        """The key of an object that :meth:`set` stores later."""
        return EXPLICIT.new_key()

    def set(self, key: Key, obj: Any) -> None:
        """Store bytes under a key of :meth:`new_key`."""
        self.write(key, [memoryview(obj).cast("B")])

    def put(self, obj: Any) -> Key:
        """Store bytes until they are evicted; returns their key."""
        key = self.new_key()
        self.set(key, obj)
        return key

    def put_batch(self, objs: Sequence[Any]) -> list[Key]:
        """:meth:`put` for each."""
        return [self.put(obj) for obj in objs]

    def get_batch(self, keys: Sequence[Key]) -> list[Bytes | None]:
        """:meth:`get` for each."""
        return [self.get(key) for key in keys]
