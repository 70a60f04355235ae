"""Blob keys in results of agents: only the key that was granted to the task's owner is accepted."""

from __future__ import annotations

import pytest

from farcall_common import wire
from farcall_common.wire import TaskState
from farcall_forwarder.core.leases import Lease, Stage
from farcall_forwarder.core.results import read_result
from tests.unit.test_forwarder_core import ENDPOINT_ID, EPOCH, OWNER_ID, task_id

SHA256 = "0f" * 32
OTHER_ID = "00000000-0000-4000-8000-0000000000bb"


def state_of(blob_key: str, sha256: str = SHA256) -> TaskState:
    lease = Lease(task_id(1), 1, OWNER_ID, "group", True, Stage.ACCEPTED, EPOCH + 30, {})
    blob = wire.BlobLocation(blob_key=blob_key, size_bytes=3, sha256=sha256)
    spec = wire.ResultSpec(task_id=task_id(1), attempt=1, state=TaskState.SUCCESS, result_blob=blob)
    result = read_result(spec, (), endpoint_id=ENDPOINT_ID, lease=lease, returned_at=EPOCH, max_inline_bytes=9)
    assert (result.result_ref is None) == (result.state is TaskState.FAILED)
    return result.state


def test_the_granted_blob_key_is_accepted() -> None:
    assert state_of(f"{OWNER_ID}/{SHA256}") is TaskState.SUCCESS


@pytest.mark.parametrize(
    "blob_key",
    [
        f"{OTHER_ID}/{SHA256}",
        f"{OWNER_ID}/../{OTHER_ID}/{SHA256}",
        f"{OWNER_ID}//{SHA256}",
        f"{OWNER_ID}/./{SHA256}",
        f"/{OWNER_ID}/{SHA256}",
        f"{OWNER_ID}/{SHA256}/",
        f"{OWNER_ID}/{SHA256}\0",
        f"{OWNER_ID}/{SHA256}?versionId=1",
        f"{OWNER_ID}/{SHA256}%00",
        f"{OWNER_ID}/{SHA256.upper()}",
        f"{OWNER_ID}/{'0' * 64}",
        f"s3://bucket/{OWNER_ID}/{SHA256}",
        OWNER_ID,
        "/",
        "",
    ],
)
def test_any_other_blob_key_is_malformed(blob_key: str) -> None:
    assert state_of(blob_key) is TaskState.FAILED


@pytest.mark.parametrize("sha256", ["", "../" * 21 + "x", SHA256.upper(), SHA256 + "\n", "0" * 63, "\0" * 64])
def test_a_malformed_hash_is_rejected(sha256: str) -> None:
    assert state_of(f"{OWNER_ID}/{sha256}", sha256) is TaskState.FAILED
