"""What an upgrade relies on: the order in which stacks are deployed, and how long old code goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from farcall_common.store.queue_valkey import MARKER_TTL_S
from tests.contract.templates import Templates


@pytest.fixture
def manifest(assemblies: Path, profile: str) -> dict[str, Any]:
    """What the CDK deploys."""
    artifacts = json.loads((assemblies / "aws" / profile / "manifest.json").read_text())["artifacts"]
    assert isinstance(artifacts, dict)
    return artifacts


def test_forwarders_are_replaced_after_the_api_and_stores_come_first(manifest: dict[str, Any]) -> None:
    """As docs/operations.md says: an old forwarder beside a new API is what each upgrade goes through."""
    assert "farcall-api" in manifest["farcall-forwarder"]["dependencies"]
    assert "farcall-data" in manifest["farcall-api"]["dependencies"]


def test_an_end_is_remembered_for_longer_than_whoever_may_offer_its_task_again_lives(aws: Templates) -> None:
    """Functions that read open tasks from the database and queue them, by the time that they have between the two."""
    functions = {
        resource["Properties"]["Handler"]: resource["Properties"]["Timeout"]
        for resource in aws["farcall-api"]["Resources"].values()
        if resource["Type"] == "AWS::Lambda::Function"
        and "FARCALL_QUEUE_HOST" in json.dumps(resource["Properties"]["Environment"])
    }
    assert {"farcall_lambdas.handlers.api.handle", "farcall_lambdas.handlers.reconciler.handle"} <= functions.keys()
    assert all(timeout_s * 2 <= MARKER_TTL_S for timeout_s in functions.values()), functions
