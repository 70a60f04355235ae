"""What an upgrade relies on: the order in which stacks are deployed, and how long old code goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farcall_common.store.queue_valkey import MARKER_TTL_S
from farcall_infra.cloud.account import Stack
from farcall_infra.cloud.settings import changes, deployed_settings
from farcall_infra.deployment import deployment_from_context
from farcall_infra.release import this_release
from tests.contract.templates import OPTIONS, Templates


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


def _deployed(templates: Templates, part: str) -> Stack:
    """A stack as it is after its template was deployed."""
    name = next(each for each in templates if each.endswith(f"-{part}"))
    outputs = {key: output["Value"] for key, output in templates[name].get("Outputs", {}).items()}
    return Stack(name, "CREATE_COMPLETE", outputs, is_protected=False)


def test_every_stack_tells_its_release(aws: Templates) -> None:
    assert {template["Outputs"]["Release"]["Value"] for template in aws.values()} == {this_release()}


def test_what_the_data_stack_tells_of_its_settings_is_what_the_next_deployment_compares(
    synthesized: Callable[[str, str], Templates], profile: str
) -> None:
    told = deployed_settings(_deployed(synthesized("aws", profile), "data"))
    assert (told.profile, told.overrides) == (profile, ())
    assert changes(told, deployment_from_context({"profile": profile})) == []


@pytest.mark.parametrize("name", OPTIONS)
def test_settings_that_were_given_are_told_and_missed(
    assemblies: Path, synthesized: Callable[[str, str], Templates], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(assemblies)  # where the file of the authorities is
    told = deployed_settings(_deployed(synthesized("options", name), "data"))
    profile = OPTIONS[name]["profile"]
    assert changes(told, deployment_from_context(OPTIONS[name])) == []
    missed = {each.setting for each in changes(told, deployment_from_context({"profile": profile}))}
    given = {key for key in OPTIONS[name] if "." in key}
    assert missed == given
    assert set(told.overrides) == given - {"database.authorities"}  # its path says nothing to others
