"""``farcall cloud deploy`` without AWS: the checks, the price, and a fake of the CDK's command line that records its
arguments."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from farcall.cli._app import app as farcall
from farcall_common.errors import ConfigurationError
from farcall_common.exit_codes import raise_on_sigterm
from farcall_infra.ca_bundle import CaBundle
from farcall_infra.cloud.account import Stack
from farcall_infra.cloud.errors import DeploymentBusy, DeploymentFailed, NotReady
from tests.certificates import Authority
from tests.unit.infra_account import SECRET, FakeAws, install_cdk, invoke


@pytest.fixture
def aws() -> FakeAws:
    return FakeAws()


def test_an_update_checks_prices_confirms_deploys_and_shows_the_status(
    aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = install_cdk(tmp_path, monkeypatch)
    Authority().write(tmp_path / "authorities.pem")
    monkeypatch.chdir(tmp_path)
    given = ["-c", "database.storage_gib=30", "-c", "database.authorities=authorities.pem"]
    done = invoke(aws, "deploy", *given, input="y\n")
    assert done.exit_code == 0, done.output
    called = json.loads(record.read_text(encoding="utf-8"))
    assert called["arguments"][:2] == ["deploy", "--all"]
    assert "database.storage_gib=30" in called["arguments"]
    assert (
        f"database.authorities={tmp_path / 'authorities.pem'}" in called["arguments"]
    )  # the app runs in another directory
    assert "profile=hobby" in called["arguments"]  # the deployed one
    assert "--parameters" not in called["arguments"]  # an update keeps the deployed ones
    assert called["region"] == aws.region
    assert not called["has_app"]  # the arguments name it
    assert "bootstrap: version 30" in done.output
    assert "no e-mail address is set for alarms" in done.output
    assert "a month while idle" in done.output
    assert "export FARCALL_API_URL=https://api.example/api" in done.output


def test_reverted_settings_are_shown_before_the_confirmation_without_which_nothing_is_deployed(
    aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = install_cdk(tmp_path, monkeypatch)
    deployed = {"Profile": "hobby", "SettingsDatabase": '{"storage_gib":50,"backup_days":5}'}
    data = aws.stacks["farcall-data"]
    aws.stacks["farcall-data"] = dataclasses.replace(data, outputs={**deployed, "Overrides": "database.storage_gib"})
    refused = invoke(aws, "deploy", "--yes")
    assert isinstance(refused.exception, ConfigurationError)  # a disk does not shrink
    assert not record.exists()
    assert re.search(r"database\.backup_days\W+5\W+1\W", refused.output)
    assert re.search(r"database\.storage_gib\W+50\W+20\W", refused.output)
    assert "-c database.storage_gib=50, or permanently `storage_gib` in [hobby.database]" in refused.output
    asked = invoke(aws, "deploy", "-c", "database.storage_gib=50", input="n\n")
    assert asked.exit_code == 1
    assert not record.exists()
    shown, _, _ = asked.output.partition("Continue?")
    assert "database.backup_days" in shown
    assert "database.storage_gib" not in shown
    kept = ["-c", "database.storage_gib=50", "-c", "database.backup_days=5"]
    assert "Settings that change" not in invoke(aws, "deploy", "--yes", *kept).output
    assert record.exists()
    mislaid = {"Profile": "hobby", "SettingsDatabase": '{"backup_days":5}'}
    aws.stacks["farcall-data"] = dataclasses.replace(data, outputs=mislaid)
    assert "is the file with your profiles missing?" in invoke(aws, "deploy", "--yes").output


def test_the_cdk_gets_the_ca_bundle_the_concurrency_and_the_full_arn_of_the_globus_clients_secret(
    aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = install_cdk(tmp_path, monkeypatch)
    api = aws.stacks["farcall-api"]
    short = {**api.parameters, "GlobusCredentialsArn": SECRET.rpartition("-")[0]}
    aws.stacks["farcall-api"] = dataclasses.replace(api, parameters=short)
    done = invoke(aws, "deploy", "--yes")
    assert done.exit_code == 0, done.output
    assert "signed by one of 1 in https://truststore.pki.rds.amazonaws.com/global/global-bundle.pem" in done.output
    arguments = json.loads(record.read_text(encoding="utf-8"))["arguments"]
    (file,) = (each for each in arguments if each.startswith("database.authorities="))
    assert file.endswith("/fetched.pem")
    assert "reservable_concurrency=900" in arguments
    assert arguments[-2:] == ["--parameters", f"farcall-api:GlobusCredentialsArn={SECRET}"]


@pytest.mark.parametrize("needed", [True, False])
def test_a_restart_that_new_settings_need_is_asked_for(
    aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needed: bool
) -> None:
    install_cdk(tmp_path, monkeypatch)
    aws.database_needs_restart = needed
    done = invoke(aws, "deploy", "--yes")
    assert done.exit_code == 0, done.output
    command = "aws rds reboot-db-instance --db-instance-identifier db --region eu-central-1"
    assert (command in done.output) is needed
    assert ("needs a restart for its new settings" in done.output) is needed


def test_nothing_is_deployed_if_the_ca_bundle_cannot_be_downloaded(
    aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(url: str, _directory: Path, *, now: dt.datetime) -> CaBundle:
        raise ConfigurationError(f"cannot fetch {url} at {now:%H:%M}", hint="Pass a file.")

    record = install_cdk(tmp_path, monkeypatch)
    stopped = invoke(aws, "deploy", "--yes", fetch=fail)
    assert isinstance(stopped.exception, NotReady)
    assert "Pass a file." in stopped.output
    assert not record.exists()
    # Without an explicit setting the certificate is checked.
    assert invoke(aws, "deploy", "--yes", "-c", "database.authorities=").exit_code == 0
    assert record.exists()


def test_a_failed_deployment_is_an_error(aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_cdk(tmp_path, monkeypatch, then="sys.exit(1)")
    aws.set_status("data", "ROLLBACK_COMPLETE")
    failed = invoke(aws, "deploy", "--yes")
    assert isinstance(failed.exception, DeploymentFailed)
    assert "deploy again" in failed.exception.hint
    # Unfinished stacks of an earlier attempt were deleted first.
    assert "farcall-data was never finished (ROLLBACK_COMPLETE)" in failed.output
    assert "farcall-data deleted" in aws.changes
    assert "farcall-network CREATE_COMPLETE" in str(failed.exception)


def test_a_failed_rollback_has_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = install_cdk(tmp_path, monkeypatch, then="sys.exit(1)")

    class StuckAws(FakeAws):
        def stack(self, name: str) -> Stack | None:
            if name == "farcall-api" and record.exists():
                self.set_status("api", "UPDATE_ROLLBACK_FAILED", "the function does not settle")
            return super().stack(name)

    failed = invoke(StuckAws(), "deploy", "--yes")
    assert isinstance(failed.exception, DeploymentFailed)
    assert "continue-update-rollback --stack-name farcall-api" in failed.exception.hint


def test_a_deployment_is_refused_while_another_one_runs(
    aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = install_cdk(tmp_path, monkeypatch)
    aws.set_status("forwarder", "UPDATE_IN_PROGRESS")
    second = invoke(aws, "deploy", "--yes")
    assert isinstance(second.exception, DeploymentBusy)
    assert "farcall-forwarder is UPDATE_IN_PROGRESS" in str(second.exception)
    assert not record.exists()


@pytest.fixture
def _raise_on_sigterm() -> Iterator[None]:
    """Run the command as its own process does."""
    before = signal.getsignal(signal.SIGTERM)
    raise_on_sigterm()
    yield
    signal.signal(signal.SIGTERM, before)


#: Ctrl-C goes to all processes of the terminal, SIGTERM to us alone: then we have to signal the program.
_INTERRUPTING = """
    import signal
    try:
        os.kill(os.getppid(), signal.{number})
        if signal.{number} == signal.SIGTERM:
            signal.pause()
    except KeyboardInterrupt:
        open("{signalled}", "w").close()
    sys.exit(130)
"""


@pytest.mark.usefixtures("_raise_on_sigterm")
@pytest.mark.parametrize(("number", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_an_interrupted_deployment_has_a_message_and_a_hint(
    aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str, status: int
) -> None:
    signalled = tmp_path / "signalled"
    install_cdk(tmp_path, monkeypatch, then=_INTERRUPTING.format(number=number, signalled=signalled))
    stopped = invoke(aws, "cloud", "deploy", "--yes", app=farcall)
    assert signalled.exists() is (number == "SIGTERM")
    assert stopped.exit_code == status
    assert "[DEPLOYMENT_INTERRUPTED]" in stopped.stderr
    assert "farcall cloud status" in stopped.stderr


def test_an_interrupted_destroy_has_a_message_and_a_hint() -> None:
    class InterruptedAws(FakeAws):
        def delete_stack(self, name: str, *, poll_s: int = 15, timeout_s: int = 3600) -> None:
            raise KeyboardInterrupt

    stopped = invoke(InterruptedAws(), "cloud", "destroy", "--yes", "farcall", app=farcall)
    assert stopped.exit_code == 130
    assert "[DEPLOYMENT_INTERRUPTED]" in stopped.stderr
    assert "Run the command again" in stopped.stderr
