"""Mover of objects: S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage; by ``obstore``."""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import obstore
from obstore import exceptions
from obstore.store import ObjectStore, from_url

from farcall_common.file_arguments import shown
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.files.movers import DraftWriter, Found, MoveCancelled, MoveError, is_settled
from farcall_endpoint.files.movers.ranges import Chunk, Helpers, RangeReader

SCHEMES: Final = frozenset({"az", "gs", "s3"})
_QUERY: Final = re.compile(r"\?[^\s\"')]*")
_CAUSE: Final = re.compile(r'\b(?:error|message): "([^"\n]{1,200})"')
"""Cause of a connection error, in the lines after the first: obstore has no other place for it."""
_FOR_CREDENTIALS: Final = (
    "/latest/api/token",
    "/latest/meta-data/iam/",
    "//169.254.170.2/",
    "/computeMetadata/v1/",
    "/metadata/identity/oauth2/token",
)
"""Parts of the addresses that obstore asks for credentials if it was given none: the metadata services of clouds."""
_OTHER_REGION: Final = "redirect without LOCATION"
"""Text in obstore's error for an S3 bucket in another region."""
_MOST_CHARACTERS: Final = 500
_RANGES_FROM_BYTES: Final = 32 * 2**20
_CHUNK_BYTES: Final = 256 * 2**10
"""Least bytes that are passed on: a few seconds of a slow line, and few turns of a fast one."""
_PART_BYTES: Final = 8 * 2**20
_MOST_PARTS: Final = 9_000
_CLIENT: Final[Mapping[str, str]] = {"timeout": "24h", "read_timeout": "60s", "connect_timeout": "15s"}
"""``timeout`` is that of a whole request, whose length is not known; the plan has limits."""
_RETRIES: Final[Mapping[str, Any]] = {
    "max_retries": 3,
    "retry_timeout": datetime.timedelta(seconds=60),
    "backoff": {"init_backoff": datetime.timedelta(seconds=0.2), "max_backoff": datetime.timedelta(seconds=5)},
}
_CLIENT_OPTIONS: Final = frozenset({"allow_http", "allow_invalid_certificates", "proxy_url", "proxy_ca_certificate"})
"""Options of a storage that configure its connections."""
_AWS_CREDENTIALS: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_SKIP_SIGNATURE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
)


def open_store(root: str, options: Mapping[str, str]) -> ObjectStore:
    """The store of a bucket or container.

    :param root: its URL, such as ``s3://bucket``.
    :param options: as ``obstore`` names them; a value ``$NAME`` is that of an environment variable.
    :raises ValueError: for an option that does not exist, or an environment variable that is not set.
    """
    values = {name: _value(name, value) for name, value in options.items()}
    client: dict[str, Any] = {**_CLIENT, **{name: values.pop(name) for name in _CLIENT_OPTIONS & values.keys()}}
    endpoint = values.get("endpoint") or values.get("aws_endpoint") or os.environ.get("AWS_ENDPOINT_URL", "")
    if endpoint.startswith("http://"):
        client.setdefault("allow_http", "true")
    extra: dict[str, Any] = {}
    if root.startswith("s3://") and not options and not any(os.environ.get(name) for name in _AWS_CREDENTIALS):
        extra = _from_profile()
    try:
        store: ObjectStore = from_url(  # type: ignore[call-overload]
            root, config=values or None, client_options=client, retry_config=_RETRIES, **extra
        )
    except exceptions.BaseError as error:
        raise ValueError(_first_line(error)) from error
    return store


def _value(name: str, value: str) -> str:
    if not value.startswith("$"):
        return value
    variable = value[1:].strip("{}")
    found = os.environ.get(variable)
    if found is None:
        raise ValueError(f"{name}: the environment variable {variable} is not set")
    return found


def _from_profile() -> dict[str, Any]:
    """Credentials of the files in ``~/.aws``, where boto3 is installed: obstore does not read these."""
    try:
        directory = Path.home() / ".aws"
    except RuntimeError:  # a user without a home directory
        return {}
    if not ((directory / "credentials").exists() or (directory / "config").exists()):
        return {}
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider  # where boto3 is, and it takes a while
    except ImportError:
        return {}
    try:
        provider = Boto3CredentialProvider()
    except ValueError:  # it has none
        return {}
    return {**provider.config, "credential_provider": provider}


Stores = Callable[[str], ObjectStore]


def open_stores(options: Mapping[str, str]) -> Stores:
    """The stores of all buckets that are reached with the same options, by their roots; see :func:`open_store`."""
    return functools.lru_cache(maxsize=64)(functools.partial(open_store, options=options))


class ObjectMover:
    """Moves objects for one submitter."""

    def __init__(self, stores: Stores, submitter: str) -> None:
        self._store = stores
        self._submitter = submitter

    def stat(self, url: str) -> Found:
        """See :class:`~farcall_endpoint.files.movers.Mover`."""
        store, key = self._open(url)
        with _mapped(url):
            return _found(obstore.head(store, key))

    def fetch(
        self, url: str, draft: Path, found: Found, report: Callable[[int], None], cancelled: Callable[[], bool]
    ) -> str:
        """See :class:`~farcall_endpoint.files.movers.Mover`."""
        store, key = self._open(url)
        with _mapped(url), DraftWriter(draft) as file:
            for chunk, received_bytes in _chunks(store, key, found, self._submitter):
                if cancelled():
                    raise MoveCancelled
                file.write(memoryview(chunk))
                report(received_bytes)
        if file.size_bytes != found.size_bytes:
            raise MoveError(outcomes.file_changed(shown(url)))
        return file.sha256()

    def store(self, source: Path, url: str, report: Callable[[int], None], cancelled: Callable[[], bool]) -> Found:
        """See :class:`~farcall_endpoint.files.movers.Mover`."""
        store, key = self._open(url)
        digest = hashlib.sha256()
        whole_bytes = source.stat().st_size  # what its submitter writes later is not read: it might never end
        part_bytes = max(_PART_BYTES, whole_bytes // _MOST_PARTS)
        size_bytes = 0

        def parts() -> Iterator[bytes]:
            nonlocal size_bytes
            with source.open("rb") as file:
                while chunk := file.read(min(part_bytes, whole_bytes - size_bytes)):
                    if cancelled():
                        raise MoveCancelled
                    digest.update(chunk)
                    size_bytes += len(chunk)
                    report(size_bytes)
                    yield chunk

        with _mapped(url, is_output=True):
            if whole_bytes <= part_bytes:
                body = b"".join(parts())
                put = obstore.put(store, key, body, use_multipart=False)
            else:
                put = obstore.put(store, key, parts(), chunk_size=part_bytes, max_concurrency=4)
        return Found(size_bytes, put["e_tag"] or put["version"] or "", digest.hexdigest())

    def _open(self, url: str) -> tuple[ObjectStore, str]:
        scheme, _, rest = url.partition("://")
        bucket, _, key = rest.partition("/")
        try:
            return self._store(f"{scheme}://{bucket}"), key
        except ValueError as error:
            raise MoveError(outcomes.file_no_credentials(shown(url), str(error))) from error


def _chunks(store: ObjectStore, key: str, found: Found, submitter: str) -> Iterator[tuple[Chunk, int]]:
    """The content of an object in order, each piece with the number of bytes that have come so far.

    :raises PreconditionError: if it is not the version that was found.
    """
    if not found.version.startswith('"') or found.size_bytes is None or found.size_bytes < _RANGES_FROM_BYTES:
        size_bytes = 0
        for chunk in _stream(obstore.get(store, key), found):
            size_bytes += len(chunk)
            yield chunk, size_bytes
        return

    def get(start: int, end: int) -> Iterator[Chunk]:
        return _stream(obstore.get(store, key, options={"range": (start, end), "if_match": found.version}), found)

    with _helpers().share_of(submitter) as share:
        yield from RangeReader(found.size_bytes, get, share).chunks()


def _stream(result: obstore.GetResult, found: Found) -> Iterator[Chunk]:
    now = _found(result.meta)
    if now.size_bytes != found.size_bytes or (found.version and now.version != found.version):
        raise exceptions.PreconditionError  # not every store knows if-match
    yield from result.stream(min_chunk_size=_CHUNK_BYTES)


@functools.cache
def _helpers() -> Helpers:
    return Helpers()


def _found(meta: Any) -> Found:
    modified = meta["last_modified"]
    version = meta["e_tag"] or meta["version"] or (modified.isoformat() if is_settled(modified) else "")
    return Found(int(meta["size"]), str(version))


@contextlib.contextmanager
def _mapped(url: str, *, is_output: bool = False) -> Iterator[None]:
    """Errors of the store as those of a mover."""
    try:
        yield
    except (FileNotFoundError, exceptions.NotFoundError) as error:
        missing = outcomes.bucket_not_found if is_output else outcomes.file_not_found
        raise MoveError(missing(shown(url))) from error
    except (PermissionError, exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        reason = f"the storage refuses the endpoint's credentials ({_first_line(error)})"
        raise MoveError(outcomes.file_denied(shown(url), reason)) from error
    except (ValueError, exceptions.InvalidPathError, exceptions.NotSupportedError) as error:
        raise MoveError(outcomes.file_unsupported(shown(url), _first_line(error))) from error
    except exceptions.PreconditionError as error:
        raise MoveError(outcomes.file_changed(shown(url))) from error
    except exceptions.BaseError as error:
        text = str(error)
        if any(each in text for each in _FOR_CREDENTIALS):
            reason = "its environment and files.storages have none, and this machine's cloud gives none"
            raise MoveError(outcomes.file_no_credentials(shown(url), reason)) from error
        if _OTHER_REGION in text:
            reason = "the bucket is in another region than AWS_REGION or the option region says"
            raise MoveError(outcomes.file_denied(shown(url), reason)) from error
        cause = _CAUSE.search(text)
        reason = _first_line(error) + (f" ({cause[1]})" if cause else "")
        raise MoveError(outcomes.file_unreachable(shown(url), reason)) from error


def _first_line(error: BaseException) -> str:
    """Return the first line of an obstore error without the queries of URLs, which may have signatures."""
    line = str(error).strip().split("\n", 1)[0]
    return _QUERY.sub("", line)[:_MOST_CHARACTERS]
