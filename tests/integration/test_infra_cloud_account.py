"""``farcall cloud`` over HTTP, from boto3's real clients to moto's server: status and destruction of stacks that
CloudFormation has created, and the CDK's own bootstrap."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import boto3
import pytest
from typer.testing import CliRunner

from farcall_infra.cloud.cli import app
from farcall_infra.cloud.errors import DeploymentUnknown
from farcall_infra.deployment import DEPLOYMENT_TAG, STACKS

_CDK = Path(__file__).parents[2] / ".tools" / "cdklocal" / "node_modules" / "aws-cdk" / "bin" / "cdk"
_SECRET = "arn:aws:secretsmanager:us-east-1:123456789012:secret:farcall-globus-AbCdEf"
_TAGS: Final[Any] = [{"Key": DEPLOYMENT_TAG, "Value": "farcall"}]
_NETWORK = {"Vpc": {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.0.0.0/16"}}}
_DATABASE = {
    "Engine": "postgres",
    "EngineVersion": "16.4",
    "DBInstanceClass": "db.t4g.micro",
    "AllocatedStorage": "20",
    "MasterUsername": "farcall",
    "MasterUserPassword": "only-in-memory",
    "Tags": _TAGS,
}


def _template(part: str, api_url: str) -> Mapping[str, Any]:
    """The parts of each stack that the commands read."""
    bucket = {"Type": "AWS::S3::Bucket", "DeletionPolicy": "Retain", "Properties": {"Tags": _TAGS}}
    task = {"ContainerDefinitions": [{"Name": "forwarder", "Image": "python", "Memory": 128}]}
    service = {"Cluster": {"Ref": "Cluster"}, "TaskDefinition": {"Ref": "Task"}, "DesiredCount": 0}
    templates: Mapping[str, Mapping[str, Any]] = {
        "network": {"Resources": _NETWORK},
        "data": {
            "Resources": {"Db": {"Type": "AWS::RDS::DBInstance", "Properties": _DATABASE}, "Bucket": bucket},
            "Outputs": {"Profile": {"Value": "hobby"}},
        },
        "api": {
            "Parameters": {"GlobusCredentialsArn": {"Type": "String", "Default": _SECRET}},
            "Resources": _NETWORK,
            "Outputs": {"ApiUrl": {"Value": api_url}},
        },
        "forwarder": {
            "Resources": {
                "Cluster": {"Type": "AWS::ECS::Cluster", "Properties": {"ClusterName": "farcall"}},
                "Task": {"Type": "AWS::ECS::TaskDefinition", "Properties": {"Family": "forwarder", **task}},
                "Service": {"Type": "AWS::ECS::Service", "Properties": service},
            }
        },
        "observability": {"Resources": _NETWORK},
    }
    return templates[part]


@pytest.mark.usefixtures("s3_environment")  # a moto server with all its services
def test_a_deployment_is_read_and_destroyed_and_its_remains_are_listed(s3_server: str) -> None:
    cloudformation = boto3.client("cloudformation")
    for part in STACKS:
        body = json.dumps(_template(part, f"{s3_server}/api/"))
        cloudformation.create_stack(StackName=f"farcall-{part}", TemplateBody=body, Tags=_TAGS)
    rds = boto3.client("rds")
    database = rds.describe_db_instances()["DBInstances"][0]["DBInstanceIdentifier"]
    rds.create_db_snapshot(DBInstanceIdentifier=database, DBSnapshotIdentifier="final", Tags=_TAGS)

    seen = CliRunner().invoke(app, ["status", "--json"])
    found = json.loads(seen.output)
    assert [stack["status"] for stack in found["stacks"]] == ["CREATE_COMPLETE"] * len(STACKS)
    assert found["database"] == {
        "status": "available",
        "storage_gib": 20,
        "is_protected": False,
        "version": "postgres 16.4",
        "needs_restart": False,
    }
    assert (found["tasks"]["desired"], found["tasks"]["running"]) == (0, 0)
    assert found["api_problem"] == ""
    assert found["problems"] == []
    assert seen.exit_code == 0

    done = CliRunner().invoke(app, ["destroy", "--yes", "farcall"])
    assert done.exit_code == 0, done.output
    assert "aws rds delete-db-snapshot --db-snapshot-identifier final" in done.output
    assert "aws s3 rb --force s3://farcall-data-bucket-" in done.output
    assert f"aws secretsmanager delete-secret --secret-id {_SECRET}" in done.output
    assert isinstance(CliRunner().invoke(app, ["status"]).exception, DeploymentUnknown)


@pytest.mark.skipif(not _CDK.exists(), reason="the CDK's command line is not installed: make .tools/cdklocal/.made")
@pytest.mark.usefixtures("s3_environment")
@pytest.mark.filterwarnings("ignore:Tried to parse AWS:UserWarning")  # moto warns about a bucket's policy
def test_an_account_can_be_bootstrapped_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FARCALL_CDK", str(_CDK))
    monkeypatch.setenv("CDK_HOME", str(tmp_path))  # the CDK caches the account of each key here
    for _ in range(2):
        assert CliRunner().invoke(app, ["bootstrap"]).exit_code == 0, capfd.readouterr()
    found = CliRunner().invoke(app, ["doctor", "--json"])
    outcomes = {finding["what"]: finding["outcome"] for finding in json.loads(found.output)}
    assert outcomes["bootstrap"] == "fine"
    assert outcomes["CDK command line"] == "fine"


def test_without_credentials_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    for command in (["status"], ["destroy"], ["bootstrap"], ["deploy"]):
        error = CliRunner().invoke(app, command).exception
        assert getattr(getattr(error, "record", None), "code", "") == "AWS_CREDENTIALS_MISSING", command
