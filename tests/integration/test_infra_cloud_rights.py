"""Rights of an operator: each command of ``farcall cloud`` runs on moto with its rights of docs/deploy/rights.md.
Exactly those: a missing right fails, and so does one that the command does not use."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from typer.testing import CliRunner, Result

from farcall_common.errors import FarcallError
from farcall_infra.cloud import cli, lifecycle
from farcall_infra.cloud.aws import connect
from farcall_infra.deployment import DEPLOYMENT_TAG, STACKS
from tests.support.enforced_rights import ACCOUNT, REGION, Account
from tests.unit.infra_account import GLOBUS, fetch_ca_bundle, install_cdk

pytestmark = pytest.mark.timeout(600)

_PAGE = Path(__file__).parents[2] / "docs" / "deploy" / "rights.md"
_TAGS: Any = [{"Key": DEPLOYMENT_TAG, "Value": "farcall"}]
#: AWS checks no right for it; moto does.
_ALWAYS = "sts:GetCallerIdentity"
#: moto lacks the first operation, and computes another signature for the second.
_UNCHECKED = {"lambda:GetAccountSettings", "lambda:GetFunctionConcurrency"}
#: Parts of a deletion that moto lacks.
_DELETIONS = (
    ("has_cache", "farcall-exchange"),
    ("delete_cache", "farcall-exchange"),
    ("unprotect_stack", "farcall-data"),
)


def _table() -> Mapping[str, list[tuple[str, str]]]:
    """Actions and resources of each command."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in _PAGE.read_text(encoding="utf-8").splitlines()
        if re.match(r"\| (action|`[a-z0-9]+:[A-Za-z]+`) \| ", line)
    ]
    head, *rows = rows
    assert head[:2] == ["action", "resource"]
    return {
        command: [
            (row[0].strip("`"), row[1].split("`")[1].replace("REGION", REGION).replace("ACCOUNT", ACCOUNT))
            for row in rows
            if row[column]
        ]
        for column, command in enumerate(head[2:], start=2)
    }


class Operators(Account):
    """An account with a role for each command."""

    def roles(self) -> dict[str, list[dict[str, Any]]]:
        return {
            command: [
                {"Effect": "Allow", "Action": action, "Resource": resource}
                for action, resource in [*rights, (_ALWAYS, "*")]
            ]
            for command, rights in _table().items()
        }


def _function(name: str) -> Mapping[str, Any]:
    code = {"ZipFile": "def handle(event, context): return {}"}
    role = f"arn:aws:iam::{ACCOUNT}:role/any"
    properties = {"FunctionName": name, "Handler": "index.handle", "Runtime": "python3.12", "Role": role, "Code": code}
    return {"Type": "AWS::Lambda::Function", "Properties": properties}


def _templates(secret: str) -> Mapping[str, Mapping[str, Any]]:
    """What the commands read of each stack, with the names that CloudFormation gives in a real account."""
    database = {
        "DBInstanceIdentifier": "farcall-data-database",
        "Engine": "postgres",
        "EngineVersion": "17.2",
        "DBInstanceClass": "db.t4g.micro",
        "AllocatedStorage": "20",
        "MasterUsername": "farcall",
        "MasterUserPassword": "only-in-memory",
    }
    task = {"Family": "f", "ContainerDefinitions": [{"Name": "forwarder", "Image": "python", "Memory": 128}]}
    service = {"ServiceName": "forwarder", "Cluster": "farcall", "TaskDefinition": {"Ref": "Task"}, "DesiredCount": 0}
    parameters = {name: {"Type": "String", "Default": value} for name, value in GLOBUS.items()}
    parameters["GlobusCredentialsArn"]["Default"] = secret
    network = {"Resources": {"Vpc": {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.0.0.0/16"}}}}
    return {
        "network": network,
        "data": {
            "Resources": {"Db": {"Type": "AWS::RDS::DBInstance", "Properties": database}},
            "Outputs": {"Profile": {"Value": "hobby"}, "LoginApi": {"Value": secret}},
        },
        "api": {
            "Parameters": parameters,
            "Resources": {"Migrator": _function("farcall-api-migrator")},
            "Outputs": {"Migrator": {"Value": "farcall-api-migrator"}},
        },
        "forwarder": {
            "Resources": {
                "Cluster": {"Type": "AWS::ECS::Cluster", "Properties": {"ClusterName": "farcall"}},
                "Task": {"Type": "AWS::ECS::TaskDefinition", "Properties": task},
                "Service": {"Type": "AWS::ECS::Service", "Properties": service, "DependsOn": "Cluster"},
            }
        },
        "observability": network,
        "analytics": {
            "Resources": {"Keeper": _function("farcall-analytics-keeper")},
            "Outputs": {
                "Storage": {"Value": "s3://bucket"},
                "CacheFunction": {"Value": f"arn:aws:lambda:{REGION}:{ACCOUNT}:function:farcall-analytics-keeper"},
            },
        },
    }


@pytest.fixture
def operators(s3_environment: None, s3_server: str) -> Iterator[Operators]:
    httpx.post(f"{s3_server}/moto-api/reset").raise_for_status()
    httpx.post(f"{s3_server}/moto-api/config", json={"lambda": {"use_docker": False}}).raise_for_status()
    boto3.client("iam").create_role(RoleName="any", AssumeRolePolicyDocument="{}")
    login = json.dumps({"username": "farcall_api", "password": "only-in-memory"})
    secret = boto3.client("secretsmanager").create_secret(Name="login", SecretString=login, Tags=_TAGS)["ARN"]
    for part, template in _templates(secret).items():
        boto3.client("cloudformation").create_stack(
            StackName=f"farcall-{part}", TemplateBody=json.dumps(template), Tags=_TAGS
        )
    boto3.client("rds").modify_db_instance(DBInstanceIdentifier="farcall-data-database", DeletionProtection=True)
    yield Operators(s3_server, {}, {})
    httpx.post(f"{s3_server}/moto-api/reset").raise_for_status()


@pytest.fixture
def as_operator(operators: Operators, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a block with the rights of a command."""

    @contextlib.contextmanager
    def run(command: str) -> Iterator[None]:
        for name, value in operators.credentials(command).items():
            monkeypatch.setenv(name, value)
        with operators.enforced():
            yield
        unused = operators.unused(command) - {_ALWAYS}
        assert unused <= _UNCHECKED, "rights that the command does not use"

    return run


def _call(*arguments: str) -> Result:
    environment = cli.CloudEnvironment(fetch=fetch_ca_bundle, probe=lambda _url: "", pause=lambda _s: None)
    done = CliRunner().invoke(cli.app, arguments, obj=environment)
    said = f"{done.output} {done.exception}"
    assert "not authorized" not in said, said
    return done


def _call_others(*calls: tuple[str, str]) -> None:
    """Methods of the account with an argument, which moto does not answer. It checks their rights."""
    aws = connect()
    for name, argument in calls:
        with pytest.raises(FarcallError) as caught:
            getattr(aws, name)(argument)
        assert "not authorized" not in str(caught.value)


def _describe_network() -> None:
    """Calls of the doctor for some settings, and after a question for a quota that moto lacks."""
    assert connect().count_addresses() == 0
    assert connect().zones()


def _describe_events() -> None:
    """The call after a deletion that failed."""
    connect()._client("cloudformation").describe_stack_events(StackName="farcall-api")


def test_the_table_has_all_commands_that_call_aws() -> None:
    commands = {command.name or getattr(command.callback, "__name__", "") for command in cli.app.registered_commands}
    assert set(_table()) == commands - {"bootstrap", "cost", "profiles", "synth"}
    assert len(STACKS) == 5


def test_doctor(as_operator: Any) -> None:
    secret = f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:farcall-globus-AbCdEf"
    with as_operator("doctor"):
        _call("doctor", "--profile", "facility", "--globus-credentials-arn", secret)
        _describe_network()


def test_status(as_operator: Any) -> None:
    with as_operator("status"):
        found = json.loads(_call("status", "--json").output)
        assert found["unknown"] == {}
        assert connect().alarms(["farcall-api-errors"]) == {}
        _call_others(("queue", "group"))


def test_rotate(as_operator: Any) -> None:
    with as_operator("rotate"):
        done = _call("rotate", "api")
        assert done.exit_code == 0, done.exception


def test_analytics(as_operator: Any) -> None:
    with as_operator("analytics"):
        _call("analytics")


def test_deploy(as_operator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_cdk(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    checked = cli._run_checks
    # moto lacks some of what the doctor asks for.
    monkeypatch.setattr(cli, "_run_checks", lambda *given, **named: checked(*given, **named) and [])
    monkeypatch.setattr(lifecycle, "is_unfinished", lambda stack: stack.name == "farcall-data")
    with as_operator("deploy"):
        done = _call("deploy", "--yes")
        assert done.exit_code == 0, (done.output, done.exception)
        assert connect().alarms(["farcall-api-errors"]) == {}
        _call_others(("queue", "group"), *_DELETIONS)
        _describe_network()
        _describe_events()


def test_destroy(as_operator: Any) -> None:
    with as_operator("destroy"):
        _describe_events()
        done = _call("destroy", "--yes", "farcall")
        assert done.exit_code == 0, (done.output, done.exception)
        _call_others(*_DELETIONS)
