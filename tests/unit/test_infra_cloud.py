"""``farcall cloud``: what the doctor says, what becomes of a deployment, and how the CDK is called. The account is a
fake with the same methods as the real one, which has tests of its own."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farcall_common.errors import ConfigurationError
from farcall_infra.cloud import aws as account
from farcall_infra.cloud.aws import Aws, LeftBehind
from farcall_infra.cloud.cli import app, cdk_arguments
from farcall_infra.cloud.doctor import Finding, Outcome, examine
from farcall_infra.cloud.errors import CredentialsMissing, DeploymentUnknown, NotReady, ToolMissing
from farcall_infra.cloud.lifecycle import destroy, look
from farcall_infra.cloud.tools import CDK_VERSION, Tools, version_of
from farcall_infra.deployment import STACKS
from farcall_infra.profiles import load_profile
from tests.unit.infra_account import FakeAws


def _tools(*, node: str = "v24.19.0", cdk: str = "2.1148.1 (build fcf5e34)") -> Tools:
    return Tools({}, output=lambda command: node if len(command) == 2 and command[0].endswith("node") else cdk)


def _examine(aws: FakeAws, *, profile: str = "lab", tools: Tools | None = None, arn: str = "") -> dict[str, Finding]:
    findings = examine(load_profile(profile), lambda: aws, tools or _tools(), credentials_arn=arn)
    return {finding.what: finding for finding in findings}


# -- doctor ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["hobby", "lab", "facility"])
def test_an_account_that_is_ready_has_nothing_wrong(profile: str) -> None:
    findings = _examine(FakeAws(), profile=profile, arn="arn:known")
    assert {finding.outcome for finding in findings.values()} == {Outcome.FINE}
    assert ("elastic addresses" in findings) is (profile == "facility")


@pytest.mark.parametrize(
    ("aws", "what", "outcome", "said"),
    [
        (FakeAws(bootstrap=None), "bootstrap", Outcome.FAILED, "bootstrap aws://123456789012/eu-central-1"),
        (FakeAws(bootstrap=3), "bootstrap", Outcome.FAILED, "older than"),
        (FakeAws(concurrency=10), "Lambda concurrency", Outcome.WARNING, "Service Quotas"),
        (FakeAws(quotas=0.25), "Fargate vCPU", Outcome.FAILED, "0.25 allowed, 0.5 needed"),
        (FakeAws(quotas=None), "Fargate vCPU", Outcome.WARNING, "does not say"),
        (FakeAws(quotas=5, vpcs=5), "VPCs", Outcome.WARNING, "5 of 5 are taken"),
        (FakeAws(roles=False), "service-linked roles", Outcome.WARNING, "create-service-linked-role"),
        (FakeAws(refused=True), "Lambda concurrency", Outcome.WARNING, "cannot be looked at"),
    ],
)
def test_what_is_missing_is_found_with_the_way_to_mend_it(aws: FakeAws, what: str, outcome: Outcome, said: str) -> None:
    finding = _examine(aws)[what]
    assert finding.outcome is outcome
    assert said in f"{finding.message} {finding.hint}"


def test_a_secret_that_is_not_there_is_found() -> None:
    finding = _examine(FakeAws(), arn="arn:unknown")["Globus client"]
    assert finding.outcome is Outcome.FAILED
    assert "create-secret" in finding.hint


def test_programs_that_cannot_work_are_found_without_an_account() -> None:
    def nobody() -> Aws:
        raise CredentialsMissing("Unable to locate credentials")

    tools = _tools(node="v20.20.2", cdk="3.0.0 (build old)")
    findings = list(examine(load_profile("lab"), nobody, tools))
    assert [(finding.what, finding.outcome) for finding in findings] == [
        ("Node", Outcome.FAILED),
        ("CDK command line", Outcome.FAILED),
        ("credentials", Outcome.FAILED),
    ]
    assert all(finding.hint for finding in findings)


# -- tools -------------------------------------------------------------------------------------------------------------


def test_the_cdks_command_line_is_pinned_unless_another_is_named() -> None:
    assert Tools({"FARCALL_CDK": "/opt/cdk"}).cdk == ["/opt/cdk"]
    assert Tools({}).cdk[-1] == f"aws-cdk@{CDK_VERSION}" or "node_modules" in Tools({}).cdk[-1]


def test_versions_are_read_from_what_programs_say() -> None:
    assert version_of("2.1148.1 (build fcf5e34)") == (2, 1148, 1)
    assert version_of("v24.19.0\n") == (24, 19, 0)
    with pytest.raises(ValueError, match="no version"):
        version_of("command not found")


@pytest.mark.parametrize("error", [FileNotFoundError("node"), subprocess.CalledProcessError(1, "cdk")])
def test_a_program_that_does_not_run_is_missing(error: Exception) -> None:
    def output(_command: Sequence[str]) -> str:
        raise error

    with pytest.raises(ToolMissing) as caught:
        Tools({}, output=output).cdk_version()
    assert CDK_VERSION in caught.value.hint


# -- status and destroy ------------------------------------------------------------------------------------------------


def test_a_deployment_that_runs_is_well() -> None:
    status = look(FakeAws(), "farcall")
    assert status.is_well
    assert status.api_url == "https://api.example/api/"
    assert status.missing == ()


def test_a_deployment_is_not_well_without_its_tasks_its_stacks_or_its_peace() -> None:
    assert not look(FakeAws(running=0), "farcall").is_well
    assert look(FakeAws(firing=("farcall-api-errors",)), "farcall").alarms == ("farcall-api-errors",)
    assert not look(FakeAws(firing=("farcall-api-errors",)), "farcall").is_well
    half = FakeAws()
    del half.stacks["farcall-forwarder"]
    assert look(half, "farcall").missing == ("farcall-forwarder",)
    broken = FakeAws()
    broken.stacks["farcall-api"] = dataclasses.replace(broken.stacks["farcall-api"], status="UPDATE_ROLLBACK_COMPLETE")
    assert not look(broken, "farcall").is_well


def test_an_unknown_deployment_is_named() -> None:
    with pytest.raises(DeploymentUnknown, match="'physics' in eu-central-1"):
        look(FakeAws(), "physics")


def test_destroying_takes_protections_off_first_and_deletes_in_reverse() -> None:
    aws, told = FakeAws(), list[str]()
    remains = destroy(aws, "farcall", tell=told.append)
    deleted = [f"farcall-{part} deleted" for part in reversed(STACKS)]
    assert [change for change in aws.changes if change.endswith(" deleted")] == deleted
    assert aws.changes[0] == "database unprotected"
    assert aws.changes.index("farcall-data unprotected") < aws.changes.index("farcall-data deleted")
    assert remains.buckets == ("blobs",)
    assert remains.backups == (LeftBehind("snapshot final", 20),)
    assert any("farcall-data: deleting" in step for step in told)


def test_destroying_goes_on_after_an_interruption() -> None:
    aws = FakeAws()
    for part in ("forwarder", "api"):
        del aws.stacks[f"farcall-{part}"]
    destroy(aws, "farcall", tell=lambda _step: None)
    assert aws.stacks == {}


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> FakeAws:
    fake = FakeAws()
    monkeypatch.setattr(account, "connect", lambda _region=None: fake)
    return fake


def test_status_is_for_people_and_for_programs(aws: FakeAws) -> None:
    people = CliRunner().invoke(app, ["status"])
    assert people.exit_code == 0
    assert "export FARCALL_API_URL=https://api.example/api" in people.output
    aws.firing = ("farcall-api-errors",)
    programs = CliRunner().invoke(app, ["status", "--json"])
    assert programs.exit_code == 3
    assert json.loads(programs.output)["alarms"] == ["farcall-api-errors"]


def test_destroy_wants_the_name_once_more(aws: FakeAws) -> None:
    refused = CliRunner().invoke(app, ["destroy"], input="yes\n")
    assert isinstance(refused.exception, ConfigurationError)
    assert aws.changes == []
    done = CliRunner().invoke(app, ["destroy"], input="farcall\n")
    assert done.exit_code == 0, done.output
    assert aws.stacks == {}
    # 20 GiB of a snapshot at 9.5 cents, and what else is billed on.
    assert "snapshot final: at most $1.90 a month" in done.output
    assert "bucket blobs" in done.output
    assert "Globus client" in done.output


def test_deploying_stops_when_the_doctor_finds_something(aws: FakeAws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farcall_infra.cloud.cli.Tools", _tools)
    aws.bootstrap = None
    stopped = CliRunner().invoke(app, ["deploy", "--yes"])
    assert isinstance(stopped.exception, NotReady)
    assert "bootstrap" in stopped.output


def test_a_first_deployment_needs_the_globus_client(aws: FakeAws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farcall_infra.cloud.cli.Tools", _tools)
    stopped = CliRunner().invoke(app, ["deploy", "--name", "physics", "--yes", "--globus-client-id", "x"])
    assert isinstance(stopped.exception, ConfigurationError)
    assert "--globus-scope" in stopped.exception.hint


def test_a_wrong_setting_is_named_before_anything_else() -> None:
    for wrong in ("database.storage=5", "storage"):
        stopped = CliRunner().invoke(app, ["doctor", "-c", wrong])
        assert isinstance(stopped.exception, ConfigurationError)


def test_a_file_of_profiles_is_found_from_where_we_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.toml").write_text("[lab]\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    stopped = CliRunner().invoke(app, ["cost", "-c", "profiles=mine.toml"])
    assert isinstance(stopped.exception, ConfigurationError)
    assert str(tmp_path / "mine.toml") in str(stopped.exception)  # read, and found to lack everything


def test_the_cdk_is_called_with_the_context_and_the_parameters_that_were_given() -> None:
    context = {"name": "physics", "profile": "facility", "forwarder.tasks": "3"}
    parameters = {"GlobusClientId": "abc", "GlobusScope": ""}
    assert cdk_arguments(context, "physics", parameters) == [
        *("deploy", "--all", "--require-approval", "never"),
        *("--app", shlex.join([sys.executable, "-m", "farcall_infra"])),
        *("--context", "name=physics", "--context", "profile=facility", "--context", "forwarder.tasks=3"),
        *("--parameters", "physics-api:GlobusClientId=abc"),
    ]
