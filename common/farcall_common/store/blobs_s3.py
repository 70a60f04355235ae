"""Blobs in S3: payloads and results too big to travel inline. Only references and signed URLs pass through the cloud.

boto3 takes a quarter of a second to import, and most requests need no blob; so it is imported by the first that does.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from farcall_common.errors import BlobUnknown, Unavailable
from farcall_common.store.model import BlobRef

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


class S3Blobs:
    """:class:`~farcall_common.store.ports.Blobs` in one bucket. Address, region, credentials: AWS' own variables.

    :param bucket: the deployment's bucket; it exists already.
    """

    def __init__(self, bucket: str) -> None:
        self._bucket = bucket

    @functools.cached_property
    def _client(self) -> S3Client:
        import boto3
        from botocore.config import Config

        # Path-style, because a name under localhost does not resolve; signature 4, because only it binds headers.
        config = Config(
            signature_version="s3v4",
            s3={"addressing_style": "path"},
            connect_timeout=5,
            read_timeout=30,
            retries={"mode": "standard", "max_attempts": 3},
        )
        return boto3.client("s3", config=config)

    def ping(self) -> None:
        with _mapped(None):
            self._client.head_bucket(Bucket=self._bucket)

    def upload_url(self, ref: BlobRef, *, ttl_s: int) -> tuple[str, Mapping[str, str]]:
        checksum = base64.b64encode(bytes.fromhex(ref.sha256)).decode()
        with _mapped(ref.blob_key):
            url = self._client.generate_presigned_url(
                "put_object",
                Params={
                    "Bucket": self._bucket,
                    "Key": ref.blob_key,
                    "ContentLength": ref.size_bytes,
                    "ChecksumSHA256": checksum,
                },
                ExpiresIn=ttl_s,
            )
        return url, {"content-length": str(ref.size_bytes), "x-amz-checksum-sha256": checksum}

    def download_url(self, blob_key: str, *, ttl_s: int) -> str:
        with _mapped(blob_key):
            return self._client.generate_presigned_url(
                "get_object", Params={"Bucket": self._bucket, "Key": blob_key}, ExpiresIn=ttl_s
            )

    def size_bytes(self, blob_key: str) -> int | None:
        try:
            with _mapped(blob_key):
                return self._client.head_object(Bucket=self._bucket, Key=blob_key)["ContentLength"]
        except BlobUnknown:
            return None

    def renew(self, blob_key: str, *, older_than_s: float) -> int | None:
        try:
            with _mapped(blob_key):
                found = self._client.head_object(Bucket=self._bucket, Key=blob_key)
            if time.time() - found["LastModified"].timestamp() > older_than_s:
                self.write(blob_key, self.read(blob_key))
        except BlobUnknown:
            return None
        return found["ContentLength"]

    def read(self, blob_key: str) -> bytes:
        with _mapped(blob_key):
            return self._client.get_object(Bucket=self._bucket, Key=blob_key)["Body"].read()

    def read_part(self, blob_key: str, *, offset_bytes: int, length_bytes: int) -> bytes:
        wanted = f"bytes={offset_bytes}-{offset_bytes + length_bytes - 1}"
        with _mapped(blob_key):
            return self._client.get_object(Bucket=self._bucket, Key=blob_key, Range=wanted)["Body"].read()

    def write(self, blob_key: str, data: bytes) -> BlobRef:
        digest = hashlib.sha256(data)
        checksum = base64.b64encode(digest.digest()).decode()
        with _mapped(blob_key):
            self._client.put_object(Bucket=self._bucket, Key=blob_key, Body=data, ChecksumSHA256=checksum)
        return BlobRef(blob_key, len(data), digest.hexdigest())

    def delete(self, blob_keys: Sequence[str]) -> None:
        for blob_key in blob_keys:  # a request each: one for many needs the MD5 of its body, or a newer checksum
            with _mapped(None):
                self._client.delete_object(Bucket=self._bucket, Key=blob_key)


@contextlib.contextmanager
def _mapped(blob_key: str | None) -> Iterator[None]:
    """The client's errors as ours; without a key there is no blob to be unknown."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        if blob_key is not None and error.response.get("Error", {}).get("Code") in ("404", "NoSuchKey"):
            raise BlobUnknown(f"there is no blob {blob_key}") from error
        raise Unavailable(f"the blob store refused: {error}") from error
    except BotoCoreError as error:
        raise Unavailable(f"the blob store does not answer: {error}") from error
