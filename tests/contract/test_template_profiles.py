"""Synthesised templates of every profile: resources, settings and names, and a comparison with the last snapshots.

After an intended change, update the snapshots with ``FARCALL_UPDATE_SNAPSHOTS=1``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from farcall_common.database_logins import connection_limit
from farcall_common.store.model import PIECES
from farcall_forwarder.core.policy import Policy
from farcall_infra.bundles import RUNTIME
from farcall_infra.deployment import STACKS, stack_name
from farcall_infra.profiles import Profile, load_profile
from tests.contract.template_text import as_text, differences, summarize
from tests.contract.templates import (
    PROFILES,
    Templates,
    context,
    count_types,
    function_of,
    read_templates,
    resources,
    the_one,
)

_SNAPSHOTS = Path(__file__).parent / "snapshots"
WRITTEN_OUT = "lab"


def test_a_stack_for_each_part(aws: Templates) -> None:
    assert set(aws) == {stack_name("farcall", part) for part in STACKS}


def test_the_only_vpc_endpoint_is_the_free_one(aws: Templates) -> None:
    assert the_one(aws, "AWS::EC2::VPCEndpoint")["VpcEndpointType"] == "Gateway"


def test_a_full_queue_refuses_writes_instead_of_evicting(aws: Templates) -> None:
    assert the_one(aws, "AWS::ElastiCache::ParameterGroup")["Properties"] == {"maxmemory-policy": "noeviction"}


def test_blobs_expire(aws: Templates, size: Profile) -> None:
    rule, pieces = the_one(aws, "AWS::S3::Bucket")["LifecycleConfiguration"]["Rules"]
    assert (pieces["Prefix"], pieces["ExpirationInDays"]) == (PIECES, 1)
    assert rule["ExpirationInDays"] == size.retention.blob_days
    # After the longest wait for a start, and the longest that a task is kept after its end.
    environment = function_of(aws, "api.handle")["Environment"]["Variables"]
    days = [float(environment[name]) for name in ("FARCALL_MAX_WAIT_DAYS", "FARCALL_RETENTION_DAYS")]
    assert rule["ExpirationInDays"] > sum(days)
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}


def test_functions_in_the_vpc_can_reach_aws_without_nat(aws: Templates) -> None:
    assert list(resources(aws, "AWS::EC2::EgressOnlyInternetGateway"))
    for _, function in resources(aws, "AWS::Lambda::Function"):
        if "VpcConfig" in function:
            assert function["VpcConfig"]["Ipv6AllowedForDualStack"] is True
            assert function["Environment"]["Variables"]["AWS_USE_DUALSTACK_ENDPOINT"] == "true"


def test_functions_are_arm64_on_one_python(aws: Templates) -> None:
    for _, function in resources(aws, "AWS::Lambda::Function"):
        assert function["Architectures"] == ["arm64"]
        assert function["Runtime"] == "python3.14"


def test_gateway_responses_have_the_apis_error_format(aws: Templates) -> None:
    answers = {r["ResponseType"]: r for _, r in resources(aws, "AWS::ApiGateway::GatewayResponse")}
    # The defaults are for all that have no response of their own.
    assert {"UNAUTHORIZED", "ACCESS_DENIED", "THROTTLED", "DEFAULT_4XX", "DEFAULT_5XX"} <= set(answers)
    # Without these, the default's status would be that of another error.
    assert {"REQUEST_TOO_LARGE": "413", "WAF_FILTERED": "403"}.items() <= {
        kind: answer["StatusCode"] for kind, answer in answers.items()
    }.items()
    assert "USER_NOT_ALLOWED" in answers["ACCESS_DENIED"]["ResponseTemplates"]["application/json"]
    for answer in answers.values():
        template = answer["ResponseTemplates"]["application/json"]
        body = json.loads(
            template.replace("$context.error.messageString", '"why"').replace("$context.authorizer.refusal", "why")
        )
        assert body["status"] == "Failed"
        assert body["reason"] == body["message"] == "why"
        assert body["http_status_code"] == int(answer["StatusCode"])


def test_the_gateways_own_address_has_no_old_tls(aws: Templates) -> None:
    api = the_one(aws, "AWS::ApiGateway::RestApi")
    assert api["SecurityPolicy"] == "SecurityPolicy_TLS13_1_2_PFS_PQ_2025_09"
    assert api["EndpointAccessMode"] == "BASIC"


def test_the_forwarders_are_arm64_tasks_with_addresses(aws: Templates, size: Profile) -> None:
    task = the_one(aws, "AWS::ECS::TaskDefinition")
    assert task["RuntimePlatform"]["CpuArchitecture"] == "ARM64"
    (container,) = task["ContainerDefinitions"]
    assert container["Command"] == ["python", "-m", "farcall_forwarder"]
    assert container["StopTimeout"] == 120
    environment = {variable["Name"]: variable["Value"] for variable in container["Environment"]}
    assert environment["AWS_DEFAULT_REGION"] == environment["AWS_REGION"] == {"Ref": "AWS::Region"}
    service = the_one(aws, "AWS::ECS::Service")
    assert service["DesiredCount"] == size.forwarder.tasks
    assert service["NetworkConfiguration"]["AwsvpcConfiguration"]["AssignPublicIp"] == "ENABLED"
    assert service["DeploymentConfiguration"]["MinimumHealthyPercent"] == 100
    assert container["HealthCheck"]["StartPeriod"] == 120
    assert service.get("HealthCheckGracePeriodSeconds", 120) == 120  # ECS accepts it only with a load balancer
    assert ("LoadBalancers" in service) == ("HealthCheckGracePeriodSeconds" in service)


def test_only_spot_tasks_may_be_interrupted(aws: Templates, size: Profile) -> None:
    service = the_one(aws, "AWS::ECS::Service")
    provider = "FARGATE_SPOT" if size.forwarder.spot else "FARGATE"
    assert service["CapacityProviderStrategy"] == [{"CapacityProvider": provider, "Weight": 1}]
    assert provider in the_one(aws, "AWS::ECS::Cluster")["CapacityProviders"]
    assert "LaunchType" not in service  # its change would replace the service, so profiles could not be changed


def test_a_load_balancer_has_fixed_addresses_and_one_key_behind_it(aws: Templates, size: Profile) -> None:
    balancers = list(resources(aws, "AWS::ElasticLoadBalancingV2::LoadBalancer"))
    (container,) = the_one(aws, "AWS::ECS::TaskDefinition")["ContainerDefinitions"]
    given = {secret["Name"] for secret in container.get("Secrets", [])}
    environment = {variable["Name"] for variable in container["Environment"]}
    assert len(balancers) == (1 if size.network.load_balancer else 0)
    if not balancers:
        assert not list(resources(aws, "AWS::EC2::EIP"))
        assert "FARCALL_FORWARDER_KEY_SEED" not in given
        return
    zones = len({json.dumps(s["AvailabilityZone"]) for _, s in resources(aws, "AWS::EC2::Subnet")})
    assert len(list(resources(aws, "AWS::EC2::EIP"))) == len(balancers[0][1]["SubnetMappings"]) == zones
    assert "FARCALL_FORWARDER_KEY_SEED" in given
    assert "FARCALL_FORWARDER_ADVERTISE" in environment
    # Peers reach the tasks only through the load balancer.
    open_groups = [
        group["GroupDescription"]
        for _, group in resources(aws, "AWS::EC2::SecurityGroup")
        if group.get("SecurityGroupIngress")
    ]
    assert open_groups == ["The load balancer before the forwarder"]


def test_a_load_balancer_ends_no_connection_and_keeps_addresses(synthesized: Callable[[str, str], Templates]) -> None:
    facility, size = synthesized("aws", "facility"), load_profile("facility").forwarder
    group = the_one(facility, "AWS::ElasticLoadBalancingV2::TargetGroup")
    assert (group["HealthCheckPath"], group["HealthCheckPort"]) == ("/readyz", str(size.health_port))
    attributes = {each["Key"]: each["Value"] for each in group["TargetGroupAttributes"]}
    # With AWS's defaults, a moment without health cuts all peers; after deregistration they are cut before SIGTERM.
    assert attributes.pop("target_health_state.unhealthy.connection_termination.enabled") == "false"
    assert attributes.pop("deregistration_delay.connection_termination.enabled") == "false"
    assert 5 <= int(attributes.pop("deregistration_delay.timeout_seconds")) <= 10
    assert attributes.pop("preserve_client_ip.enabled") == "true"
    assert attributes.pop("stickiness.enabled", "false") == "false"
    assert not attributes
    (container,) = the_one(facility, "AWS::ECS::TaskDefinition")["ContainerDefinitions"]
    environment = {variable["Name"]: variable["Value"] for variable in container["Environment"]}
    longest_redirects_s = size.connections / Policy.redirects_per_s + Policy.redirect_spread_s + Policy.drain_grace_s
    assert longest_redirects_s < int(environment["FARCALL_FORWARDER_DRAIN_S"]) < container["StopTimeout"] <= 120


def test_ecs_replaces_a_forwarder_only_if_its_process_hangs(aws: Templates, size: Profile) -> None:
    """`/healthz` depends on the stores, whose outage would make ECS replace all forwarders."""
    (container,) = the_one(aws, "AWS::ECS::TaskDefinition")["ContainerDefinitions"]
    *program, source = container["HealthCheck"]["Command"]
    assert program == ["CMD", "python", "-I", "-S", "-c"]
    assert source == (RUNTIME / "fargate_health.py").read_text(encoding="utf-8")
    environment = {variable["Name"]: variable["Value"] for variable in container["Environment"]}
    assert environment["FARCALL_FORWARDER_HEALTH_PORT"] == str(size.forwarder.health_port)


def test_a_facility_survives_the_loss_of_a_zone(synthesized: Callable[[str, str], Templates]) -> None:
    facility = synthesized("aws", "facility")
    assert the_one(facility, "AWS::RDS::DBInstance")["MultiAZ"] is True
    queue = the_one(facility, "AWS::ElastiCache::ReplicationGroup")
    assert (queue["MultiAZEnabled"], queue["AutomaticFailoverEnabled"], queue["NumCacheClusters"]) == (True, True, 2)
    assert the_one(facility, "AWS::ECS::Service")["DesiredCount"] >= 2


def test_forwarders_start_after_their_permissions_exist(aws: Templates) -> None:
    """Permissions of the task and of ECS, which pulls, logs and reads the secrets: without them the first tasks
    fail."""
    stack = aws["farcall-forwarder"]["Resources"]
    (service,) = (each for each in stack.values() if each["Type"] == "AWS::ECS::Service")
    policies = {name for name, each in stack.items() if each["Type"] == "AWS::IAM::Policy"}
    assert len(policies) == 2
    assert policies <= set(service["DependsOn"])


def test_the_profiles_limits_are_passed_to_functions_and_forwarders(aws: Templates, size: Profile) -> None:
    for handler in ("api.handle", "reconciler.handle"):
        environment = function_of(aws, handler)["Environment"]["Variables"]
        assert {name: environment[name] for name in size.limits.environment()} == size.limits.environment()
        assert int(environment["FARCALL_DATABASE_BYTES"]) == size.database.max_storage_gib * 2**30
    (container,) = the_one(aws, "AWS::ECS::TaskDefinition")["ContainerDefinitions"]
    forwarder = {variable["Name"]: variable["Value"] for variable in container["Environment"]}
    assert {"FARCALL_MAX_RELAY_BYTES", "FARCALL_MAX_STORED_BYTES_PER_DAY"} <= set(forwarder)
    assert forwarder["FARCALL_MAX_STORED_BYTES_PER_DAY"] == environment["FARCALL_MAX_STORED_BYTES_PER_DAY"]
    assert forwarder["FARCALL_MAX_RELAY_BYTES"] == str(size.limits.max_relay_bytes)
    stage = the_one(aws, "AWS::ApiGateway::Stage")["MethodSettings"][0]
    assert 4 * size.limits.rate_per_s <= stage["ThrottlingRateLimit"]
    assert 4 * size.limits.rate_burst <= stage["ThrottlingBurstLimit"]


def test_the_disk_grows_automatically_and_extended_support_is_off(aws: Templates, size: Profile) -> None:
    database = the_one(aws, "AWS::RDS::DBInstance")
    assert database["MaxAllocatedStorage"] == size.database.max_storage_gib >= 5 * int(database["AllocatedStorage"])
    assert database["EngineLifecycleSupport"] == "open-source-rds-extended-support-disabled"
    assert (database["EngineVersion"], database["AllowMajorVersionUpgrade"]) == ("17", False)
    assert the_one(aws, "AWS::RDS::DBParameterGroup")["Family"] == "postgres17"


def test_disk_growth_and_version_can_be_fixed(synthesized: Callable[[str, str], Templates]) -> None:
    database = the_one(synthesized("options", "parked"), "AWS::RDS::DBInstance")
    assert "MaxAllocatedStorage" not in database
    assert (database["EngineVersion"], database["AllowMajorVersionUpgrade"]) == ("16", True)


def test_budget_and_reservation_are_optional(synthesized: Callable[[str, str], Templates]) -> None:
    parked = synthesized("options", "parked")
    assert not list(resources(parked, "AWS::Budgets::Budget"))
    assert _reserved(parked) == {}


def test_the_api_leaves_database_connections_for_other_programs(aws: Templates, size: Profile) -> None:
    assert _reserved(aws) == {
        "farcall_lambdas.handlers.api.handle": size.api.concurrency,
        "farcall_lambdas.handlers.authorizer.handle": size.api.authorizer_concurrency,
        "farcall_lambdas.handlers.reconciler.handle": 1,
    }
    limit = int(the_one(aws, "AWS::RDS::DBParameterGroup")["Parameters"]["max_connections"])
    assert 1.5 * size.api.concurrency <= connection_limit("farcall_api", limit)
    rounds = [
        each for _, each in resources(aws, "AWS::Lambda::EventInvokeConfig") if "MaximumEventAgeInSeconds" in each
    ]
    assert [each["MaximumEventAgeInSeconds"] for each in rounds] == [60]


def test_forwarders_of_a_rolling_deployment_fit_into_their_share_of_the_connections(aws: Templates) -> None:
    limit = int(the_one(aws, "AWS::RDS::DBParameterGroup")["Parameters"]["max_connections"])
    (container,) = the_one(aws, "AWS::ECS::TaskDefinition")["ContainerDefinitions"]
    variables = {variable["Name"]: variable["Value"] for variable in container["Environment"]}
    service = the_one(aws, "AWS::ECS::Service")
    most = service["DesiredCount"] * service["DeploymentConfiguration"]["MaximumPercent"] // 100
    needed = most * int(variables["FARCALL_FORWARDER_DATABASE_CONNECTIONS"])
    assert 0 < needed <= connection_limit("farcall_forwarder", limit)


def test_the_database_ends_connections_of_ended_functions_within_a_minute(aws: Templates) -> None:
    wanted = the_one(aws, "AWS::RDS::DBParameterGroup")["Parameters"]
    idle, interval, count = (int(wanted[f"tcp_keepalives_{name}"]) for name in ("idle", "interval", "count"))
    assert idle + interval * count <= 60


def _reserved(templates: Templates) -> dict[str, int]:
    return {
        function["Handler"]: function["ReservedConcurrentExecutions"]
        for _, function in resources(templates, "AWS::Lambda::Function")
        if "ReservedConcurrentExecutions" in function
    }


def test_an_account_with_too_little_concurrency_reserves_none(synthesized: Callable[[str, str], Templates]) -> None:
    assert _reserved(synthesized("options", "own-image")) == {}  # 176 are wanted, 170 free


def test_a_forwarder_admits_as_many_connections_as_its_memory_holds(aws: Templates, size: Profile) -> None:
    """83 KiB each were measured, and the process itself has some 90 MiB."""
    task = the_one(aws, "AWS::ECS::TaskDefinition")
    (container,) = task["ContainerDefinitions"]
    environment = {variable["Name"]: variable["Value"] for variable in container["Environment"]}
    connections = int(environment["FARCALL_FORWARDER_CONNECTIONS"])
    assert 90 + connections * 83 / 1024 < 0.95 * int(task["Memory"])
    assert connections >= 4000
    # The forwarder sees the addresses of peers in every profile, so its limits by address are the same.
    assert "FARCALL_FORWARDER_CONNECTIONS_PER_SOURCE" not in environment


def test_cloudformation_waits_longer_for_a_migration_than_lambda(aws: Templates) -> None:
    timeout_s = function_of(aws, "migration_resource.handle")["Timeout"]
    assert 600 < timeout_s < int(the_one(aws, "Custom::FarcallMigration")["ServiceTimeout"]) == 900  # Lambda's limit


def test_the_migration_runs_again_after_a_change_of_roles_or_limits(aws: Templates, size: Profile) -> None:
    resource = the_one(aws, "Custom::FarcallMigration")
    environment = function_of(aws, "migration_resource.handle")["Environment"]["Variables"]
    assert resource["Roles"] == environment["FARCALL_DATABASE_ROLE_SECRET_ARNS"]
    assert resource["Connections"] == str(size.database.connections) == environment["FARCALL_DATABASE_CONNECTIONS"]


def test_scheduled_functions_are_not_retried(aws: Templates, size: Profile) -> None:
    api = aws["farcall-api"]["Resources"]
    once = {
        api[each["FunctionName"]["Ref"]]["Properties"]["Handler"]
        for _, each in resources(aws, "AWS::Lambda::EventInvokeConfig")
        if each["MaximumRetryAttempts"] == 0
    }
    canary = {"farcall_lambdas.handlers.canary.handle"} if size.canary.minutes else set()
    assert once == {"farcall_lambdas.handlers.reconciler.handle", "migration_resource.handle"} | canary


def test_a_deployment_may_name_its_zones(synthesized: Callable[[str, str], Templates]) -> None:
    subnets = [subnet for _, subnet in resources(synthesized("options", "restored"), "AWS::EC2::Subnet")]
    assert sorted(subnet["AvailabilityZone"] for subnet in subnets) == ["us-east-1b"] * 2 + ["us-east-1c"] * 2


def test_secrets_manager_can_have_a_vpc_endpoint(synthesized: Callable[[str, str], Templates]) -> None:
    network = synthesized("options", "parked")
    (endpoint,) = (each for _, each in resources(network, "AWS::EC2::VPCEndpoint") if "PrivateDnsEnabled" in each)
    assert (endpoint["VpcEndpointType"], endpoint["PrivateDnsEnabled"], len(endpoint["SubnetIds"])) == (
        "Interface",
        True,
        2,
    )
    assert endpoint["ServiceName"]["Fn::Join"][1][-1] == ".secretsmanager"
    (group,) = (each["Fn::GetAtt"][0] for each in endpoint["SecurityGroupIds"])
    let_in = [
        rule["SourceSecurityGroupId"]["Fn::GetAtt"][0]
        for _, rule in resources(network, "AWS::EC2::SecurityGroupIngress")
        if rule["GroupId"] == {"Fn::GetAtt": [group, "GroupId"]} and rule["FromPort"] == rule["ToPort"] == 443
    ]
    # Its DNS name is valid in the whole network, so the forwarder uses it too.
    assert [re.sub(r"[0-9A-F]{8}$", "", name) for name in let_in] == ["NetworkFunctions", "NetworkForwarder"]


def test_a_queue_gets_its_second_node_before_fail_over(synthesized: Callable[[str, str], Templates]) -> None:
    """CloudFormation refuses both in one update: growing takes two updates (docs/operations/upgrades.md)."""
    queue = the_one(synthesized("options", "own-image"), "AWS::ElastiCache::ReplicationGroup")
    assert (queue["NumCacheClusters"], queue["AutomaticFailoverEnabled"], queue["MultiAZEnabled"]) == (2, False, False)


def test_larger_profiles_keep_the_exports_of_smaller_ones(synthesized: Callable[[str, str], Templates]) -> None:
    """An export cannot be removed while another stack uses it, and the exporting stack is updated first.

    A larger profile therefore has all exports of the smaller ones. docs/operations/upgrades.md describes the way back.
    """
    exports = [
        {
            output["Export"]["Name"]
            for template in synthesized("aws", profile).values()
            for output in template.get("Outputs", {}).values()
            if "Export" in output
        }
        for profile in PROFILES
    ]
    assert exports[0] <= exports[1] <= exports[2]


def test_templates_are_ascii(aws: Templates) -> None:
    """EC2 refuses other characters in descriptions, and CloudFormation returns them as question marks, which the CDK
    regards as a change in every deployment. This includes the boot program."""
    for name, template in aws.items():
        assert json.dumps(template, ensure_ascii=False).isascii(), name


def test_data_resources_survive_a_replacement(aws: Templates) -> None:
    for template in aws.values():
        for name, each in template["Resources"].items():
            if each["Type"] in ("AWS::RDS::DBInstance", "AWS::S3::Bucket", "AWS::ElastiCache::ReplicationGroup"):
                assert each["UpdateReplacePolicy"] == each["DeletionPolicy"], name


def test_the_migration_runs_before_programs_that_use_the_schema(aws: Templates) -> None:
    resources = aws["farcall-api"]["Resources"]
    (migration,) = (name for name, r in resources.items() if r["Type"] == "Custom::FarcallMigration")
    for handler in ("api.handle", "reconciler.handle"):
        (function,) = (r for r in resources.values() if r.get("Properties", {}).get("Handler", "").endswith(handler))
        assert migration in function["DependsOn"]


def test_logs_are_kept_for_as_long_as_the_profile_says(aws: Templates, size: Profile) -> None:
    groups = list(resources(aws, "AWS::Logs::LogGroup"))
    assert len(groups) == 5 + bool(size.canary.minutes)
    assert {group["RetentionInDays"] for _, group in groups} == {size.retention.log_days}


def test_the_offline_tier_differs_only_where_it_must(aws: Templates, localstack: Templates, size: Profile) -> None:
    """Types may be missing (docs/adr/0010 has the list), none may be added, and databases, queues and tasks are the
    same."""
    only_aws = {
        "AWS::CodeDeploy::Application",
        "AWS::CodeDeploy::DeploymentGroup",
        "AWS::EC2::EgressOnlyInternetGateway",
        "AWS::EC2::VPCCidrBlock",
    }
    aws = {name: template for name, template in aws.items() if name != "farcall-observability"}
    assert set(localstack) == set(aws)
    counts = {name: count_types(localstack[name]) for name in aws}
    expected = {
        name: {kind: number for kind, number in count_types(aws[name]).items() if kind not in only_aws} for name in aws
    }
    expected["farcall-network"]["AWS::EC2::Route"] = 2
    for kind in ("AWS::IAM::Policy", "AWS::IAM::Role"):  # of CodeDeploy
        expected["farcall-api"][kind] -= size.api.gradual
    assert counts == expected
    assert the_one(localstack, "AWS::ElastiCache::ReplicationGroup")["TransitEncryptionEnabled"] is False
    assert localstack["farcall-api"]["Parameters"]["DevTokens"]["NoEcho"] is True


def test_a_deployment_can_be_restored_from_a_snapshot(synthesized: Callable[[str, str], Templates]) -> None:
    database = the_one(synthesized("options", "restored"), "AWS::RDS::DBInstance")
    assert database["DBSnapshotIdentifier"] == "farcall-data-snapshot-1"
    assert "DBName" not in database  # the snapshot has it
    assert "MasterUsername" not in database
    assert "{{resolve:secretsmanager:" in json.dumps(database["MasterUserPassword"])
    assert database["DeletionProtection"] is True


def test_functions_may_scale_forwarders_that_sleep_and_nothing_else(aws: Templates, size: Profile) -> None:
    environment = {
        function["Handler"].split(".")[-2]: {
            name: value for name, value in function["Environment"]["Variables"].items() if "_FLEET_" in name
        }
        for _, function in resources(aws, "AWS::Lambda::Function")
        if "Environment" in function
    }
    expected = {
        "FARCALL_FLEET_CLUSTER": the_one(aws, "AWS::ECS::Cluster")["ClusterName"],
        "FARCALL_FLEET_SERVICE": the_one(aws, "AWS::ECS::Service")["ServiceName"],
        "FARCALL_FLEET_TASKS": str(size.forwarder.tasks),
        "FARCALL_FLEET_IDLE_S": str(60 * size.forwarder.idle_minutes),
        "FARCALL_FLEET_SPOT": "true" if size.forwarder.spot else "",
    }
    assert environment["api"] == environment["reconciler"] == (expected if size.forwarder.sleeps else {})
    assert not environment["authorizer"]
    rights = [
        statement
        for _, policy in resources(aws, "AWS::IAM::Policy")
        for statement in policy["PolicyDocument"]["Statement"]
        if "ecs:" in json.dumps(statement["Action"])
    ]
    assert len(rights) == (2 if size.forwarder.sleeps else 0)
    for right in rights:
        assert right["Action"] == "ecs:UpdateService"
        assert right["Resource"]["Fn::Join"][1][-1] == ":service/farcall/forwarder"


def test_an_own_image_contains_the_code(synthesized: Callable[[str, str], Templates]) -> None:
    templates = synthesized("options", "own-image")
    (container,) = the_one(templates, "AWS::ECS::TaskDefinition")["ContainerDefinitions"]
    assert container["Command"] == ["python", "-m", "farcall_forwarder"]
    assert not [variable for variable in container["Environment"] if "BUNDLE" in variable["Name"]]
    assert f"/farcall-forwarder@sha256:{'0' * 64}" in json.dumps(container["Image"])
    pull = [
        statement["Resource"]
        for _, policy in resources(templates, "AWS::IAM::Policy")
        for statement in policy["PolicyDocument"]["Statement"]
        if "ecr:BatchGetImage" in statement["Action"]
    ]
    assert len(pull) == 1
    assert "123456789012:repository/farcall-forwarder" in json.dumps(pull)


def test_a_synth_depends_only_on_the_sources(synthesized: Callable[[str, str], Templates], tmp_path: Path) -> None:
    """No account, no region, no programs on the path, no home, another directory: the same templates."""
    variables = {
        "CDK_OUTDIR": str(tmp_path / "out"),
        "CDK_CONTEXT_JSON": json.dumps(context(profile="lab")),
        "CDK_VALIDATION": "false",
        "HOME": str(tmp_path),
        "PATH": "",
    }
    subprocess.run([sys.executable, "-m", "farcall_infra"], check=True, env=variables, cwd=tmp_path)
    assert read_templates(tmp_path / "out") == synthesized("aws", "lab")


def test_two_deployments_fit_into_one_account(synthesized: Callable[[str, str], Templates]) -> None:
    """Every name that is unique in an account or region starts with the deployment's name."""
    named = {
        (name, key): value
        for template in synthesized("aws", "facility").values()
        for name, resource in template["Resources"].items()
        if resource["Type"] not in ("AWS::ApiGateway::Authorizer", "AWS::Lambda::Alias")  # within API and function
        for key, value in resource.get("Properties", {}).items()
        if key.endswith("Name") and key not in _NAMES_IN_A_SCOPE and isinstance(value, str)
    }
    assert {key: value for key, value in named.items() if not re.match(r"farcall(-|$)", value)} == {}


#: Names that are unique in an account or in the world, and not in a region: a second region's deployment has others.
_GLOBAL_NAMES = {
    "AWS::Budgets::Budget": ("Budget", "BudgetName"),
    "AWS::CloudFront::CachePolicy": ("CachePolicyConfig", "Name"),
    "AWS::CloudFront::Function": ("Name",),
    "AWS::CloudWatch::Dashboard": ("DashboardName",),
    "AWS::IAM::Group": ("GroupName",),
    "AWS::IAM::InstanceProfile": ("InstanceProfileName",),
    "AWS::IAM::ManagedPolicy": ("ManagedPolicyName",),
    "AWS::IAM::Role": ("RoleName",),
    "AWS::IAM::User": ("UserName",),
    "AWS::S3::Bucket": ("BucketName",),
}


def test_a_deployment_of_the_same_name_fits_into_another_region(
    synthesized: Callable[[str, str], Templates],
) -> None:
    """Every name that is unique in an account contains the region, or CloudFormation chooses it."""
    named = dict[str, str]()
    for template in synthesized("aws", "facility").values():
        for name, resource in template["Resources"].items():
            value: Any = resource.get("Properties", {}) if resource["Type"] in _GLOBAL_NAMES else None
            for key in _GLOBAL_NAMES.get(resource["Type"], ()):
                value = value and value.get(key)
            if value:
                named[name] = json.dumps(value)
    assert len(named) == 2  # of the dashboard and the budget
    assert {name for name, value in named.items() if '{"Ref": "AWS::Region"}' not in value} == set()


# Names within something that has a unique one, and names of what AWS made.
_NAMES_IN_A_SCOPE = {
    "DBName",
    "DeploymentConfigName",
    "DisplayName",
    "MetricName",
    "PolicyName",
    "ServiceName",
    "StageName",
}


def test_the_templates_match_their_snapshots(
    synthesized: Callable[[str, str], Templates], aws: Templates, profile: str
) -> None:
    """One profile is written out; of the others there is what differs from it."""
    if profile == WRITTEN_OUT:
        snapshot, current = _SNAPSHOTS / f"{profile}.txt", as_text(summarize(aws))
    else:
        base = summarize(synthesized("aws", WRITTEN_OUT))
        snapshot, current = _SNAPSHOTS / f"{profile}.diff", differences(base, summarize(aws))
    if os.environ.get("FARCALL_UPDATE_SNAPSHOTS"):
        snapshot.write_text(current, encoding="utf-8")
    assert current.splitlines() == snapshot.read_text(encoding="utf-8").splitlines()
