"""Files of other endpoints through real forwarders, Valkey and S3; each agent is at a forwarder of its own."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

import boto3
import httpx
import pytest

from farcall_common import wire
from farcall_common.errors import BlobUnknown
from farcall_common.store.model import PIECES
from farcall_common.task_options import source_file
from farcall_common.wire import (
    BlobGrant,
    BlobPiece,
    BlobPull,
    BlobPush,
    BlobRequest,
    BlobTaken,
    FilePiece,
    FilePull,
    FileRead,
    FileReason,
    FilesTaken,
    FileWanted,
    new_id,
)
from tests.integration.forwarder_peers import Agent, Cloud, Start, cloud, endpoint_id, environ, start, stores
from tests.waiting import wait_until

__all__ = ["cloud", "endpoint_id", "environ", "start", "stores"]

CONTENT = os.urandom(3_000_000)
SHA = hashlib.sha256(CONTENT).hexdigest()


class Reader(Agent):
    """An agent with a task that reads files of the source."""

    def pull(self, task_id: str, source: str, **fields: int) -> FilePull:
        message = FilePull(request_id=new_id(), task_id=task_id, endpoint_id=source, path="/data/a", **fields)
        self.say(message)
        return message

    def piece(self) -> FilePiece:
        return self.hear(FilePiece)[0]


class Source(Agent):
    """An agent that has a file."""

    def wanted(self) -> FileWanted:
        return self.hear(FileWanted)[0]

    def answer(self, wanted: FileWanted, **fields: object) -> None:
        values = {"size_bytes": len(CONTENT), "version": "1", "piece_bytes": len(CONTENT), "sha256": SHA}
        self.say(FileRead(request_id=wanted.request_id, **(values | fields)))  # type: ignore[arg-type]


@pytest.fixture
def bucket(environ: dict[str, str]) -> str:
    boto3.client("s3").create_bucket(Bucket=environ["FARCALL_BLOB_BUCKET"])
    return environ["FARCALL_BLOB_BUCKET"]


@pytest.fixture
def peers(cloud: Cloud, endpoint_id: str, start: Start, bucket: str) -> Iterator[tuple[Reader, Source, str]]:
    """Reader and source, and the reader's task."""
    source_id = cloud.add_endpoint()
    reader, source = Reader(cloud, endpoint_id, start()), Source(cloud, source_id, start())
    source.open_session()
    files = (source_file(source_id, "/data/a"),)
    [task_id] = cloud.submit_new(endpoint_id, 1, sources=(source_id,), source_files=files)
    welcome = reader.open_session(credit=1)
    assert welcome.file_piece_bytes == 8 * 2**20
    reader.take(1)
    yield reader, source, task_id
    reader.close()
    source.close()


def test_a_piece_goes_from_one_agent_to_the_other_and_is_deleted(
    peers: tuple[Reader, Source, str], cloud: Cloud
) -> None:
    reader, source, task_id = peers
    request = reader.pull(task_id, source.subject, max_bytes=8 * 2**20)
    wanted = source.wanted()
    assert (wanted.submitter, wanted.path, wanted.max_bytes) == (cloud.owner_id, "/data/a", 8 * 2**20)
    source.say(BlobRequest(task_id=wanted.request_id, attempt=0, size_bytes=len(CONTENT), sha256=SHA))
    grant = source.hear(BlobGrant)[0]
    assert grant.error is None
    assert grant.blob_key == f"{PIECES}{wanted.request_id}/{SHA}"
    httpx.put(grant.upload_url, content=CONTENT, headers=grant.headers).raise_for_status()
    source.answer(wanted)
    piece = reader.piece()
    assert (piece.request_id, piece.size_bytes, piece.version) == (request.request_id, len(CONTENT), "1")
    assert (piece.piece_bytes, piece.sha256, piece.reason) == (len(CONTENT), SHA, "")
    assert httpx.get(piece.url).content == CONTENT
    reader.say(FilesTaken(request_ids=(request.request_id,)))
    wait_until(lambda: cloud.stores.blobs.size_bytes(grant.blob_key) is None, "the piece is deleted")
    with pytest.raises(BlobUnknown):
        cloud.stores.blobs.read(grant.blob_key)


def test_pieces_are_relayed_on_both_sides(peers: tuple[Reader, Source, str]) -> None:
    reader, source, task_id = peers
    request = reader.pull(task_id, source.subject, max_bytes=8 * 2**20)
    wanted = source.wanted()
    offset: int | None = None
    while True:
        piece: list[bytes] = [] if offset is None else [CONTENT[offset : offset + 2**20]]
        push = BlobPush(
            task_id=wanted.request_id,
            attempt=0,
            size_bytes=len(CONTENT),
            sha256=SHA,
            offset_bytes=offset or 0,
            piece=0 if piece else None,
        )
        source.say(push, *piece)
        taken = source.hear(BlobTaken)[0]
        assert taken.error is None
        if taken.blob_key:
            break
        offset = taken.offset_bytes
    source.answer(wanted)
    assert reader.piece().reason == ""
    data = b""
    while len(data) < len(CONTENT):
        reader.say(BlobPull(task_id=request.request_id, attempt=0, offset_bytes=len(data)))
        answer, frames = reader.hear(BlobPiece)
        assert answer.error is None
        data += frames[0]
    assert data == CONTENT


def test_who_may_not_read_gets_a_reason(peers: tuple[Reader, Source, str], cloud: Cloud) -> None:
    reader, source, task_id = peers
    foreign, other = cloud.add_endpoint(), new_id()
    for task, of, reason in (
        (new_id(), source.subject, FileReason.NOT_LEASED),
        (task_id, foreign, FileReason.NOT_A_SOURCE),
        (task_id, other, FileReason.NOT_A_SOURCE),
    ):
        reader.pull(task, of)
        assert reader.piece().reason == reason
    reader.pull(task_id, source.subject)
    source.answer(source.wanted(), piece_bytes=0, sha256="")
    assert reader.piece().size_bytes == len(CONTENT)
    # The source is deleted while the task runs.
    cloud.stores.endpoints.delete_endpoint(source.subject)
    reader.pull(task_id, source.subject)
    assert reader.piece().reason == FileReason.NO_RIGHT


def test_a_source_that_is_gone_is_offline(peers: tuple[Reader, Source, str]) -> None:
    reader, source, task_id = peers
    reader.pull(task_id, source.subject)
    source.wanted()
    source.say(wire.Goodbye())
    assert reader.piece().reason == FileReason.OFFLINE
    reader.pull(task_id, source.subject)
    assert reader.piece().reason == FileReason.OFFLINE


def test_nothing_counts_that_was_not_asked(peers: tuple[Reader, Source, str]) -> None:
    reader, source, task_id = peers
    reader.pull(task_id, source.subject, max_bytes=100)
    wanted = source.wanted()
    source.say(BlobRequest(task_id=wanted.request_id, attempt=0, size_bytes=101, sha256=SHA))
    assert source.hear(BlobGrant)[0].error is not None
    source.answer(wanted, size_bytes=2**50)
    source.answer(wanted, piece_bytes=101)
    source.answer(wanted, reason="QUOTA")
    source.say(FileRead(request_id="unknown", size_bytes=1, version="1"))
    source.answer(wanted, reason=FileReason.NOT_FOUND)
    assert reader.piece().reason == FileReason.NOT_FOUND
    # The reader cannot answer for the source.
    request = reader.pull(task_id, source.subject)
    reader.say(FileRead(request_id=request.request_id, size_bytes=1, version="forged"))
    wanted = source.wanted()
    reader.say(FileRead(request_id=wanted.request_id, size_bytes=1, version="forged"))
    source.answer(wanted, piece_bytes=0, sha256="")
    assert reader.piece().version == "1"
