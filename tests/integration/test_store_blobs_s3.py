"""Blobs in an S3 that speaks HTTP: the suite of every Blobs, and the signature of an upload."""

from __future__ import annotations

import base64
import urllib.parse
from collections.abc import Callable, Iterator

import boto3
import httpx
import pytest

from farcall_common.errors import Unavailable
from farcall_common.store import BlobRef, Blobs, S3Blobs
from tests.integration.store_servers import free_port
from tests.unit.test_store_blobs import DATA, REF, BlobsSuite


@pytest.fixture
def blobs(s3_environment: None) -> Iterator[Blobs]:
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket="farcall-blobs")
    yield S3Blobs("farcall-blobs")
    for item in s3.list_objects_v2(Bucket="farcall-blobs").get("Contents", []):
        s3.delete_object(Bucket="farcall-blobs", Key=item["Key"])
    s3.delete_bucket(Bucket="farcall-blobs")


class TestS3Blobs(BlobsSuite):
    @pytest.fixture
    def upload(self, blobs: Blobs) -> Callable[[BlobRef, bytes], bool]:
        def put(ref: BlobRef, data: bytes) -> bool:
            url, headers = blobs.upload_url(ref, ttl_s=60)
            return httpx.put(url, content=data, headers=dict(headers)).is_success

        return put

    @pytest.fixture
    def download(self) -> Callable[[str], bytes]:
        return lambda url: httpx.get(url).raise_for_status().content


def test_an_upload_is_bound_to_its_length_and_checksum(blobs: Blobs) -> None:
    url, headers = blobs.upload_url(REF, ttl_s=60)
    parts = urllib.parse.urlsplit(url)
    query = urllib.parse.parse_qs(parts.query)
    assert parts.path == f"/farcall-blobs/{REF.blob_key}"
    assert set(query["X-Amz-SignedHeaders"][0].split(";")) == {"host", *headers}
    assert query["X-Amz-Expires"] == ["60"]
    assert headers["content-length"] == str(len(DATA))
    assert base64.b64decode(headers["x-amz-checksum-sha256"]).hex() == REF.sha256


def test_an_absent_store_is_unavailable(s3_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(Unavailable):
        S3Blobs("farcall-blobs").ping()


def test_a_missing_bucket_is_not_a_missing_blob(blobs: Blobs) -> None:
    with pytest.raises(Unavailable):
        S3Blobs("another-bucket").read(REF.blob_key)


def test_only_an_old_blob_is_written_again(blobs: Blobs) -> None:
    """A lifecycle rule counts from the last write, which leaves out what the first has said besides."""
    s3 = boto3.client("s3")
    s3.put_object(Bucket="farcall-blobs", Key=REF.blob_key, Body=DATA, Metadata={"first": "yes"})

    def is_first() -> bool:
        return bool(s3.head_object(Bucket="farcall-blobs", Key=REF.blob_key)["Metadata"])

    blobs.renew(REF.blob_key, older_than_s=86_400)
    assert is_first()
    blobs.renew(REF.blob_key, older_than_s=-60)
    assert not is_first()
