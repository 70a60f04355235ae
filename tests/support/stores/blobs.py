"""Blobs in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from farcall_common.errors import BlobUnknown, InvalidRequest
from farcall_common.store.model import BlobRef
from tests.support.stores.reach import Reach

_SCHEME = "memory://blobs/"


class FakeBlobs(Reach):
    """:class:`~farcall_common.store.ports.Blobs` whose URLs only :meth:`put` and :meth:`fetch` understand."""

    def __init__(self) -> None:
        super().__init__()
        self._blobs: dict[str, bytes] = {}
        self._grants: dict[str, BlobRef] = {}
        #: What was asked to live on, by key.
        self.renewed: list[str] = []

    def upload_url(self, ref: BlobRef, *, ttl_s: int) -> tuple[str, Mapping[str, str]]:
        with self._call():
            url = f"{_SCHEME}{ref.blob_key}?ttl_s={ttl_s}"
            self._grants[url] = ref
            return url, {"content-length": str(ref.size_bytes), "x-amz-checksum-sha256": ref.sha256}

    def download_url(self, blob_key: str, *, ttl_s: int) -> str:
        return f"{_SCHEME}{blob_key}?ttl_s={ttl_s}"

    def size_bytes(self, blob_key: str) -> int | None:
        with self._call():
            return len(self._blobs[blob_key]) if blob_key in self._blobs else None

    def renew(self, blob_key: str, *, older_than_s: float) -> int | None:
        size_bytes = self.size_bytes(blob_key)
        if size_bytes is not None:
            self.renewed.append(blob_key)
        return size_bytes

    def read(self, blob_key: str) -> bytes:
        with self._call():
            if blob_key not in self._blobs:
                raise BlobUnknown(f"there is no blob {blob_key}")
            return self._blobs[blob_key]

    def read_part(self, blob_key: str, *, offset_bytes: int, length_bytes: int) -> bytes:
        return self.read(blob_key)[offset_bytes : offset_bytes + length_bytes]

    def write(self, blob_key: str, data: bytes) -> BlobRef:
        with self._call():
            self._blobs[blob_key] = data
            return BlobRef(blob_key, len(data), hashlib.sha256(data).hexdigest())

    def delete(self, blob_keys: Sequence[str]) -> None:
        with self._call():
            for blob_key in blob_keys:
                self._blobs.pop(blob_key, None)

    def put(self, url: str, data: bytes) -> None:
        """What an uploader does with an upload URL. Raises InvalidRequest for other bytes than were granted."""
        ref = self._grants[url]
        if (len(data), hashlib.sha256(data).hexdigest()) != (ref.size_bytes, ref.sha256):
            raise InvalidRequest("the bytes are not those that the upload was granted for")
        self.write(ref.blob_key, data)

    def fetch(self, url: str) -> bytes:
        """What a reader does with a download URL."""
        return self.read(url.removeprefix(_SCHEME).partition("?")[0])

    def expire(self) -> None:
        """What a lifecycle rule does: every blob is gone."""
        with self._call():
            self._blobs.clear()
