"""``farcall cloud`` on the offline tier: status, destruction, the remaining resources with their cost, and a restore
from a snapshot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest
from botocore.exceptions import ClientError
from typer.testing import CliRunner

import farcall
from farcall_infra.cloud.cli import app
from farcall_infra.release import this_release
from farcall_localstack import LocalStackTier
from farcall_localstack.assembly import ACCOUNT, REGION
from farcall_localstack.deploy import Deployer
from farcall_localstack.server import LocalStackServer, group_members
from farcall_localstack.synth import ensure_assembly
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

_PASSWORD = "only-in-memory"
_TAGS = [{"Key": "farcall:deployment", "Value": "physics"}]


@pytest.fixture(autouse=True)
def _account(localstack: LocalStackServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment variables that make `farcall cloud` use a LocalStack."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", localstack.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCOUNT)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", REGION)


def _cloud(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    return done.exit_code, done.output


def _double(number: int) -> int:
    return 2 * number


def test_a_deployment_is_destroyed_and_restored_from_its_snapshot(localstack: LocalStackServer) -> None:
    alone, release = group_members(localstack.pid), this_release()
    started = LocalStackTier(localstack.directory, assembly=ensure_assembly(), endpoint_url=localstack.url)
    with started:
        with farcall.Client(started.api_url, started.token) as client:
            function_id = client.register_function(_double)

        code, said = _cloud("status", "--json")
        found = json.loads(said)
        assert found["releases"] == dict.fromkeys(started.tier.stacks, release)
        assert found["is_current"] is True
        assert (found["settings"]["profile"], found["settings"]["overrides"]) == ("lab", [])
        assert found["database"]["status"] == "available"
        assert found["tasks"] == {**found["tasks"], "desired": 1, "running": 1}
        assert found["queue"]["status"] == "available"
        assert found["api_url"] == started.api_url
        assert (code, found["problems"]) == (0, [])  # the templates for LocalStack have no stack of alarms

        rds = Deployer(localstack.url).client("rds")
        (database,) = rds.describe_db_instances()["DBInstances"]
        rds.create_db_snapshot(
            DBInstanceIdentifier=database["DBInstanceIdentifier"], DBSnapshotIdentifier="farcall-before"
        )
        code, said = _cloud("destroy", "--yes", "farcall")
        assert code == 0, said
        for part in ("forwarder", "api", "data", "network"):
            assert f"farcall-{part}: deleting" in said
        assert "snapshot farcall-before: at most $1.90 a month" in said
        assert "aws rds delete-db-snapshot --db-snapshot-identifier farcall-before" in said
        assert rds.describe_db_instances()["DBInstances"] == []
        wait_until(lambda: group_members(localstack.pid) <= alone, "the processes of the deployment have ended")

    assembly = ensure_assembly(settings={"database.snapshot": "farcall-before"})
    with LocalStackTier(localstack.directory, assembly=assembly, endpoint_url=localstack.url) as restored:
        with farcall.Client(restored.api_url, restored.token) as client:
            assert client.get_function(function_id)["function_uuid"] == function_id
        assert json.loads(_cloud("status", "--json")[1])["settings"]["overrides"] == ["database.snapshot"]
    rds.delete_db_snapshot(DBSnapshotIdentifier="farcall-before")
    assert rds.describe_db_snapshots()["DBSnapshots"] == []


def _data_stack(directory: Path, properties: Mapping[str, Any]) -> Path:
    """The assembly of a deployment ``physics`` with only a database, with the settings for AWS."""
    stack = {"type": "aws:cloudformation:stack", "properties": {"templateFile": "physics-data.template.json"}}
    database = {
        "Type": "AWS::RDS::DBInstance",
        "DeletionPolicy": "Snapshot",
        "Properties": {
            "Engine": "postgres",
            "EngineVersion": "16",
            "AllocatedStorage": "50",
            "MasterUserPassword": _PASSWORD,
            "DeletionProtection": True,
            "CopyTagsToSnapshot": True,
            "Tags": _TAGS,
            **properties,
        },
    }
    template = {
        "Resources": {"Database": database},
        "Outputs": {"Port": {"Value": {"Fn::GetAtt": ["Database", "Endpoint.Port"]}}},
    }
    directory.mkdir()
    (directory / "manifest.json").write_text(json.dumps({"artifacts": {"physics-data": stack}}), encoding="utf-8")
    (directory / "physics-data.template.json").write_text(json.dumps(template), encoding="utf-8")
    (directory / "physics-data.assets.json").write_text(json.dumps({"files": {}}), encoding="utf-8")
    return directory


def _connect(port: str) -> psycopg.Connection[tuple[Any, ...]]:
    return psycopg.connect(host="127.0.0.1", port=port, user="ada", password=_PASSWORD, dbname="records")


def test_a_protected_database_leaves_a_final_snapshot_that_can_be_restored(
    localstack: LocalStackServer, tmp_path: Path
) -> None:
    deployer = Deployer(localstack.url)
    first = _data_stack(tmp_path / "first", {"MasterUsername": "ada", "DBName": "records"})
    with _connect(deployer.deploy(first, parameters={})["Port"]) as connection:
        connection.execute("CREATE TABLE kept (number integer PRIMARY KEY)")
        connection.execute("INSERT INTO kept VALUES (42)")

    code, said = _cloud("destroy", "--name", "physics", "--yes", "physics")
    assert code == 0, said
    assert said.index("protection off") < said.index("physics-data: deleting")
    taken = deployer.client("rds").describe_db_snapshots()["DBSnapshots"]
    (snapshot,) = (each for each in taken if each["TagList"] == _TAGS)
    assert f"snapshot {snapshot['DBSnapshotIdentifier']}: at most $4.75 a month" in said  # 50 GiB at 9.5 cents

    again = _data_stack(tmp_path / "again", {"DBSnapshotIdentifier": snapshot["DBSnapshotIdentifier"]})
    with _connect(deployer.deploy(again, parameters={})["Port"]) as connection:
        assert connection.execute("SELECT number FROM kept").fetchall() == [(42,)]
    code, said = _cloud("destroy", "--name", "physics", "--yes", "physics")
    assert code == 0, said
    assert said.count("aws rds delete-db-snapshot") == 2


def test_a_protected_database_is_not_deleted(localstack: LocalStackServer, tmp_path: Path) -> None:
    deployer = Deployer(localstack.url)
    assembly = _data_stack(tmp_path / "guarded", {"MasterUsername": "ada", "DBName": "records"})
    port = deployer.deploy(assembly, parameters={})["Port"]
    deployer.delete(assembly)  # LocalStack reports the stack as deleted although one of its resources was not
    with _connect(port) as connection:
        assert connection.execute("SELECT 1").fetchall() == [(1,)]
    rds = deployer.client("rds")
    (database,) = rds.describe_db_instances()["DBInstances"]
    assert database["DeletionProtection"] is True
    with pytest.raises(ClientError, match="cannot be changed here: MultiAZ"):  # an unsupported change is refused
        rds.modify_db_instance(DBInstanceIdentifier=database["DBInstanceIdentifier"], MultiAZ=True)
    with pytest.raises(ClientError, match="DBSnapshot none not found"):
        rds.describe_db_snapshots(DBSnapshotIdentifier="none")
