"""Security of the templates of every profile: network access, permissions and encryption. A synth also fails for a
finding of cdk-nag that no construct suppresses with a reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from farcall_infra.profiles import Profile
from tests.contract.templates import Templates, function_of, resources, the_one


def _world_open_ports(templates: Templates) -> set[int]:
    """Ports that a security group opens to any address."""
    inline = [
        rule
        for _, group in resources(templates, "AWS::EC2::SecurityGroup")
        for rule in group.get("SecurityGroupIngress", [])
    ]
    apart = [rule for _, rule in resources(templates, "AWS::EC2::SecurityGroupIngress")]
    world = [r for r in inline + apart if r.get("CidrIp") == "0.0.0.0/0" or r.get("CidrIpv6") == "::/0"]
    return {port for rule in world for port in range(int(rule["FromPort"]), int(rule["ToPort"]) + 1)}


@pytest.mark.parametrize(
    "kind",
    [
        "AWS::EC2::NatGateway",
        "AWS::Lambda::Url",
        "AWS::ElastiCache::ServerlessCache",
        "AWS::ApiGatewayV2::Api",
    ],
)
def test_resource_types_that_no_profile_has(aws: Templates, kind: str) -> None:
    assert not list(resources(aws, kind))


def test_only_the_api_and_the_forwarders_port_are_public(aws: Templates) -> None:
    assert _world_open_ports(aws) == {443}
    assert not any(subnet["MapPublicIpOnLaunch"] for _, subnet in resources(aws, "AWS::EC2::Subnet"))
    assert the_one(aws, "AWS::RDS::DBInstance")["PubliclyAccessible"] is False
    block = the_one(aws, "AWS::S3::Bucket")["PublicAccessBlockConfiguration"]
    assert all(block.values())
    assert len(block) == 4


def test_only_the_cloud_tier_can_reach_the_stores(aws: Templates) -> None:
    rules = [rule for _, rule in resources(aws, "AWS::EC2::SecurityGroupIngress")]
    stores = [rule["FromPort"] for rule in rules if rule["FromPort"] in (5432, 6379)]
    assert sorted(stores) == [5432, 5432, 6379, 6379]
    assert all("SourceSecurityGroupId" in rule for rule in rules)


def test_stores_are_encrypted_at_rest_and_in_transit(aws: Templates) -> None:
    assert the_one(aws, "AWS::RDS::DBInstance")["StorageEncrypted"] is True
    assert the_one(aws, "AWS::RDS::DBParameterGroup")["Parameters"]["rds.force_ssl"] == "1"
    queue = the_one(aws, "AWS::ElastiCache::ReplicationGroup")
    assert queue["AtRestEncryptionEnabled"] is True
    assert queue["TransitEncryptionEnabled"] is True
    assert "BucketEncryption" in the_one(aws, "AWS::S3::Bucket")
    statements = the_one(aws, "AWS::S3::BucketPolicy")["PolicyDocument"]["Statement"]
    assert any(
        s["Effect"] == "Deny" and s.get("Condition") == {"Bool": {"aws:SecureTransport": "false"}} for s in statements
    )
    for handler in ("api.handle", "reconciler.handle"):
        variables = function_of(aws, handler)["Environment"]["Variables"]
        assert (variables["FARCALL_QUEUE_TLS"], variables["PGSSLMODE"]) == ("true", "require")
    assert function_of(aws, "migration_resource.handle")["Environment"]["Variables"]["PGSSLMODE"] == "require"
    (container,) = the_one(aws, "AWS::ECS::TaskDefinition")["ContainerDefinitions"]
    environment = {variable["Name"]: variable["Value"] for variable in container["Environment"]}
    assert (environment["FARCALL_QUEUE_TLS"], environment["PGSSLMODE"]) == ("true", "require")


def test_the_databases_certificate_is_checked_if_a_ca_bundle_is_set(
    synthesized: Callable[[str, str], Templates],
) -> None:
    """All programs that connect to the database have the CA bundle in their code bundle, whose hash depends on it."""
    bundles = []
    for templates, expected in (
        (synthesized("options", "restored"), "database-authorities.pem"),
        (synthesized("aws", "lab"), "database-authorities.pem"),  # by default the file is downloaded
        (synthesized("options", "unverified"), None),
    ):
        functions = [function for _, function in resources(templates, "AWS::Lambda::Function")]
        (container,) = the_one(templates, "AWS::ECS::TaskDefinition")["ContainerDefinitions"]
        forwarder = {variable["Name"]: variable["Value"] for variable in container["Environment"]}
        environments = [forwarder, *(function.get("Environment", {}).get("Variables", {}) for function in functions)]
        clients = [each for each in environments if "FARCALL_DATABASE_HOST" in each]
        assert len(clients) == 4
        for environment in environments:
            assert environment.get("FARCALL_DATABASE_AUTHORITIES") == (expected if environment in clients else None)
        (lambdas,) = {function["Code"]["S3Key"] for function in functions}
        migrated = the_one(templates, "Custom::FarcallMigration")["Bundle"]
        bundles += [lambdas, migrated, forwarder["FARCALL_BUNDLE_KEY"]]
    assert len(set(bundles)) == 9


def test_data_outlives_the_stack(aws: Templates, size: Profile) -> None:
    resources = aws["farcall-data"]["Resources"].values()
    policies = {r["Type"]: r.get("DeletionPolicy") for r in resources}
    assert policies["AWS::RDS::DBInstance"] == "Snapshot"
    assert policies["AWS::S3::Bucket"] == "Retain"
    database = the_one(aws, "AWS::RDS::DBInstance")
    assert database["DeletionProtection"] is True
    assert database["BackupRetentionPeriod"] == size.database.backup_days


def test_only_functions_that_need_the_internet_are_outside_the_vpc(aws: Templates, size: Profile) -> None:
    in_vpc = {f["Handler"]: "VpcConfig" in f for _, f in resources(aws, "AWS::Lambda::Function")}
    canary = {"farcall_lambdas.handlers.canary.handle": False} if size.canary.minutes else {}
    assert in_vpc == {
        **canary,
        "farcall_lambdas.handlers.api.handle": True,
        "farcall_lambdas.handlers.authorizer.handle": False,
        "farcall_lambdas.handlers.reconciler.handle": True,
        "migration_resource.handle": True,
    }


def test_every_method_has_the_authorizer(aws: Templates) -> None:
    methods = [method for _, method in resources(aws, "AWS::ApiGateway::Method")]
    assert len(methods) == 2  # the root and everything below it
    for method in methods:
        assert method["HttpMethod"] == "ANY"
        assert method["AuthorizationType"] == "CUSTOM"
        assert method["Integration"]["Type"] == "AWS_PROXY"
    authorizer = the_one(aws, "AWS::ApiGateway::Authorizer")
    assert authorizer["Type"] == "TOKEN"
    assert authorizer["AuthorizerResultTtlInSeconds"] == 300
    admitted = re.compile(authorizer["IdentityValidationExpression"])
    for header in ("Bearer " + "x" * 16, "bearer  " + "eyJ.-_~+/=" * 400, "BEARER " + "0" * 8192):
        assert admitted.fullmatch(header)
    for header in (
        "",
        "Bearer",
        "Bearer short",
        "Basic " + "x" * 40,
        "x" * 40,
        "Bearer " + "x" * 20 + " y",
        f"Bearer {'x' * 20}\u00e4",
    ):
        assert not admitted.fullmatch(header)
    assert the_one(aws, "AWS::ApiGateway::Resource")["PathPart"] == "{proxy+}"


def test_wildcard_resources_are_only_those_that_aws_requires(aws: Templates) -> None:
    forced = {"cloudwatch:DescribeAlarms", "ec2:", "ecr:GetAuthorizationToken"}
    for name, policy in resources(aws, "AWS::IAM::Policy"):
        for statement in policy["PolicyDocument"]["Statement"]:
            actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
            assert not [action for action in actions if "*" in action], name
            if statement["Resource"] == "*":
                assert all(action.startswith(tuple(forced)) for action in actions), (name, actions)
    assert not [role for _, role in resources(aws, "AWS::IAM::Role") if role.get("ManagedPolicyArns")]


def test_functions_can_be_invoked_only_by_their_own_api_and_schedules(aws: Templates) -> None:
    permissions = [permission for _, permission in resources(aws, "AWS::Lambda::Permission")]
    assert len(permissions) >= 3
    for permission in permissions:
        assert permission["Principal"] in ("apigateway.amazonaws.com", "events.amazonaws.com")
        assert permission["SourceArn"]  # only a specific API or rule


def test_the_forwarder_may_read_only_its_own_bundle(aws: Templates) -> None:
    statements = [
        statement
        for _, policy in resources(aws, "AWS::IAM::Policy")
        for statement in policy["PolicyDocument"]["Statement"]
        if "cdk-hnb659fds-assets" in json.dumps(statement["Resource"])
    ]
    assert [statement["Action"] for statement in statements] == ["s3:GetObject"]
    assert ".zip" in json.dumps(statements[0]["Resource"])


def test_no_secret_is_in_the_templates(aws: Templates) -> None:
    variables = function_of(aws, "authorizer.handle")["Environment"]["Variables"]
    assert variables["FARCALL_AUTH_PROVIDER"] == "globus"
    assert "FARCALL_DEV_TOKENS" not in variables
    # The permission to describe a function shows its environment, so secrets are read at run time.
    assert variables["FARCALL_GLOBUS_SECRET_ARN"] == {"Ref": "GlobusCredentialsArn"}
    for _, function in resources(aws, "AWS::Lambda::Function"):
        assert "{{resolve:" not in json.dumps(function["Environment"])
    assert "{{resolve:secretsmanager:" in json.dumps(the_one(aws, "AWS::RDS::DBInstance")["MasterUserPassword"])


def test_all_cdk_nag_findings_are_suppressed_with_a_reason(assemblies: Path, profile: str) -> None:
    report = json.loads((assemblies / "aws" / profile / "validation-report.json").read_text(encoding="utf-8"))
    (nag,) = (each for each in report["pluginReports"] if each["pluginName"] == "AwsSolutions")
    assert [each["violations"] for each in report["pluginReports"] if each["violations"]] == []
    accepted = nag["suppressedViolations"]
    assert len(accepted) > 10, "cdk-nag did not look"
    for finding in accepted:
        assert len(finding["reason"].split()) >= 10, finding["acknowledgedId"]
        # Next to the construct that it concerns, never on a whole stack.
        assert "/" in finding["acknowledgedAt"], finding["acknowledgedId"]


def test_data_stacks_have_termination_protection(assemblies: Path, profile: str) -> None:
    manifest = json.loads((assemblies / "aws" / profile / "manifest.json").read_text(encoding="utf-8"))
    protected = {
        name
        for name, artifact in manifest["artifacts"].items()
        if artifact.get("properties", {}).get("terminationProtection")
    }
    assert protected == {"farcall-data"}
