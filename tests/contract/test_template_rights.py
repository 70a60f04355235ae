"""IAM permissions of the cloud tier's programs: exactly those for their AWS calls, whose endpoints they can reach.

The calls are read from the sources: every module that makes a client of boto3 makes one of one service, so each method
of the module that is named like an operation of that service is a call of it.
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore import xform_name
from botocore.config import Config
from botocore.session import get_session

from farcall_infra.bundles import FORWARDER, LAMBDAS, Bundle
from farcall_infra.profiles import Profile
from tests.contract.templates import Resource, Templates, resources, the_one

_WORKSPACE = Path(__file__).resolve().parents[2]
_SOURCES = (
    "common/farcall_common",
    "lambdas/farcall_lambdas",
    "forwarder_fargate/farcall_forwarder",
    "infra/farcall_infra/runtime",
)
_REGIONS = ("eu-central-1", "us-east-1", "us-west-2")

#: The variable without which a module makes no client. A program with the variable needs permissions for all its calls.
_USED_WITH = {
    "lambdas/farcall_lambdas/cache_traffic.py": "FARCALL_CACHE_NAME",
    "lambdas/farcall_lambdas/serverless_cache.py": "FARCALL_CACHE_NAME",
    "common/farcall_common/store/blobs_s3.py": "FARCALL_BLOB_BUCKET",
    "common/farcall_common/store/secrets.py": "FARCALL_DATABASE_SECRET_ARN",
    "lambdas/farcall_lambdas/aws_secret.py": "FARCALL_CALLER_SECRET_ARN",
    "lambdas/farcall_lambdas/fleet.py": "FARCALL_FLEET_CLUSTER",
    "lambdas/farcall_lambdas/handlers/canary.py": "FARCALL_API_FUNCTION",
}
#: Calls of a module that only one program makes.
_MADE_BY = {"s3:DeleteObject": "the forwarder"}
#: Operations whose right has another name. (Service Authorization Reference.)
_RIGHTS = {
    "lambda:Invoke": "lambda:InvokeFunction",
    "s3:HeadBucket": "s3:ListBucket",
    "s3:HeadObject": "s3:GetObject",
}
#: What Lambda does with a function's role: the log, and the interfaces of a function in a VPC.
_LAMBDAS_OWN = ("ec2:", "logs:")
#: The names that have addresses of IPv6, as AWS documents them, and an operation to ask for one.
_DUAL_STACK = {
    "ecs": ("https://ecs.{region}.api.aws/", "list_clusters", {}),
    "s3": ("https://s3.dualstack.{region}.amazonaws.com/", "head_bucket", {"Bucket": "bucket"}),
    "secretsmanager": ("https://secretsmanager.{region}.amazonaws.com/", "list_secrets", {}),
}


def _clients(tree: ast.AST) -> list[str]:
    """The services of a module's boto3 clients; boto3 is not used in any other way."""
    uses = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "boto3"
    ]  # fmt: skip
    made = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.func in uses]
    assert len(made) == len(uses)
    assert {use.attr for use in uses} <= {"client"}
    return [str(ast.literal_eval(call.args[0])) for call in made]


@functools.cache
def _calls() -> dict[str, tuple[str, frozenset[str]]]:
    """Service and permissions (``s3:GetObject``) by module."""
    found = {}
    for path in (path for source in _SOURCES for path in sorted((_WORKSPACE / source).rglob("*.py"))):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.Name) and node.id == "SecretsProvider" for node in ast.walk(tree)):
            found[str(path.relative_to(_WORKSPACE))] = ("secretsmanager", frozenset({"secretsmanager:GetSecretValue"}))
            continue
        if not (services := _clients(tree)):
            continue
        (service,) = services
        model = get_session().get_service_model(service)
        operations = {xform_name(name): name for name in model.operation_names}
        named = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        # generate_presigned_url has the operation's name as its first argument.
        named |= {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        called = {f"{service}:{operations[name]}" for name in named & set(operations)}
        assert called, path
        rights = frozenset(_RIGHTS.get(operation, operation) for operation in called)
        found[str(path.relative_to(_WORKSPACE))] = (service, rights)
    return found


def _programs(templates: Templates) -> Iterator[tuple[str, Resource, dict[str, Any], bool]]:
    """Name, role and environment of every program that runs in AWS, and whether it is in the private subnets."""
    for _, function in resources(templates, "AWS::Lambda::Function"):
        yield (
            function["Handler"],
            {"Ref": function["Role"]["Fn::GetAtt"][0]},
            function["Environment"]["Variables"],
            "VpcConfig" in function,
        )
    task = the_one(templates, "AWS::ECS::TaskDefinition")
    (container,) = task["ContainerDefinitions"]
    environment = {variable["Name"]: variable["Value"] for variable in container["Environment"]}
    yield "the forwarder", {"Ref": task["TaskRoleArn"]["Fn::GetAtt"][0]}, environment, False


def _granted(templates: Templates, role: Resource) -> dict[str, list[Any]]:
    """The resources of each permission of a role."""
    granted: dict[str, list[Any]] = {}
    for _, policy in resources(templates, "AWS::IAM::Policy"):
        if role not in policy["Roles"]:
            continue
        for statement in policy["PolicyDocument"]["Statement"]:
            if statement["Effect"] == "Deny":
                assert statement["Resource"] == "*"
                continue
            actions, on = statement["Action"], statement["Resource"]
            for action in actions if isinstance(actions, list) else [actions]:
                granted.setdefault(action, []).extend(on if isinstance(on, list) else [on])
    return granted


@pytest.mark.parametrize(("bundle", "part"), [(FORWARDER, "forwarder_fargate/"), (LAMBDAS, "lambdas/")])
def test_a_bundle_has_botocores_data_for_its_calls(bundle: Bundle, part: str) -> None:
    called = {service for module, (service, _) in _calls().items() if module.startswith(("common/", part))}
    assert called == set(bundle.aws_services)


def test_all_modules_that_call_aws_are_known() -> None:
    assert set(_calls()) == set(_USED_WITH)


def test_each_program_has_exactly_the_permissions_for_its_calls(aws: Templates) -> None:
    for name, role, environment, _ in _programs(aws):
        needed = {
            right
            for module, (_, rights) in _calls().items()
            if _USED_WITH[module] in environment
            for right in rights
            if _MADE_BY.get(right, name) == name
        }
        granted = {right for right in _granted(aws, role) if not right.startswith(_LAMBDAS_OWN)}
        assert granted == needed, name


def test_the_keeper_of_the_exchange_cache_has_exactly_the_permissions_for_its_calls(
    synthesized: Callable[[str, str], Templates],
) -> None:
    templates = synthesized("options", "analytics")
    (role,) = (role for name, role, _, _ in _programs(templates) if name.endswith(".exchange_cache.handle"))
    granted = _granted(templates, role)
    needed = {
        right for module, variable in _USED_WITH.items() if variable == "FARCALL_CACHE_NAME"
        for right in _calls()[module][1]
    }  # fmt: skip
    assert {right for right in granted if not right.startswith(_LAMBDAS_OWN)} == needed
    # ElastiCache makes the endpoint of the cache with these.
    network = {"CreateTags", "CreateVpcEndpoint", "DescribeSecurityGroups", "DescribeSubnets", "DescribeVpcs"}
    assert {right for right in granted if right.startswith("ec2:")} == {f"ec2:{action}" for action in network}
    assert {json.dumps(on).rpartition(":")[2] for on in granted["elasticache:CreateServerlessCache"]} == {
        'farcall-exchange"]]}'
    }


def test_each_program_may_read_only_the_secrets_in_its_environment(aws: Templates) -> None:
    for name, role, environment, _ in _programs(aws):
        told = [value for variable, value in environment.items() if variable.endswith("_SECRET_ARN")]
        if several := environment.get("FARCALL_DATABASE_ROLE_SECRET_ARNS"):
            comma, arns = several["Fn::Join"]
            assert comma == ","
            told += arns
        readable = _granted(aws, role).get("secretsmanager:GetSecretValue", [])
        assert sorted(map(str, readable)) == sorted(map(str, told)), name


def test_policy_conditions_are_valid(aws: Templates, size: Profile) -> None:
    kinds = ("AWS::IAM::Policy", "AWS::S3::BucketPolicy", "AWS::SNS::TopicPolicy")
    conditions = [
        statement["Condition"]
        for kind in kinds
        for _, policy in resources(aws, kind)
        for statement in policy["PolicyDocument"]["Statement"]
        if "Condition" in statement
    ]
    functions = ["arn:", {"Ref": "AWS::Partition"}, ":lambda:", {"Ref": "AWS::Region"}, ":", {"Ref": "AWS::AccountId"}]
    by_code = {"ArnLike": {"lambda:SourceFunctionArn": {"Fn::Join": ["", [*functions, ":function:*"]]}}}
    insecure = {"Bool": {"aws:SecureTransport": "false"}}
    ours = {"StringEquals": {"aws:SourceAccount": {"Ref": "AWS::AccountId"}}}
    scaling = [each for each in conditions if "StringEqualsIfExists" in each]
    assert len(scaling) == (2 if size.forwarder.sleeps else 0)  # the API's and the reconciler's
    others = [each for each in conditions if each != by_code and each not in scaling]
    assert sorted(others, key=str) == [insecure, insecure, ours]  # the bucket's and the topic's


def test_functions_may_scale_the_forwarders_but_not_change_what_they_run(
    synthesized: Callable[[str, str], Templates],
) -> None:
    templates = synthesized("aws", "hobby")
    family = the_one(templates, "AWS::ECS::TaskDefinition")["Family"]
    scaling = [
        statement
        for _, policy in resources(templates, "AWS::IAM::Policy")
        for statement in policy["PolicyDocument"]["Statement"]
        if statement["Action"] == "ecs:UpdateService"
    ]
    assert len(scaling) == 2
    for statement in scaling:
        condition = statement["Condition"]
        assert condition["StringEqualsIfExists"] == {"ecs:enable-execute-command": "false"}
        definition = condition["ArnLikeIfExists"]["ecs:task-definition"]["Fn::Join"][1]
        assert definition[-1] == f":task-definition/{family}:*"
        assert statement["Resource"]["Fn::Join"][1][-1] == ":service/farcall/forwarder"


def test_programs_may_not_read_descriptions_of_secrets(aws: Templates) -> None:
    for _, policy in resources(aws, "AWS::IAM::Policy"):
        for statement in policy["PolicyDocument"]["Statement"]:
            assert "secretsmanager:DescribeSecret" not in json.dumps(statement["Action"])


def test_the_code_of_a_function_may_not_change_network_interfaces(aws: Templates) -> None:
    """Lambda attaches a function to the VPC with the function's own role, which its code has too."""
    for _, function in resources(aws, "AWS::Lambda::Function"):
        role = {"Ref": function["Role"]["Fn::GetAtt"][0]}
        statements = [
            statement
            for _, policy in resources(aws, "AWS::IAM::Policy")
            if role in policy["Roles"]
            for statement in policy["PolicyDocument"]["Statement"]
            if "ec2:" in json.dumps(statement["Action"])
        ]
        allowed, denied = ([s["Action"] for s in statements if s["Effect"] == effect] for effect in ("Allow", "Deny"))
        assert allowed == denied
        assert len(allowed) == ("VpcConfig" in function)


def test_only_the_migration_is_the_databases_master_user(aws: Templates) -> None:
    logins = {
        name: str(environment["FARCALL_DATABASE_SECRET_ARN"])
        for name, _, environment, _ in _programs(aws)
        if "FARCALL_DATABASE_SECRET_ARN" in environment
    }
    assert len(set(logins.values())) == len(logins) == 4
    master = logins.pop("migration_resource.handle")
    for name, role, _, _ in _programs(aws):
        if name in logins:
            assert master not in map(str, _granted(aws, role)["secretsmanager:GetSecretValue"])
    users = {
        json.loads(secret["GenerateSecretString"]["SecretStringTemplate"]).get("username")
        for _, secret in resources(aws, "AWS::SecretsManager::Secret")
    }
    assert {"farcall_api", "farcall_reconciler", "farcall_forwarder"} <= users


@pytest.mark.parametrize("region", _REGIONS)
def test_endpoints_called_from_the_private_subnets_support_ipv6(
    aws: Templates, region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs there cannot reach IPv4 addresses. boto3 itself is asked for the endpoint of each call."""
    switch = "AWS_USE_DUALSTACK_ENDPOINT"
    private = [environment for _, _, environment, is_private in _programs(aws) if is_private]
    assert all(environment[switch] == "true" for environment in private)
    called = {
        service
        for environment in private
        for module, (service, _) in _calls().items()
        if _USED_WITH[module] in environment
    }
    assert {"s3", "secretsmanager"} <= called
    monkeypatch.setenv(switch, "true")
    for service in called:
        address, operation, arguments = _DUAL_STACK[service]
        assert _sent_to(service, operation, arguments, region).startswith(address.format(region=region))


class _Sent(Exception):
    """Raised instead of sending a request."""


def _sent_to(service: str, operation: str, arguments: dict[str, str], region: str) -> str:
    """The address that boto3 sends an operation to; nothing is sent."""

    def stop(request: Any, **_: object) -> None:
        raise _Sent(request.url)

    client = boto3.client(  # type: ignore[call-overload]  # one for each literal name of a service
        service,
        region_name=region,
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        config=Config(s3={"addressing_style": "path"}),
    )
    client.meta.events.register("before-send", stop)
    with pytest.raises(_Sent) as caught:
        getattr(client, operation)(**arguments)
    return str(caught.value)
