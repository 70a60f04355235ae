"""Objects in S3: for values that clients and endpoints at any place exchange."""

from __future__ import annotations

import contextlib
import datetime as dt
import re
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from farcall_common.errors import ConfigurationError, StoreBusy, StoreDenied, StoreFull, StoreUnavailable
from farcall_common.object_keys import Key, Lifetime, lifetime_of
from farcall_common.objects.connectors import ObjectConnector
from farcall_common.payload import Piece

if TYPE_CHECKING:
    from obstore.store import S3Store

_PART_BYTES: Final = 16 * 2**20
"""Above this size an object is uploaded in parts, a few at the same time."""
_RETRIES: Final = 3
_RETRY_TIMEOUT: Final = dt.timedelta(seconds=60)
_EXPRESS: Final = "--x-s3"
"""Names of directory buckets, those of S3 Express One Zone, end with it."""
_FOR_CREDENTIALS: Final = ("/latest/api/token", "/latest/meta-data/iam/", "//169.254.170.2/")
"""Parts of the addresses that obstore asks for credentials if it was given none: the metadata services of AWS."""
_BUSY: Final = re.compile(
    r"status code: (408|429|500|502|503|504)\b"
    r"|HTTP error: "  # no answer, or not all of it: refused, reset, timed out
    r"|<Code>(SlowDown|InternalError|ServiceUnavailable|RequestTimeout|ConditionalRequestConflict)</Code>"
)
"""What obstore says of a request that may be answered if it is made again. Its class is the same for all errors."""

_FULL: Final = re.compile(r"\(os error (28|122)\)")
"""The same of a directory without room."""


def open_bucket(
    url: str,
    *,
    endpoint_url: str | None = None,
    region: str | None = None,
    retries: int = _RETRIES,
    stall_s: float | None = None,
) -> S3Store:
    """A client of obstore for a bucket and a prefix in it. See :class:`S3`.

    :param retries: that obstore makes by itself.
    :param stall_s: after which a request fails that gets no byte; an upload gets none before its end.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import S3Store  # here: only this store needs it
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "Objects in S3 need the package obstore.", hint="Run `pip install 'farcall[s3]'` where this runs."
        ) from error
    is_express = url.removeprefix("s3://").partition("/")[0].endswith(_EXPRESS)
    options: dict[str, Any] = {"endpoint": endpoint_url, "region": region, "s3_express": is_express or None}
    client_options = {"allow_http": True, "connect_timeout": "5s", "timeout": "10m"}
    if stall_s is not None:
        client_options["read_timeout"] = f"{stall_s * 1000:.0f}ms"
    if not url.startswith("s3://"):
        raise ConfigurationError(f"{url} is not the address of a bucket.", hint="Write s3://BUCKET/PREFIX.")
    try:
        return S3Store.from_url(
            url,
            client_options=client_options,  # type: ignore[arg-type]
            retry_config={"max_retries": retries, "retry_timeout": _RETRY_TIMEOUT},
            **{name: value for name, value in options.items() if value is not None},
        )
    except (BaseError, ValueError) as error:
        raise ConfigurationError(
            f"{url} cannot be a store: {_short(error)}", hint="Write s3://BUCKET/PREFIX."
        ) from error


@contextlib.contextmanager
def bucket_errors(url: str) -> Iterator[None]:
    """Errors of the service as those of a store; :class:`StoreBusy` if the request may be made again."""
    from obstore import exceptions

    try:
        yield
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise StoreDenied(f"{url} refuses these credentials: {_short(error)}") from error
    except exceptions.BaseError as error:
        if any(each in str(error) for each in _FOR_CREDENTIALS):
            raise StoreDenied(
                f"There are no credentials for {url}.",
                hint="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY where this runs, or give its machine a role.",
            ) from error
        if _FULL.search(str(error)):
            raise StoreFull(f"{url} has no room.") from error
        kind = StoreBusy if _BUSY.search(str(error)) else StoreUnavailable
        raise kind(f"{url}: {_short(error)}") from error


class S3(ObjectConnector):
    """Objects in a bucket of S3, or of what speaks its protocol.

    Credentials do not travel with references: each side takes its own, from AWS' environment variables or the role of
    its machine.

    S3 deletes nothing by itself. An object that has expired, counted from its upload, is not found any more; a
    lifecycle rule of the bucket for the prefix ``PREFIX/t/`` deletes it (``c/`` those with counted reads, ``g/`` those
    of groups, ``x/`` explicit ones).

    :param url: ``s3://bucket/prefix``.
    :param endpoint_url: of another service than AWS; by default that of the environment.
    :param region: by default that of the environment.
    :raises ConfigurationError: if the package obstore is missing, or the URL is wrong.
    """

    def __init__(self, url: str, *, endpoint_url: str | None = None, region: str | None = None) -> None:
        self._url = url
        self._endpoint_url = endpoint_url
        self._region = region
        self._store = open_bucket(url, endpoint_url=endpoint_url, region=region)

    def __repr__(self) -> str:
        return f"S3({self._url!r})"

    def config(self) -> dict[str, Any]:
        return {"url": self._url, "endpoint_url": self._endpoint_url, "region": self._region}

    def write(self, key: Key, pieces: Sequence[Piece]) -> None:
        path = _path(key, lifetime_of(key))
        is_large = sum(map(len, pieces)) > _PART_BYTES
        with bucket_errors(self._url):
            try:
                self._store.put(path, iter(pieces) if is_large else b"".join(pieces), chunk_size=_PART_BYTES)
            except FileNotFoundError as error:
                raise ConfigurationError(f"There is no bucket for {self._url}.", hint="Create it first.") from error

    def get(self, key: Key) -> memoryview | None:
        lifetime = lifetime_of(key)
        path = _path(key, lifetime)
        with bucket_errors(self._url), contextlib.suppress(FileNotFoundError):
            found = self._store.get(path)
            if _has_expired(found.meta["last_modified"], lifetime):
                return None
            data = memoryview(found.bytes())
            return data if lifetime.reads is None or self._claim(path, lifetime.reads) else None
        return None

    def exists(self, key: Key) -> bool:
        lifetime = lifetime_of(key)
        with bucket_errors(self._url), contextlib.suppress(FileNotFoundError):
            return not _has_expired(self._store.head(_path(key, lifetime))["last_modified"], lifetime)
        return False

    def evict(self, key: Key) -> None:
        lifetime = lifetime_of(key)
        path = _path(key, lifetime)
        with bucket_errors(self._url):
            self._delete([path])
            if lifetime.reads is not None:
                self._delete_below(f"{path}.reads/")

    def evict_group(self, group: str) -> None:
        with bucket_errors(self._url):
            self._delete_below(f"g/{group}/")

    def _claim(self, path: str, reads: int) -> bool:
        """Take one of the reads of an object: a mark that only one reader can create. Each costs a request."""
        from obstore.exceptions import AlreadyExistsError

        for number in range(1, reads + 1):
            try:
                self._store.put(f"{path}.reads/{number}", b"", mode="create")
            except AlreadyExistsError:
                continue
            if number == reads:
                self._delete([path])  # the marks stay until a lifecycle rule: they keep late readers out
            return True
        return False

    def _delete_below(self, prefix: str) -> None:
        for page in self._store.list(prefix):
            self._delete([each["path"] for each in page])

    def _delete(self, paths: Sequence[str]) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._store.delete(list(paths))


def _path(key: Key, lifetime: Lifetime) -> str:
    """The path of an object: by its lifetime, so that rules of the bucket can be by prefix."""
    folder = lifetime.suffix[0] if lifetime.group is None else f"g/{lifetime.group}"
    return f"{folder}/{key.name}"


def _has_expired(modified_at: dt.datetime, lifetime: Lifetime) -> bool:
    return lifetime.expires_s is not None and time.time() - modified_at.timestamp() > lifetime.expires_s


def _short(error: Exception) -> str:
    """The first line of an error: what follows are the Rust values that it is made of."""
    return str(error).partition("\n")[0][:300]
