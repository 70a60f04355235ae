"""Blobs: uploads of large payloads, and the check of references to them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final

from farcall_common.errors import BlobUnknown, Forbidden, InvalidRequest, PayloadTooLarge
from farcall_common.store.model import BlobRef
from farcall_lambdas.identity import Identity
from farcall_lambdas.services.base import Service

#: A blob lives for the maximum wait, the retention and a day; one that is used again after that day starts over.
_RENEWED_AFTER_S: Final = 86_400.0


def blob_key(owner_id: str, sha256: str) -> str:
    """The key of an owner's blob: equal bytes of one owner are one blob, and owners never share one."""
    return f"{owner_id}/{sha256}"


class BlobService(Service):
    """Grants uploads and checks references."""

    def grant_upload(
        self, identity: Identity, *, size_bytes: int, sha256: str
    ) -> tuple[BlobRef, str, Mapping[str, str]]:
        """A pre-signed PUT for bytes of the caller, and the headers to send with it.

        :raises PayloadTooLarge: over the payload limit.
        :raises QuotaExceeded: if the caller has stored too much in the last day.
        """
        self.check_size(size_bytes)
        self._storage.add(identity, blob_bytes=size_bytes)
        ref = BlobRef(blob_key(identity.identity_id, sha256), size_bytes, sha256)
        url, headers = self._stores.blobs.upload_url(ref, ttl_s=self._settings.url_ttl_s)
        return ref, url, headers

    def check_size(self, size_bytes: int) -> None:
        """:raises PayloadTooLarge: over the payload limit."""
        if size_bytes > self._settings.max_payload_bytes:
            raise PayloadTooLarge(f"A payload has {size_bytes} bytes; {self._settings.max_payload_bytes} are allowed.")

    def check_references(self, identity: Identity, refs: Iterable[BlobRef]) -> None:
        """Check that every reference is the caller's, was uploaded and has the size that it claims.

        :raises Forbidden: for someone else's blob.
        :raises BlobUnknown: for one that was never uploaded.
        :raises InvalidRequest: for one that does not fit its description.
        """
        for ref in refs:
            self.check_size(ref.size_bytes)
            owner_id, _, sha256 = ref.blob_key.partition("/")
            if not identity.owns(owner_id):
                raise Forbidden(f"Blob {ref.blob_key} is not yours.", hint="Refer to a blob that you uploaded.")
            # Checked first: nothing but an owner's id and a hash ever becomes part of an address.
            if sha256 != ref.sha256:
                raise InvalidRequest(f"Blob {ref.blob_key} does not have the hash of the reference.")
            size_bytes = self._stores.blobs.renew(ref.blob_key, older_than_s=_RENEWED_AFTER_S)
            if size_bytes is None:
                raise BlobUnknown(f"There is no blob {ref.blob_key}.")
            if size_bytes != ref.size_bytes:
                raise InvalidRequest(f"Blob {ref.blob_key} does not have the size of the reference.")

    def reference(self, identity: Identity, data: bytes) -> BlobRef:
        """The reference to bytes of the caller, once they are stored."""
        sha256 = hashlib.sha256(data).hexdigest()
        return BlobRef(blob_key(identity.identity_id, sha256), len(data), sha256)

    def store(self, uploads: Mapping[BlobRef, bytes]) -> None:
        """Store payloads that were sent inline and are too large for the database."""
        for ref, data in uploads.items():
            self._stores.blobs.write(ref.blob_key, data)
