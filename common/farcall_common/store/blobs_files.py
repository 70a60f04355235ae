"""Blobs in a directory, behind signed addresses: the blob store of the local tier.

The API and the forwarder read and write the files; clients and agents go through an HTTP server on the same directory
(:mod:`farcall_local.blobs`), which serves an address if this deployment signed it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Literal

from farcall_common.errors import BlobUnknown, Forbidden, StorageLow, Unavailable
from farcall_common.store.model import PIECES, BlobRef

#: Files that were not finished begin with this; no name of a blob does.
_UNFINISHED: Final = ".new-"
#: A disk or a user's part of it is full; and when it is worth another try.
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_FULL_RETRY_S: Final = 10.0
#: What an address is signed for, in addition to its method and its blob.
_TERMS: Final = {"GET": {"expires_at"}, "PUT": {"expires_at", "size_bytes", "sha256"}}


class FileBlobs:
    """:class:`~farcall_common.store.ports.Blobs` in one directory of a local file system.

    :param directory: exists, and only its owner may enter it.
    :param url: where the HTTP server is.
    :param key: signs the addresses; the HTTP server has the same one.
    """

    def __init__(self, directory: Path, *, url: str, key: str) -> None:
        self._directory = directory
        self._url = url
        self._key = key.encode()

    # -- the port ------------------------------------------------------------------------------------------------------

    def ping(self) -> None:
        if not self._directory.is_dir():
            raise Unavailable(f"the directory of the blobs, {self._directory}, is not there")

    def upload_url(self, ref: BlobRef, *, ttl_s: int) -> tuple[str, Mapping[str, str]]:
        terms = {"size_bytes": str(ref.size_bytes), "sha256": ref.sha256}
        return self._address("PUT", ref.blob_key, terms, ttl_s), {"content-length": str(ref.size_bytes)}

    def download_url(self, blob_key: str, *, ttl_s: int) -> str:
        return self._address("GET", blob_key, {}, ttl_s)

    def size_bytes(self, blob_key: str) -> int | None:
        try:
            return self.path(blob_key).stat().st_size
        except FileNotFoundError:
            return None

    def renew(self, blob_key: str, *, older_than_s: float) -> int | None:
        with contextlib.suppress(FileNotFoundError):
            path = self.path(blob_key)
            if path.stat().st_mtime < time.time() - older_than_s:
                os.utime(path)
        return self.size_bytes(blob_key)

    def read(self, blob_key: str) -> bytes:
        with _known(blob_key):
            return self.path(blob_key).read_bytes()

    def read_part(self, blob_key: str, *, offset_bytes: int, length_bytes: int) -> bytes:
        with _known(blob_key), self.path(blob_key).open("rb") as file:
            file.seek(offset_bytes)
            return file.read(length_bytes)

    def write(self, blob_key: str, data: bytes) -> BlobRef:
        with self.new(blob_key) as blob:
            blob.write(data)
            return blob.commit()

    def delete(self, blob_keys: Sequence[str]) -> None:
        for blob_key in blob_keys:
            with contextlib.suppress(FileNotFoundError):
                self.path(blob_key).unlink()

    # -- for the HTTP server -------------------------------------------------------------------------------------------

    def path(self, blob_key: str) -> Path:
        """The file of a blob, if there is one. No key leads out of the directory: names have no slash and no dot."""
        return self._directory / urllib.parse.quote(blob_key, safe="").replace(".", "%2E")

    @contextlib.contextmanager
    def new(self, blob_key: str) -> Iterator[NewBlob]:
        """A blob that is there once it is committed, whole and on disk; until then it is a file of another name."""
        try:
            with tempfile.NamedTemporaryFile(dir=self._directory, prefix=_UNFINISHED, delete=False) as file:
                try:
                    yield NewBlob(file, blob_key, self.path(blob_key))
                finally:
                    Path(file.name).unlink(missing_ok=True)
        except OSError as error:
            if error.errno in _FULL:
                raise StorageLow(
                    f"The disk of {self._directory} is full.",
                    hint="Make room on it, or remove what is not needed any more; nothing that was accepted is lost.",
                    retry_after_s=_FULL_RETRY_S,
                ) from error
            raise Unavailable(f"the blob store cannot write: {error}") from error

    def expire(self, *, older_than_s: float, pieces_older_than_s: float) -> int:
        """Delete what was written, or renewed, longer ago; how many blobs these were. Pieces of files are kept for a
        time of their own."""
        now = time.time()
        prefix = self.path(PIECES).name
        expired = 0
        with os.scandir(self._directory) as entries:
            for entry in entries:
                before = now - (pieces_older_than_s if entry.name.startswith(prefix) else older_than_s)
                with contextlib.suppress(FileNotFoundError):
                    # Its own look, not the listing's: it may have been renewed since.
                    if entry.is_file(follow_symlinks=False) and Path(entry.path).stat().st_mtime < before:
                        Path(entry.path).unlink()
                        expired += 1
        return expired

    def remove_unfinished(self) -> None:
        """Delete what a server that was killed left behind. Only before the first write."""
        for unfinished in self._directory.glob(f"{_UNFINISHED}*"):
            unfinished.unlink()

    def check(self, method: Literal["GET", "PUT"], blob_key: str, query: Mapping[str, str]) -> None:
        """:raises Forbidden: unless this deployment signed the address for this method, and its time is not over."""
        terms = {name: value for name, value in query.items() if name != "signature"}
        signature = self._signature(method, blob_key, terms)
        if terms.keys() != _TERMS[method] or not hmac.compare_digest(
            signature.encode(), query.get("signature", "").encode()
        ):
            raise Forbidden("The address is not one that this deployment signed.")
        if float(terms["expires_at"]) < time.time():
            raise Forbidden("The time of the address is over.", hint="Ask for a new one.")

    def _address(self, method: str, blob_key: str, terms: Mapping[str, str], ttl_s: int) -> str:
        terms = {**terms, "expires_at": str(int(time.time()) + ttl_s)}
        signed = {**terms, "signature": self._signature(method, blob_key, terms)}
        return f"{self._url}/{urllib.parse.quote(blob_key)}?{urllib.parse.urlencode(signed)}"

    def _signature(self, method: str, blob_key: str, terms: Mapping[str, str]) -> str:
        text = "\n".join([method, blob_key, *(f"{name}={terms[name]}" for name in sorted(terms))])
        return hmac.digest(self._key, text.encode(), "sha256").hex()


class NewBlob:
    """A blob that is being written."""

    def __init__(self, file: IO[bytes], blob_key: str, path: Path) -> None:
        self._file = file
        self._blob_key = blob_key
        self._path = path
        self._hash = hashlib.sha256()
        self.size_bytes = 0

    @property
    def ref(self) -> BlobRef:
        """Reference to the bytes that were written until now."""
        return BlobRef(self._blob_key, self.size_bytes, self._hash.hexdigest())

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._file.write(data)
        self._hash.update(data)
        self.size_bytes += len(data)

    def commit(self) -> BlobRef:
        """Make the blob durable and visible, in place of an older one with its key."""
        self._file.flush()
        os.fsync(self._file.fileno())
        Path(self._file.name).replace(self._path)
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return self.ref


@contextlib.contextmanager
def _known(blob_key: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise BlobUnknown(f"there is no blob {blob_key}") from error
    except OSError as error:
        raise Unavailable(f"the blob store cannot read: {error}") from error
