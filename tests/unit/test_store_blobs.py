"""What every Blobs must do. Here on the fake; test_store_blobs_s3 runs the same suite on S3."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest

from farcall_common.errors import BlobUnknown, InvalidRequest, Unavailable
from farcall_common.store import BlobRef, Blobs
from farcall_common.store.model import PIECES
from tests.support.stores import FakeBlobs

DATA = b"\x00some bytes\xff"
REF = BlobRef("alice/" + hashlib.sha256(DATA).hexdigest(), len(DATA), hashlib.sha256(DATA).hexdigest())


class BlobsSuite:
    """Needs the fixtures ``blobs``, ``upload`` (blobs, ref, data) and ``download`` (url)."""

    def test_deleted_pieces_are_gone(self, blobs: Blobs) -> None:
        keys = [f"{PIECES}session.{number}/{'ab' * 32}" for number in range(3)]
        for key in keys:
            blobs.write(key, b"piece")
        blobs.delete([*keys[:2], f"{PIECES}unknown"])
        blobs.delete([])
        assert [blobs.size_bytes(key) for key in keys] == [None, None, 5]

    def test_written_blob_is_read(self, blobs: Blobs) -> None:
        blobs.ping()
        assert blobs.size_bytes(REF.blob_key) is None
        assert blobs.write(REF.blob_key, DATA) == REF
        assert blobs.read(REF.blob_key) == DATA
        assert blobs.size_bytes(REF.blob_key) == len(DATA)

    def test_a_part_is_read(self, blobs: Blobs) -> None:
        blobs.write(REF.blob_key, DATA)
        assert blobs.read_part(REF.blob_key, offset_bytes=0, length_bytes=4) == DATA[:4]
        assert blobs.read_part(REF.blob_key, offset_bytes=4, length_bytes=100) == DATA[4:]

    def test_a_missing_blob_is_unknown(self, blobs: Blobs) -> None:
        with pytest.raises(BlobUnknown):
            blobs.read("alice/nothing")
        with pytest.raises(BlobUnknown):
            blobs.read_part("alice/nothing", offset_bytes=0, length_bytes=1)

    def test_renewed_blob_is_unchanged(self, blobs: Blobs) -> None:
        assert blobs.renew(REF.blob_key, older_than_s=-60) is None
        blobs.write(REF.blob_key, DATA)
        assert blobs.renew(REF.blob_key, older_than_s=-60) == len(DATA)
        assert blobs.read(REF.blob_key) == DATA

    def test_an_upload_goes_to_its_url_and_a_download_comes_from_one(
        self, blobs: Blobs, upload: Callable[[BlobRef, bytes], bool], download: Callable[[str], bytes]
    ) -> None:
        assert upload(REF, DATA)
        assert blobs.read(REF.blob_key) == DATA
        assert download(blobs.download_url(REF.blob_key, ttl_s=60)) == DATA


class TestFakeBlobs(BlobsSuite):
    @pytest.fixture
    def blobs(self) -> FakeBlobs:
        return FakeBlobs()

    @pytest.fixture
    def upload(self, blobs: FakeBlobs) -> Callable[[BlobRef, bytes], bool]:
        def put(ref: BlobRef, data: bytes) -> bool:
            url, _ = blobs.upload_url(ref, ttl_s=60)
            blobs.put(url, data)
            return True

        return put

    @pytest.fixture
    def download(self, blobs: FakeBlobs) -> Callable[[str], bytes]:
        return blobs.fetch

    def test_blob_store_can_be_unavailable(self) -> None:
        blobs = FakeBlobs()
        blobs.reachable = False
        with pytest.raises(Unavailable):
            blobs.read(REF.blob_key)

    def test_upload_with_a_wrong_hash_is_refused(self, blobs: FakeBlobs) -> None:
        url, _ = blobs.upload_url(REF, ttl_s=60)
        with pytest.raises(InvalidRequest):
            blobs.put(url, DATA[::-1])
        assert blobs.size_bytes(REF.blob_key) is None
