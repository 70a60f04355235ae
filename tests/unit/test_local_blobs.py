"""Blob store of the local tier: the common suite of all blob stores, and tampered signed URLs."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from farcall_common.errors import StorageLow, Unavailable
from farcall_common.store import BlobRef
from farcall_common.store.blobs_files import FileBlobs
from farcall_common.store.model import PIECES
from farcall_local.blobs import BlobServer
from tests.unit.test_store_blobs import DATA, REF, BlobsSuite

URL = "http://127.0.0.1:9000"


@pytest.fixture
def blobs(tmp_path: Path) -> FileBlobs:
    return FileBlobs(tmp_path, url=URL, key="key")


def request(blobs: FileBlobs, method: str, url: str, data: bytes = b"") -> httpx.Response:
    async def once() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(BlobServer(blobs))) as web:
            return await web.request(method, url, content=data)

    return asyncio.run(once())


class TestFileBlobs(BlobsSuite):
    @pytest.fixture
    def upload(self, blobs: FileBlobs) -> Callable[[BlobRef, bytes], bool]:
        return lambda ref, data: request(blobs, "PUT", blobs.upload_url(ref, ttl_s=60)[0], data).is_success

    @pytest.fixture
    def download(self, blobs: FileBlobs) -> Callable[[str], bytes]:
        return lambda url: request(blobs, "GET", url).raise_for_status().content


@pytest.mark.parametrize("data", [DATA[::-1], DATA + b"!", DATA[:-1], b""], ids=["other", "more", "less", "nothing"])
def test_an_upload_is_bound_to_its_bytes(blobs: FileBlobs, tmp_path: Path, data: bytes) -> None:
    url, headers = blobs.upload_url(REF, ttl_s=60)
    assert headers == {"content-length": str(len(DATA))}
    assert request(blobs, "PUT", url, data).status_code == 400
    assert blobs.size_bytes(REF.blob_key) is None
    assert not list(tmp_path.iterdir())


def test_a_url_is_valid_for_one_method_one_blob_and_a_limited_time(blobs: FileBlobs) -> None:
    blobs.write(REF.blob_key, DATA)
    blobs.write("bob/other", b"secret")
    get, (put, _) = blobs.download_url(REF.blob_key, ttl_s=60), blobs.upload_url(REF, ttl_s=60)
    assert request(blobs, "GET", get).content == DATA
    for method, url in [
        ("GET", put),
        ("PUT", get),
        ("GET", get.replace(REF.blob_key, "bob/other")),
        ("GET", get.replace("expires_at=", "expires_at=9")),
        ("GET", get.partition("&signature")[0]),
        ("GET", get.replace("signature=", "signature=%C3%A9")),
        ("GET", f"{URL}/{REF.blob_key}"),
        ("GET", get.replace("?", "%0A").replace("&", "?", 1)),
        ("PUT", put.replace(f"size_bytes={len(DATA)}", "size_bytes=7")),
        ("GET", blobs.download_url(REF.blob_key, ttl_s=-1)),
        ("GET", FileBlobs(Path(), url=URL, key="another").download_url(REF.blob_key, ttl_s=60)),
    ]:
        assert request(blobs, method, url, DATA).status_code == 403, (method, url)
    assert request(blobs, "DELETE", get).status_code == 405
    assert request(blobs, "GET", blobs.download_url("alice/nothing", ttl_s=60)).status_code == 404


def test_a_key_never_leaves_the_directory(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    blobs = FileBlobs(inside, url=URL, key="key")
    for blob_key in ("../outside", "/etc/passwd", "a/../../b", ".."):
        blobs.write(blob_key, b"x")
        assert blobs.read(blob_key) == b"x"
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]


def test_unfinished_uploads_are_removed(blobs: FileBlobs, tmp_path: Path) -> None:
    (tmp_path / ".new-left").write_bytes(b"half")
    blobs.write(REF.blob_key, DATA)
    blobs.remove_unfinished()
    assert blobs.read(REF.blob_key) == DATA
    assert len(list(tmp_path.iterdir())) == 1


def test_an_empty_blob_can_be_stored(blobs: FileBlobs) -> None:
    ref = BlobRef("alice/empty", 0, hashlib.sha256(b"").hexdigest())
    assert request(blobs, "PUT", blobs.upload_url(ref, ttl_s=60)[0]).is_success
    assert request(blobs, "GET", blobs.download_url("alice/empty", ttl_s=60)).content == b""


def test_a_missing_directory_is_unavailable(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path / "gone", url=URL, key="key")
    with pytest.raises(Unavailable):
        blobs.ping()
    with pytest.raises(Unavailable):
        blobs.write("alice/x", b"x")
    ref = BlobRef("alice/x", 1, hashlib.sha256(b"x").hexdigest())
    assert request(blobs, "PUT", blobs.upload_url(ref, ttl_s=60)[0], b"x").status_code == 503


def test_old_blobs_expire_unless_they_are_renewed(blobs: FileBlobs, tmp_path: Path) -> None:
    for name in ("old", "renewed", "new"):
        blobs.write(f"alice/{name}", DATA)
    long_ago = time.time() - 62 * 86_400
    for name in ("old", "renewed"):
        os.utime(blobs.path(f"alice/{name}"), (long_ago, long_ago))

    assert blobs.renew("alice/renewed", older_than_s=86_400) == len(DATA)
    assert blobs.expire(older_than_s=61 * 86_400, pieces_older_than_s=86_400) == 1

    assert blobs.size_bytes("alice/old") is None
    assert blobs.renew("alice/old", older_than_s=86_400) is None
    assert blobs.read("alice/renewed") == blobs.read("alice/new") == DATA


def test_pieces_of_files_expire_after_a_day_and_can_be_deleted(blobs: FileBlobs) -> None:
    keys = [f"{PIECES}session.{number}/{'ab' * 32}" for number in range(3)]
    for key in (*keys, "alice/old"):
        blobs.write(key, DATA)
    long_ago = time.time() - 2 * 86_400
    for key in (keys[0], "alice/old"):
        os.utime(blobs.path(key), (long_ago, long_ago))
    assert blobs.expire(older_than_s=61 * 86_400, pieces_older_than_s=86_400) == 1
    blobs.delete([keys[1], "piece/unknown"])
    assert [blobs.size_bytes(key) for key in keys] == [None, None, len(DATA)]
    assert blobs.read("alice/old") == DATA


def test_a_new_blob_is_not_renewed(blobs: FileBlobs) -> None:
    blobs.write(REF.blob_key, DATA)
    an_hour_ago = time.time() - 3600
    os.utime(blobs.path(REF.blob_key), (an_hour_ago, an_hour_ago))
    assert blobs.renew(REF.blob_key, older_than_s=86_400) == len(DATA)
    assert blobs.path(REF.blob_key).stat().st_mtime == pytest.approx(an_hour_ago, abs=1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_reported_to_the_client_and_logged_once_a_minute(
    blobs: FileBlobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def full(_file: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageLow):
        blobs.write(REF.blob_key, DATA)
    now = 0.0
    server = BlobServer(blobs, clock=lambda: now)

    async def upload() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(server)) as web:
            return await web.put(blobs.upload_url(REF, ttl_s=60)[0], content=DATA)

    with caplog.at_level(logging.WARNING):
        for now in (0.0, 30.0, 59.0, 61.0):  # noqa: B007 - the server's clock
            answer = asyncio.run(upload())
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
            record = answer.json()
            assert (record["code"], record["retryable"]) == ("STORAGE_LOW", True)
    assert len(caplog.messages) == 2
    assert "is full" in caplog.messages[0]
