"""Blob relay through a real forwarder, to and from real S3."""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import boto3
import psutil
import pytest

from farcall_common import wire
from farcall_common.store.model import BlobRef
from farcall_common.wire import BlobLocation, BlobPiece, BlobPull, BlobPush, BlobTaken, TaskState
from farcall_forwarder.core.policy import Policy
from tests.integration.forwarder_peers import (
    Agent,
    Cloud,
    ForwarderProcess,
    Start,
    cloud,
    endpoint_id,
    environ,
    start,
    stores,
)

__all__ = ["cloud", "endpoint_id", "environ", "start", "stores"]

AGENTS = 20
SIZE_BYTES = 5_000_000
PIECE_BYTES = Policy.relay_piece_bytes


class RelayingAgent(Agent):
    """An agent that can reach only the forwarder."""

    def download(self, spec: wire.TaskSpec) -> bytes:
        assert spec.payload_blob is not None
        data = b""
        while len(data) < spec.payload_blob.size_bytes:
            self.say(BlobPull(task_id=spec.task_id, attempt=spec.attempt, offset_bytes=len(data)))
            piece, frames = self.hear(BlobPiece)
            assert (piece.error, piece.offset_bytes) == (None, len(data))
            data += frames[0]
        self.say(BlobPull(task_id=spec.task_id, attempt=spec.attempt, offset_bytes=len(data)))
        return data

    def push(self, spec: wire.TaskSpec, data: bytes, sha256: str, *, offset: int | None = None) -> BlobTaken:
        piece = [] if offset is None else [data[offset : offset + PIECE_BYTES]]
        message = BlobPush(
            task_id=spec.task_id,
            attempt=spec.attempt,
            size_bytes=len(data),
            sha256=sha256,
            offset_bytes=offset or 0,
            piece=0 if piece else None,
        )
        self.say(message, *piece)
        return self.hear(BlobTaken)[0]

    def upload(self, spec: wire.TaskSpec, data: bytes) -> BlobLocation:
        sha256 = hashlib.sha256(data).hexdigest()
        taken = self.push(spec, data, sha256)
        while not taken.blob_key:
            assert taken.error is None
            taken = self.push(spec, data, sha256, offset=taken.offset_bytes)
        return BlobLocation(blob_key=taken.blob_key, size_bytes=len(data), sha256=sha256)

    def work(self) -> str:
        """Return the reversed payload of one task as its result."""
        self.open_session(credit=1)
        [spec] = self.take(1)
        blob = self.upload(spec, self.download(spec)[::-1])
        result = wire.ResultSpec(task_id=spec.task_id, attempt=spec.attempt, state=TaskState.SUCCESS, result_blob=blob)
        self.say(wire.TaskResults(results=(result,)))
        self.until_recorded([spec.task_id])
        return spec.task_id


@pytest.fixture
def bucket(environ: dict[str, str]) -> None:
    boto3.client("s3").create_bucket(Bucket=environ["FARCALL_BLOB_BUCKET"])


@pytest.fixture
def forwarder(start: Start, bucket: None) -> ForwarderProcess:
    return start()


def give(cloud: Cloud, endpoint_id: str, data: bytes) -> str:
    sha256 = hashlib.sha256(data).hexdigest()
    ref = cloud.stores.blobs.write(f"{cloud.owner_id}/{sha256}", data)
    [task_id] = cloud.submit_new(endpoint_id, 1, payload=None, payload_ref=ref)
    return task_id


class Gauge:
    """Peak memory of a process, while the block runs."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._over = threading.Event()
        self.before_bytes = self.most_bytes = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._over.wait(0.02):
            self.most_bytes = max(self.most_bytes, self._process.memory_info().rss)

    def __enter__(self) -> Gauge:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.slow
def test_twenty_agents_at_once_stay_within_the_relay_memory(cloud: Cloud, forwarder: ForwarderProcess) -> None:
    endpoint_ids = [cloud.add_endpoint() for _ in range(AGENTS)]
    payloads = {
        give(cloud, endpoint_id, data): data for endpoint_id in endpoint_ids for data in [os.urandom(SIZE_BYTES)]
    }
    agents = [RelayingAgent(cloud, endpoint_id, forwarder) for endpoint_id in endpoint_ids]
    try:
        with Gauge(forwarder.process.pid) as gauge, ThreadPoolExecutor(AGENTS) as threads:
            done = list(threads.map(RelayingAgent.work, agents))
    finally:
        for agent in agents:
            agent.close()
    assert set(done) == payloads.keys()
    for task_id, data in payloads.items():
        ref = cloud.task(task_id).result_ref
        assert ref is not None
        assert cloud.stores.blobs.read(ref.blob_key) == data[::-1]
    grown = gauge.most_bytes - gauge.before_bytes
    print(f"{2 * AGENTS * SIZE_BYTES / 1e6:.0f} MB passed through; memory grew by {grown / 1e6:.0f} MB")
    # The reserved memory, in pieces and once more as the stored whole; and boto3, which is loaded meanwhile.
    assert grown < 2 * Policy.relay_bytes + 64 * 2**20


def test_only_blobs_of_the_endpoints_own_tasks_are_relayed(cloud: Cloud, forwarder: ForwarderProcess) -> None:
    mine, theirs = cloud.add_endpoint(), cloud.add_endpoint()
    with RelayingAgent(cloud, mine, forwarder) as agent, RelayingAgent(cloud, theirs, forwarder) as victim:
        agent.open_session(credit=1)
        victim.open_session(credit=1)
        task_id = give(cloud, theirs, os.urandom(SIZE_BYTES))
        [spec] = victim.take(1)
        agent.say(BlobPull(task_id=task_id, attempt=1, offset_bytes=0))
        piece, frames = agent.hear(BlobPiece)
        assert piece.error is not None
        assert (piece.error["code"], frames) == ("TASK_UNKNOWN", ())
        taken = agent.push(spec, b"forged result", "0" * 64)
        assert taken.error is not None
        assert taken.error["code"] == "TASK_UNKNOWN"
        assert len(victim.download(spec)) == SIZE_BYTES


def test_an_interrupted_upload_restarts_at_another_forwarder(
    cloud: Cloud, forwarder: ForwarderProcess, start: Start, endpoint_id: str
) -> None:
    data = os.urandom(SIZE_BYTES)
    sha256 = hashlib.sha256(data).hexdigest()
    other = start()
    with RelayingAgent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=1)
        task_id = give(cloud, endpoint_id, data)
        [spec] = agent.take(1)
        assert agent.push(spec, data, sha256).offset_bytes == 0
        assert agent.push(spec, data, sha256, offset=0).offset_bytes == PIECE_BYTES
        forwarder.process.kill()
        forwarder.process.wait()
        agent.connect(other)
        agent.open_session()
        # This forwarder does not have the first piece.
        error = agent.push(spec, data, sha256, offset=PIECE_BYTES).error
        assert error is not None
        assert error["retryable"]
        assert agent.download(spec) == data
        assert agent.upload(spec, data) == BlobLocation(
            blob_key=f"{cloud.owner_id}/{sha256}", size_bytes=len(data), sha256=sha256
        )
    assert cloud.stores.blobs.read(BlobRef(f"{cloud.owner_id}/{sha256}", len(data), sha256).blob_key) == data
    assert task_id == spec.task_id
