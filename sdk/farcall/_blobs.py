"""User bytes that are too big to travel inline: uploaded before the submit, downloaded behind the result."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import threading
import time
from collections import OrderedDict
from typing import Any, Final

from farcall._api import Api
from farcall_common.errors import DeserializationError, Forbidden

#: Payloads up to this size travel inside the submit. The API puts those over 64 KiB into the blob store by itself,
#: which spares the client two requests.
INLINE_BYTES: Final = 256 * 1024

_REMEMBERED: Final = 4096
#: An upload is trusted to be there for this long; the store keeps blobs for days.
_TRUSTED_FOR_S: Final = 3600.0


@dataclasses.dataclass(frozen=True)
class BlobRef:
    """Bytes in the blob store: key, size in bytes, SHA-256 in hex."""

    blob_key: str
    size_bytes: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        """The reference as a submit carries it in the place of a payload."""
        return dataclasses.asdict(self)


class Blobs:
    """Uploads and downloads. May be used from any thread; equal bytes are uploaded once."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._uploads: OrderedDict[str, tuple[float, concurrent.futures.Future[BlobRef]]] = OrderedDict()

    def upload(self, data: bytes) -> BlobRef:
        """Put bytes into the blob store, unless equal bytes are there or on their way already.

        :raises FarcallError: what the API or the network has against it.
        """
        sha256 = hashlib.sha256(data).hexdigest()
        with self._lock:
            known = self._uploads.get(sha256)
            if known is None or time.monotonic() - known[0] > _TRUSTED_FOR_S:
                upload = concurrent.futures.Future[BlobRef]()
                self._uploads[sha256] = time.monotonic(), upload
                self._uploads.move_to_end(sha256)
                if len(self._uploads) > _REMEMBERED:
                    self._uploads.popitem(last=False)
            else:
                upload = known[1]
        if known is None or known[1] is not upload:
            self._perform(upload, data, sha256)
        return upload.result()

    def forget(self, sha256: str) -> None:
        """Stop trusting that these bytes are in the store."""
        with self._lock:
            self._uploads.pop(sha256, None)

    def download(self, ref: BlobRef, url: str) -> memoryview:
        """Fetch bytes from a pre-signed address and check that they are the right ones. They are the caller's to use:
        what is read from them may stay in them.

        :raises DeserializationError: if they are not.
        :raises FarcallError: what the store or the network has against it.
        """
        data = self._api.http.get(url, most_bytes=ref.size_bytes)
        if len(data) != ref.size_bytes or hashlib.sha256(data).hexdigest() != ref.sha256:
            raise DeserializationError(
                f"The bytes of blob {ref.blob_key} are not those that were stored.", hint="Ask for the result again."
            )
        return memoryview(data)

    def _perform(self, upload: concurrent.futures.Future[BlobRef], data: bytes, sha256: str) -> None:
        try:
            try:
                blob_key = self._put(data, sha256)
            except Forbidden:  # a pre-signed address lives for minutes, and the machine may have slept
                blob_key = self._put(data, sha256)
            upload.set_result(BlobRef(blob_key, len(data), sha256))
        except BaseException as error:
            self.forget(sha256)  # the next one to come tries again
            upload.set_exception(error)
            raise

    def _put(self, data: bytes, sha256: str) -> str:
        grant = self._api.grant_blob(size_bytes=len(data), sha256=sha256)
        self._api.http.put(grant["upload_url"], data, headers=grant["headers"])
        return str(grant["blob_key"])
