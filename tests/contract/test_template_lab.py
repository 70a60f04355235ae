"""The synthesised templates of profile ``lab``: what must never be in them, what must be, and what they were last time.

After a wanted change, write the snapshot anew with ``FARCALL_UPDATE_SNAPSHOTS=1``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Resource = dict[str, Any]
Templates = dict[str, dict[str, Any]]

_WORKSPACE = Path(__file__).resolve().parents[2]
_SNAPSHOT = Path(__file__).parent / "snapshots" / "template-lab.json"


def _synthesize(directory: Path, target: str) -> Templates:
    """Run the app as the CDK command line would, but without making bundles."""
    context = json.loads((_WORKSPACE / "cdk.json").read_text(encoding="utf-8"))["context"]
    context |= {"target": target, "aws:cdk:bundling-stacks": []}
    variables = {"CDK_OUTDIR": str(directory), "CDK_CONTEXT_JSON": json.dumps(context)}
    subprocess.run([sys.executable, "-m", "farcall_infra"], check=True, env=os.environ | variables)
    return {
        path.name.removesuffix(".template.json"): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(directory.glob("*.template.json"))
    }


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Templates:
    """What goes to AWS, by stack."""
    return _synthesize(tmp_path_factory.mktemp("aws"), "aws")


@pytest.fixture(scope="module")
def localstack(tmp_path_factory: pytest.TempPathFactory) -> Templates:
    """What goes to the offline tier, by stack."""
    return _synthesize(tmp_path_factory.mktemp("localstack"), "localstack")


def _all(templates: Templates, kind: str) -> Iterator[tuple[str, Resource]]:
    for template in templates.values():
        for name, resource in template["Resources"].items():
            if resource["Type"] == kind:
                yield name, resource["Properties"]


def _one(templates: Templates, kind: str) -> Resource:
    found = list(_all(templates, kind))
    assert len(found) == 1, f"{len(found)} resources of type {kind}"
    return found[0][1]


def _function(templates: Templates, handler: str) -> Resource:
    found = [f for _, f in _all(templates, "AWS::Lambda::Function") if f["Handler"].endswith(handler)]
    assert len(found) == 1
    return found[0]


def _world_open_ports(templates: Templates) -> set[int]:
    """Ports that a security group opens to any address."""
    inline = [
        rule
        for _, group in _all(templates, "AWS::EC2::SecurityGroup")
        for rule in group.get("SecurityGroupIngress", [])
    ]
    apart = [rule for _, rule in _all(templates, "AWS::EC2::SecurityGroupIngress")]
    world = [r for r in inline + apart if r.get("CidrIp") == "0.0.0.0/0" or r.get("CidrIpv6") == "::/0"]
    return {port for rule in world for port in range(int(rule["FromPort"]), int(rule["ToPort"]) + 1)}


def test_four_stacks(aws: Templates) -> None:
    assert set(aws) == {"farcall-api", "farcall-data", "farcall-forwarder", "farcall-network"}


@pytest.mark.parametrize(
    "kind",
    [
        "AWS::EC2::NatGateway",
        "AWS::ElasticLoadBalancingV2::LoadBalancer",
        "AWS::ElastiCache::ServerlessCache",
        "AWS::ApiGatewayV2::Api",
    ],
)
def test_what_lab_does_without(aws: Templates, kind: str) -> None:
    assert not list(_all(aws, kind))


def test_the_only_vpc_endpoint_is_the_free_one(aws: Templates) -> None:
    assert _one(aws, "AWS::EC2::VPCEndpoint")["VpcEndpointType"] == "Gateway"


def test_nothing_is_public_but_the_api_and_the_forwarders_port(aws: Templates) -> None:
    assert _world_open_ports(aws) == {443}
    assert _one(aws, "AWS::RDS::DBInstance")["PubliclyAccessible"] is False
    block = _one(aws, "AWS::S3::Bucket")["PublicAccessBlockConfiguration"]
    assert all(block.values())
    assert len(block) == 4


def test_stores_let_in_only_the_cloud_tier(aws: Templates) -> None:
    rules = [rule for _, rule in _all(aws, "AWS::EC2::SecurityGroupIngress")]
    assert sorted(rule["FromPort"] for rule in rules) == [5432, 5432, 6379, 6379]
    assert all("SourceSecurityGroupId" in rule for rule in rules)


def test_stores_are_encrypted_at_rest_and_on_the_way(aws: Templates) -> None:
    assert _one(aws, "AWS::RDS::DBInstance")["StorageEncrypted"] is True
    queue = _one(aws, "AWS::ElastiCache::ReplicationGroup")
    assert queue["AtRestEncryptionEnabled"] is True
    assert queue["TransitEncryptionEnabled"] is True
    assert "BucketEncryption" in _one(aws, "AWS::S3::Bucket")
    statements = _one(aws, "AWS::S3::BucketPolicy")["PolicyDocument"]["Statement"]
    assert any(
        s["Effect"] == "Deny" and s.get("Condition") == {"Bool": {"aws:SecureTransport": "false"}} for s in statements
    )
    assert _function(aws, "api.handle")["Environment"]["Variables"]["FARCALL_QUEUE_TLS"] == "true"


def test_a_full_queue_refuses_instead_of_forgetting(aws: Templates) -> None:
    assert _one(aws, "AWS::ElastiCache::ParameterGroup")["Properties"] == {"maxmemory-policy": "noeviction"}


def test_data_outlives_the_stack(aws: Templates) -> None:
    resources = aws["farcall-data"]["Resources"].values()
    policies = {r["Type"]: r.get("DeletionPolicy") for r in resources}
    assert policies["AWS::RDS::DBInstance"] == "Snapshot"
    assert policies["AWS::S3::Bucket"] == "Retain"
    database = _one(aws, "AWS::RDS::DBInstance")
    assert database["DeletionProtection"] is True
    assert database["BackupRetentionPeriod"] == 7


def test_blobs_expire(aws: Templates) -> None:
    (rule,) = _one(aws, "AWS::S3::Bucket")["LifecycleConfiguration"]["Rules"]
    assert rule["ExpirationInDays"] == 14
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}


def test_the_authorizer_is_outside_the_vpc_and_the_others_are_in_it(aws: Templates) -> None:
    in_vpc = {f["Handler"]: "VpcConfig" in f for _, f in _all(aws, "AWS::Lambda::Function")}
    assert in_vpc == {
        "farcall_lambdas.handlers.api.handle": True,
        "farcall_lambdas.handlers.authorizer.handle": False,
        "farcall_lambdas.handlers.reconciler.handle": True,
        "migration_resource.handle": True,
    }


def test_functions_in_the_vpc_can_reach_aws_without_nat(aws: Templates) -> None:
    assert list(_all(aws, "AWS::EC2::EgressOnlyInternetGateway"))
    for _, function in _all(aws, "AWS::Lambda::Function"):
        if "VpcConfig" in function:
            assert function["VpcConfig"]["Ipv6AllowedForDualStack"] is True
            assert function["Environment"]["Variables"]["AWS_USE_DUALSTACK_ENDPOINT"] == "true"


def test_functions_are_arm64_on_one_python(aws: Templates) -> None:
    for _, function in _all(aws, "AWS::Lambda::Function"):
        assert function["Architectures"] == ["arm64"]
        assert function["Runtime"] == "python3.14"


def test_every_method_asks_the_authorizer(aws: Templates) -> None:
    methods = [method for _, method in _all(aws, "AWS::ApiGateway::Method")]
    assert len(methods) == 2  # the root and everything below it
    for method in methods:
        assert method["HttpMethod"] == "ANY"
        assert method["AuthorizationType"] == "CUSTOM"
        assert method["Integration"]["Type"] == "AWS_PROXY"
    authorizer = _one(aws, "AWS::ApiGateway::Authorizer")
    assert authorizer["Type"] == "TOKEN"
    assert authorizer["AuthorizerResultTtlInSeconds"] == 300
    assert _one(aws, "AWS::ApiGateway::Resource")["PathPart"] == "{proxy+}"


def test_the_gateways_own_answers_have_our_shape(aws: Templates) -> None:
    answers = {r["ResponseType"]: r for _, r in _all(aws, "AWS::ApiGateway::GatewayResponse")}
    assert {"UNAUTHORIZED", "ACCESS_DENIED", "THROTTLED"} <= set(answers)
    for answer in answers.values():
        template = answer["ResponseTemplates"]["application/json"]
        body = json.loads(template.replace("$context.error.messageString", '"why"'))
        assert body["status"] == "Failed"
        assert body["reason"] == body["message"] == "why"
        assert body["http_status_code"] == int(answer["StatusCode"])


def test_the_forwarder_is_one_arm64_task_with_an_address(aws: Templates) -> None:
    task = _one(aws, "AWS::ECS::TaskDefinition")
    assert task["RuntimePlatform"]["CpuArchitecture"] == "ARM64"
    (container,) = task["ContainerDefinitions"]
    assert container["Command"] == ["python", "-m", "farcall_forwarder"]
    assert container["StopTimeout"] == 120
    service = _one(aws, "AWS::ECS::Service")
    assert service["NetworkConfiguration"]["AwsvpcConfiguration"]["AssignPublicIp"] == "ENABLED"
    assert service["DeploymentConfiguration"]["MinimumHealthyPercent"] == 100


def test_the_schema_is_up_to_date_before_anything_uses_it(aws: Templates) -> None:
    resources = aws["farcall-api"]["Resources"]
    (migration,) = (name for name, r in resources.items() if r["Type"] == "Custom::FarcallMigration")
    for handler in ("api.handle", "reconciler.handle"):
        (function,) = (r for r in resources.values() if r.get("Properties", {}).get("Handler", "").endswith(handler))
        assert migration in function["DependsOn"]


def test_logs_are_kept_for_as_long_as_the_profile_says(aws: Templates) -> None:
    groups = list(_all(aws, "AWS::Logs::LogGroup"))
    assert len(groups) == 5
    assert {group["RetentionInDays"] for _, group in groups} == {30}


def test_wildcard_resources_are_only_those_that_aws_forces(aws: Templates) -> None:
    forced = {"ec2:", "ecr:GetAuthorizationToken"}
    for name, policy in _all(aws, "AWS::IAM::Policy"):
        for statement in policy["PolicyDocument"]["Statement"]:
            actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
            assert "*" not in actions, name
            if statement["Resource"] == "*":
                assert all(action.startswith(tuple(forced)) for action in actions), (name, actions)
    assert not [role for _, role in _all(aws, "AWS::IAM::Role") if role.get("ManagedPolicyArns")]


def test_the_forwarder_may_read_its_bundle_and_no_other_code(aws: Templates) -> None:
    statements = [
        statement
        for _, policy in _all(aws, "AWS::IAM::Policy")
        for statement in policy["PolicyDocument"]["Statement"]
        if "cdk-hnb659fds-assets" in json.dumps(statement["Resource"])
    ]
    assert [statement["Action"] for statement in statements] == ["s3:GetObject"]
    assert ".zip" in json.dumps(statements[0]["Resource"])


def test_no_secret_is_in_the_templates(aws: Templates) -> None:
    variables = _function(aws, "authorizer.handle")["Environment"]["Variables"]
    assert variables["FARCALL_AUTH_PROVIDER"] == "globus"
    assert "FARCALL_DEV_TOKENS" not in variables
    assert "{{resolve:secretsmanager:" in json.dumps(variables["FARCALL_GLOBUS_CLIENT_SECRET"])
    assert "{{resolve:secretsmanager:" in json.dumps(_one(aws, "AWS::RDS::DBInstance")["MasterUserPassword"])


def test_the_offline_tier_differs_only_where_it_must(aws: Templates, localstack: Templates) -> None:
    """Types may go (IPv6, Globus' parameters), none may come, and no database, queue or task is of another kind."""
    assert set(localstack) == set(aws)
    counts = {name: _count_types(localstack[name]) for name in aws}
    expected = {name: _count_types(aws[name]) for name in aws}
    for only_ipv6 in ("AWS::EC2::EgressOnlyInternetGateway", "AWS::EC2::VPCCidrBlock"):
        expected["farcall-network"].pop(only_ipv6)
    expected["farcall-network"]["AWS::EC2::Route"] = 2
    assert counts == expected
    assert _one(localstack, "AWS::ElastiCache::ReplicationGroup")["TransitEncryptionEnabled"] is False
    assert localstack["farcall-api"]["Parameters"]["DevTokens"]["NoEcho"] is True


def _count_types(template: dict[str, Any]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for resource in template["Resources"].values():
        counts[resource["Type"]] = counts.get(resource["Type"], 0) + 1
    return counts


def test_the_templates_are_as_they_were(aws: Templates) -> None:
    current = _map_strings(aws, _without_hashes)
    if os.environ.get("FARCALL_UPDATE_SNAPSHOTS"):
        _SNAPSHOT.parent.mkdir(exist_ok=True)
        _SNAPSHOT.write_text(json.dumps(current, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    assert current == json.loads(_SNAPSHOT.read_text(encoding="utf-8"))


def _without_hashes(text: str) -> str:
    """Asset hashes change with every line of code, and so do the names that CDK derives from them."""
    text = re.sub(r"\b[0-9a-f]{64}\b", "HASH", text)
    text = re.sub(r"(WebRestDeployment[0-9A-F]{8})[0-9a-f]{32}", r"\1HASH", text)
    return "BOOT PROGRAM" if text.startswith('"""First program of the forwarder') else text


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    return change(value) if isinstance(value, str) else value
