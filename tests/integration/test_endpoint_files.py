"""Files of other endpoints on real processes: an agent pulls pieces for its tasks, and reads some for others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from farcall_common.file_arguments import File
from farcall_common.staged_files import FileUse, pack_files
from farcall_common.wire import FilePiece, FilePull, FileReason, TaskState, new_id
from tests.support.endpoint import EndpointProcess, running_endpoint
from tests.waiting import wait_until

SOURCE = "00000000-0000-4000-8000-00000000000f"
URL = f"endpoint://{SOURCE}/data/frame%207.raw"
PIECE = 1000


def read(source: File) -> bytes:
    with source.open("rb") as file:
        content: bytes = file.read()
    return content


class Source:
    """The file of another endpoint, as its forwarder gives it out."""

    def __init__(self, endpoint: EndpointProcess, content: bytes) -> None:
        self.cloud = endpoint.cloud
        self.content = content
        self.version = "1"
        self.reason = ""
        self.damaged = 0
        self.changes_at = -1

    def __call__(self, pull: FilePull) -> FilePiece | None:
        if self.reason:
            return FilePiece(request_id=pull.request_id, size_bytes=7, reason=self.reason)
        if pull.offset_bytes == self.changes_at:
            self.version, self.changes_at = "2", -1
            self.content = self.content[::-1]
        data = self.content[pull.offset_bytes : pull.offset_bytes + pull.max_bytes]
        sha256 = hashlib.sha256(data).hexdigest()
        key = f"piece/{pull.request_id}"
        stored = data
        if data and self.damaged:
            self.damaged -= 1
            stored = bytes(len(data))
        self.cloud.http.blobs[key] = stored
        return FilePiece(
            request_id=pull.request_id,
            size_bytes=len(self.content),
            version=self.version,
            piece_bytes=len(data),
            sha256=sha256 if data else "",
            url=f"{self.cloud.http.url}/blobs/{key}" if data else "",
        )


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[EndpointProcess]:
    with running_endpoint(tmp_path, start=False) as endpoint:
        config = yaml.safe_load(endpoint.directory.config_file.read_text())
        config["files"] = {"storages": [{"url": f"file://{tmp_path}/public", "submitters": "*"}]}
        endpoint.directory.config_file.write_text(yaml.safe_dump(config))
        endpoint.cloud.file_piece_bytes = PIECE
        endpoint.start()
        yield endpoint


@pytest.fixture
def source(endpoint: EndpointProcess) -> Source:
    made = Source(endpoint, bytes(range(256)) * 40)
    endpoint.cloud.answer_pull = made
    return made


def submit(endpoint: EndpointProcess, url: str = URL) -> str:
    serializer = endpoint.cloud.serializer
    payload = pack_files([FileUse(url)], serializer.pack_call((File(url),)))
    [task_id] = endpoint.cloud.submit_raw(serializer.pack_function(read), [payload])
    return task_id


def test_a_file_comes_in_pieces_that_are_given_back(endpoint: EndpointProcess, source: Source) -> None:
    task_id = submit(endpoint)
    end = endpoint.cloud.end(task_id)
    assert (end.state, end.value) == (TaskState.SUCCESS, source.content)
    pulls = endpoint.cloud.pulls
    assert {(each.task_id, each.endpoint_id, each.path) for each in pulls} == {(task_id, SOURCE, "/data/frame 7.raw")}
    assert [each.offset_bytes for each in pulls if each.max_bytes] == list(range(0, len(source.content), PIECE))
    with_piece = {each.request_id for each in pulls if each.max_bytes}
    wait_until(lambda: set(endpoint.cloud.files_taken) >= with_piece, "all pieces are given back")
    # What is unchanged is looked up once more, and not read again.
    assert endpoint.cloud.end(submit(endpoint)).spec.details["files"][0]["cached"] is True
    assert sum(each.max_bytes > 0 for each in endpoint.cloud.pulls) == len(with_piece)


def test_an_empty_file_has_no_pieces(endpoint: EndpointProcess, source: Source) -> None:
    source.content = b""
    assert endpoint.cloud.end(submit(endpoint)).value == b""


def test_a_file_that_changes_is_read_once_more(endpoint: EndpointProcess, source: Source) -> None:
    source.changes_at = 5 * PIECE
    assert endpoint.cloud.end(submit(endpoint)).value == source.content

    def always_new(pull: FilePull) -> FilePiece | None:
        source.version = str(len(endpoint.cloud.pulls))
        return source(pull)

    endpoint.cloud.answer_pull = always_new
    assert endpoint.cloud.end(submit(endpoint, URL + "2")).error["code"] == "FILE_CHANGED"


def test_a_damaged_piece_is_not_taken(endpoint: EndpointProcess, source: Source) -> None:
    source.damaged = 1
    assert endpoint.cloud.end(submit(endpoint)).value == source.content


@pytest.mark.parametrize(
    ("reason", "code", "words"),
    [
        (FileReason.NOT_FOUND, "FILE_NOT_FOUND", "does not exist"),
        (FileReason.NOT_PERMITTED, "FILE_DENIED", "may not read it at its endpoint"),
        (FileReason.NO_RIGHT, "FILE_DENIED", "may not use its endpoint"),
        (FileReason.TOO_LARGE, "FILE_UNSUPPORTED", "FARCALL_MAX_RELAY_BYTES"),
    ],
)
def test_reasons_are_said(endpoint: EndpointProcess, source: Source, reason: str, code: str, words: str) -> None:
    source.reason = reason
    error = endpoint.cloud.end(submit(endpoint)).error
    assert error["code"] == code
    assert words in error["message"]


def test_an_object_that_is_gone_there_is_no_missing_file(endpoint: EndpointProcess, source: Source) -> None:
    source.reason = FileReason.NOT_FOUND
    error = endpoint.cloud.end(submit(endpoint, f"endpoint://{SOURCE}/work/objects/{'ab' * 16}.t-60")).error
    assert error["code"] == "OBJECT_GONE"
    assert "is gone from the endpoint that had it" in error["message"]


def test_a_source_that_is_busy_is_asked_again(endpoint: EndpointProcess, source: Source) -> None:
    source.reason = FileReason.BUSY
    task_id = submit(endpoint)
    wait_until(lambda: len(endpoint.cloud.pulls) > 1, "it is asked again")
    source.reason = ""
    assert endpoint.cloud.end(task_id).value == source.content


def test_a_lost_session_loses_no_file(endpoint: EndpointProcess, source: Source) -> None:
    endpoint.cloud.answer_pull = lambda _: None
    task_id = submit(endpoint)
    wait_until(lambda: endpoint.cloud.pulls != [], "the file is asked for")
    endpoint.cloud.answer_pull = source
    endpoint.cloud.offline()
    endpoint.cloud.online()
    assert endpoint.cloud.end(task_id).value == source.content


def test_a_deployment_that_is_too_old_gets_no_request(tmp_path: Path) -> None:
    with running_endpoint(tmp_path) as endpoint:
        error = endpoint.cloud.end(submit(endpoint)).error
        assert error["code"] == "FILE_UNSUPPORTED"
        assert "deployment is too old" in error["message"]
        assert endpoint.cloud.pulls == []


def test_an_endpoint_reads_its_files_for_others(endpoint: EndpointProcess, tmp_path: Path) -> None:
    cloud, content = endpoint.cloud, bytes(range(256)) * 10
    path = tmp_path / "public" / "data"
    path.parent.mkdir()
    path.write_bytes(content)
    there = cloud.want_file(str(path), submitter=new_id())
    assert (there.size_bytes, there.piece_bytes, there.reason) == (len(content), 0, "")
    piece = cloud.want_file(str(path), submitter=new_id(), offset_bytes=1000, max_bytes=500)
    assert (piece.version, piece.piece_bytes) == (there.version, 500)
    assert cloud.http.blobs[f"results/{piece.sha256}"] == content[1000:1500]
    secret = tmp_path / "secret"
    secret.write_text("owner's")
    assert cloud.want_file(str(secret), submitter=new_id()).reason == FileReason.NOT_PERMITTED
    assert cloud.want_file(str(secret), submitter=cloud.submitter).size_bytes == 7
    cloud.http.failing_blobs = 403
    unstored = cloud.want_file(str(path), submitter=cloud.submitter, max_bytes=5)
    assert unstored.reason == FileReason.NOT_READ


def test_an_endpoint_without_files_reads_none(tmp_path: Path) -> None:
    with running_endpoint(tmp_path, start=False) as endpoint:
        config = yaml.safe_load(endpoint.directory.config_file.read_text())
        endpoint.directory.config_file.write_text(yaml.safe_dump({**config, "files": {"enabled": False}}))
        endpoint.start()
        endpoint.cloud.wait_connected()
        read = endpoint.cloud.want_file("/etc/hostname", submitter=endpoint.cloud.submitter)
        assert read.reason == FileReason.SWITCHED_OFF
