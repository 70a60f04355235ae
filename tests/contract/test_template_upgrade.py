"""Upgrades: the order of the stacks' updates, the run time of old code, and recorded settings."""

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
    """The manifest of the assembly that the CDK deploys."""
    artifacts = json.loads((assemblies / "aws" / profile / "manifest.json").read_text())["artifacts"]
    assert isinstance(artifacts, dict)
    return artifacts


def test_stores_are_updated_before_the_api_and_the_forwarders_last(manifest: dict[str, Any]) -> None:
    """As in docs/operations/upgrades.md: during each upgrade an old forwarder runs with a new API."""
    assert "farcall-api" in manifest["farcall-forwarder"]["dependencies"]
    assert "farcall-data" in manifest["farcall-api"]["dependencies"]


def test_results_are_remembered_longer_than_functions_that_requeue_their_tasks_run(aws: Templates) -> None:
    """Time limits of the functions that read open tasks from the database and queue them."""
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


def test_every_stack_outputs_its_release(aws: Templates) -> None:
    assert {template["Outputs"]["Release"]["Value"] for template in aws.values()} == {this_release()}


def test_the_next_deployment_compares_the_settings_in_the_outputs(
    synthesized: Callable[[str, str], Templates], profile: str
) -> None:
    deployed = deployed_settings(_deployed(synthesized("aws", profile), "data"))
    assert (deployed.profile, deployed.overrides) == (profile, ())
    assert changes(deployed, deployment_from_context({"profile": profile})) == []


@pytest.mark.parametrize("name", OPTIONS)
def test_settings_from_the_command_line_are_recorded_and_compared(
    assemblies: Path, synthesized: Callable[[str, str], Templates], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(assemblies)  # the directory of the CA bundle
    deployed = deployed_settings(_deployed(synthesized("options", name), "data"))
    profile = OPTIONS[name]["profile"]
    assert changes(deployed, deployment_from_context(OPTIONS[name])) == []
    missed = {each.setting for each in changes(deployed, deployment_from_context({"profile": profile}))}
    given = {key for key in OPTIONS[name] if "." in key}
    assert missed == given
    assert set(deployed.overrides) == given - {"database.authorities"}  # paths are not recorded
