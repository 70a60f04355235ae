"""``farcall cloud deploy`` with everything but AWS: the doctor, the price, and a program in the place of the CDK's
command line that writes down how it was called."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farcall_infra.cloud import aws as account
from farcall_infra.cloud.cli import app
from farcall_infra.cloud.errors import DeploymentFailed
from tests.unit.infra_account import FakeAws

_CDK = """#!{python}
import json, os, sys
if sys.argv[1:] == ["--version"]:
    print("2.1148.1 (build fcf5e34)")
else:
    called = {{"arguments": sys.argv[1:], "region": os.environ["AWS_REGION"], "directory": os.getcwd()}}
    open({record!r}, "w").write(json.dumps(called))
    sys.exit({status})
"""


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> FakeAws:
    fake = FakeAws()
    monkeypatch.setattr(account, "connect", lambda _region=None: fake)
    return fake


def _install_cdk(directory: Path, monkeypatch: pytest.MonkeyPatch, *, status: int = 0) -> Path:
    record, program = directory / "called.json", directory / "cdk"
    program.write_text(_CDK.format(python=sys.executable, record=str(record), status=status), encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("FARCALL_CDK", str(program))
    return record


def test_an_update_looks_prices_asks_deploys_and_tells(
    aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = _install_cdk(tmp_path, monkeypatch)
    done = CliRunner().invoke(app, ["deploy", "-c", "database.storage_gib=30"], input="y\n")
    assert done.exit_code == 0, done.output
    called = json.loads(record.read_text(encoding="utf-8"))
    assert called["arguments"][:2] == ["deploy", "--all"]
    assert "database.storage_gib=30" in called["arguments"]
    assert "profile=hobby" in called["arguments"]  # the one that it has
    assert "--parameters" not in called["arguments"]  # an update keeps those that it has
    assert called["region"] == aws.region
    assert (Path(called["directory"]) / "cdk.json").exists()
    assert "bootstrap: version 30" in done.output
    assert "a month while idle" in done.output
    assert "export FARCALL_API_URL=https://api.example/api" in done.output


def test_nothing_is_deployed_without_a_yes(aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = _install_cdk(tmp_path, monkeypatch)
    assert CliRunner().invoke(app, ["deploy"], input="n\n").exit_code == 1
    assert not record.exists()


def test_a_deployment_that_failed_is_an_error(aws: FakeAws, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install_cdk(tmp_path, monkeypatch, status=1)
    failed = CliRunner().invoke(app, ["deploy", "--yes"])
    assert isinstance(failed.exception, DeploymentFailed)
    assert "deploy again" in failed.exception.hint
