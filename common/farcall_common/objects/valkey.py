"""Objects in Valkey or Redis: for small values that tasks read within milliseconds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from farcall_common.errors import ConfigurationError, StoreDenied, StoreFull, StoreUnavailable
from farcall_common.object_keys import Key, lifetime_of
from farcall_common.objects.connectors import ObjectConnector
from farcall_common.payload import Piece

if TYPE_CHECKING:
    import redis

MOST_BYTES: Final = 512 * 2**20
"""Limit of Valkey and Redis for a value."""
_PREFIX: Final = "farcall:object:"
SCHEMES: Final = ("valkey", "valkeys", "redis", "rediss", "unix")
"""Schemes of addresses."""
_OWN_SCHEMES: Final = {"valkey": "redis", "valkeys": "rediss"}
_READ_BYTES: Final = 2**18
_SMALL_BYTES: Final = 4096
"""Arguments up to this size are sent together."""
_STEP: Final = 500
"""Keys that are looked at, and deleted, together."""
_READ_COUNTED: Final = """
local value = redis.call('GET', KEYS[1])
if not value then return false end
if redis.call('DECR', KEYS[2]) <= 0 then
    redis.call('DEL', KEYS[1], KEYS[2])
else
    redis.call('EXPIRE', KEYS[1], ARGV[1])
    redis.call('EXPIRE', KEYS[2], ARGV[1])
end
return value
"""


def open_client(url: str, *, timeout_s: float) -> redis.Redis:
    """A client of a server. See :class:`Valkey`."""
    try:
        import redis.connection  # here: only this store needs it
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "Objects in Valkey need the package redis.", hint="Run `pip install 'farcall[valkey]'` where this runs."
        ) from error
    scheme, separator, rest = url.partition("://")
    try:
        return redis.Redis.from_url(
            f"{_OWN_SCHEMES.get(scheme, scheme)}{separator}{rest}",
            socket_timeout=timeout_s,
            socket_connect_timeout=min(timeout_s, 5.0),
            socket_read_size=_READ_BYTES,
            health_check_interval=30,
            # That of hiredis copies large values once more, and so takes four times as long.
            command_packer=redis.connection.PythonRespSerializer(_SMALL_BYTES, _encoded),
        )
    except ValueError as error:  # its text may have the password
        raise ConfigurationError(
            f"{place_of(url)} is not the URL of a Valkey.", hint="Write valkey://[:PASSWORD@]HOST:PORT/DATABASE."
        ) from error


def place_of(url: str) -> str:
    """A URL without user and password."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2].partition('?')[0]}"


@contextlib.contextmanager
def server_errors(url: str) -> Iterator[None]:
    """Errors of the server and the connection as those of a store."""
    from redis import exceptions

    try:
        yield
    except exceptions.OutOfMemoryError as error:
        raise StoreFull(f"The Valkey at {place_of(url)} has no memory left.") from error
    except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
        raise StoreDenied(f"The Valkey at {place_of(url)} refuses this user: {error}.") from error
    except exceptions.RedisError as error:
        raise StoreUnavailable(f"The Valkey at {place_of(url)}: {error}.") from error


class Valkey(ObjectConnector):
    """Objects in a Valkey or Redis server.

    A reference carries the URL, with the password in it, because its reader needs both.

    :param url: ``valkey://[[user]:password@]host:port/database``, or ``valkeys://`` with TLS; ``redis://``,
        ``rediss://`` and ``unix://`` are the same.
    :param timeout_s: how long to wait for an answer.
    :raises ConfigurationError: if the package redis is missing, or the URL is wrong.
    """

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._client = open_client(url, timeout_s=timeout_s)
        self._read_counted = self._client.register_script(_READ_COUNTED)

    def __repr__(self) -> str:
        return f"Valkey({place_of(self._url)!r})"

    def config(self) -> dict[str, Any]:
        return {"url": self._url, "timeout_s": self._timeout_s}

    def close(self) -> None:
        self._client.close()

    def write(self, key: Key, pieces: Sequence[Piece]) -> None:
        lifetime = lifetime_of(key)
        if lifetime.reads is not None:
            self._write_together([(key, pieces)])
            return
        with server_errors(self._url):
            self._client.set(_name(key), checked(pieces), ex=lifetime.expires_s)

    def put_batch(self, objs: Sequence[Any]) -> list[Key]:
        keys = [self.new_key() for _ in objs]
        self._write_together([(key, [memoryview(obj).cast("B")]) for key, obj in zip(keys, objs, strict=True)])
        return keys

    def _write_together(self, objects: Sequence[tuple[Key, Sequence[Piece]]]) -> None:
        lifetimes = [lifetime_of(key) for key, _ in objects]
        with server_errors(self._url), self._client.pipeline(transaction=True) as together:
            for (key, pieces), lifetime in zip(objects, lifetimes, strict=True):
                together.set(_name(key), checked(pieces), ex=lifetime.expires_s)
                if lifetime.reads is not None:
                    together.set(_left(key), lifetime.reads, ex=lifetime.expires_s)
            together.execute()

    def get(self, key: Key) -> memoryview | None:
        lifetime = lifetime_of(key)
        with server_errors(self._url):
            if lifetime.reads is not None:
                value = self._read_counted(keys=[_name(key), _left(key)], args=[str(lifetime.expires_s)])
            elif lifetime.expires_s is not None:
                value = self._client.getex(_name(key), ex=lifetime.expires_s)
            else:
                value = self._client.get(_name(key))
        return None if value is None else memoryview(value)

    def exists(self, key: Key) -> bool:
        lifetime_of(key)
        with server_errors(self._url):
            return bool(self._client.exists(_name(key)))

    def evict(self, key: Key) -> None:
        lifetime_of(key)
        with server_errors(self._url):
            self._client.unlink(_name(key), _left(key))

    def evict_group(self, group: str) -> None:
        with server_errors(self._url):
            cursor = 0
            while True:
                cursor, names = self._client.scan(cursor, match=f"{_PREFIX}{{*.g-{group}}}", count=_STEP)
                if names:
                    self._client.unlink(*names)
                if not cursor:
                    return


def checked(pieces: Sequence[Piece]) -> bytes:
    """The bytes of an object.

    :raises StoreFull: if they are more than a server takes.
    """
    if sum(map(len, pieces)) > MOST_BYTES:
        raise StoreFull(f"A Valkey takes objects of up to {MOST_BYTES:,} bytes.", hint="Use another store.")
    return b"".join(pieces)


def _encoded(argument: bytes | str | int) -> bytes:
    return argument if isinstance(argument, bytes) else str(argument).encode()


def _name(key: Key) -> str:
    """The key in the server; in a cluster it is in one slot with :func:`_left`."""
    return f"{_PREFIX}{{{key.name}}}"


def _left(key: Key) -> str:
    """The key of the number of remaining reads."""
    return f"{_name(key)}:reads"
