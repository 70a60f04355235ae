"""The AWS client of ``farcall cloud``, over boto3's real clients with botocore's Stubber, which refuses requests and
answers that AWS's own service models do not allow."""

from __future__ import annotations

import dataclasses
import datetime as dt
import io
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from botocore.exceptions import (
    ConfigParseError,
    CredentialRetrievalError,
    EndpointConnectionError,
    LoginRefreshRequired,
    NoCredentialsError,
    UnauthorizedSSOTokenError,
)
from botocore.stub import Stubber

from farcall_common.errors import ConfigurationError, FarcallError, Unavailable
from farcall_infra.cloud.account import Caller, Database, LeftBehind, Metric, Queue, Resource, Sample, Tasks
from farcall_infra.cloud.aws import Aws, connect
from farcall_infra.cloud.errors import AwsRefused, CredentialsMissing, DeploymentFailed

SECRET = "arn:aws:secretsmanager:eu-central-1:123456789012:secret:login-AbCdEf"
Stub = Callable[[str], Stubber]


class _Account:
    """Stubbed clients, one for each service, created on first use."""

    def __init__(self) -> None:
        self._session = boto3.Session(
            aws_access_key_id="test", aws_secret_access_key="test", region_name="eu-central-1"
        )
        self._clients: dict[str, Any] = {}
        self._stubbers: dict[str, Stubber] = {}
        self.aws = Aws(self.client, region="eu-central-1")

    def client(self, service: str) -> Any:
        if service not in self._clients:
            self._clients[service] = self._session.client(service)  # type: ignore[call-overload]
            self._stubbers[service] = Stubber(self._clients[service])
            self._stubbers[service].activate()
        return self._clients[service]

    def stub(self, service: str) -> Stubber:
        self.client(service)
        return self._stubbers[service]

    def check(self) -> None:
        for stubber in self._stubbers.values():
            stubber.assert_no_pending_responses()


@pytest.fixture
def account() -> Iterator[_Account]:
    made = _Account()
    yield made
    made.check()


def test_the_caller_is_read(account: _Account) -> None:
    answer = {"Account": "123456789012", "Arn": "arn:aws:iam::123456789012:user/ada", "UserId": "AIDA"}
    account.stub("sts").add_response("get_caller_identity", answer, {})
    assert account.aws.caller() == Caller("123456789012", "arn:aws:iam::123456789012:user/ada")


def test_the_bootstrap_version_is_read_or_missing(account: _Account) -> None:
    ssm = account.stub("ssm")
    asked = {"Name": "/cdk-bootstrap/hnb659fds/version"}
    ssm.add_response("get_parameter", {"Parameter": {"Name": asked["Name"], "Value": "30"}}, asked)
    ssm.add_client_error("get_parameter", "ParameterNotFound", expected_params=asked)
    assert account.aws.bootstrap_version() == 30
    assert account.aws.bootstrap_version() is None


def test_quotas_and_counts(account: _Account) -> None:
    quotas = account.stub("service-quotas")
    asked = {"ServiceCode": "fargate", "QuotaCode": "L-3032A538"}
    quotas.add_response("get_service_quota", {"Quota": {**asked, "Value": 6.0}}, asked)
    quotas.add_client_error("get_service_quota", "NoSuchResourceException", expected_params=asked)
    quotas.add_response("get_aws_default_service_quota", {"Quota": {**asked, "Value": 5.0}}, asked)
    quotas.add_client_error("get_service_quota", "NoSuchResourceException", expected_params=asked)
    quotas.add_client_error("get_aws_default_service_quota", "NoSuchResourceException", expected_params=asked)
    account.stub("lambda").add_response("get_account_settings", {"AccountLimit": {"ConcurrentExecutions": 10}}, {})
    ec2 = account.stub("ec2")
    ec2.add_response("describe_vpcs", {"Vpcs": [{"VpcId": "vpc-1"}], "NextToken": "more"}, {})
    ec2.add_response("describe_vpcs", {"Vpcs": [{"VpcId": "vpc-2"}]}, {"NextToken": "more"})
    ec2.add_response("describe_addresses", {"Addresses": [{"PublicIp": "192.0.2.1"}]}, {})
    assert account.aws.quota("fargate", "L-3032A538") == 6.0
    assert account.aws.quota("fargate", "L-3032A538") == 5.0
    assert account.aws.quota("fargate", "L-3032A538") is None
    assert account.aws.function_concurrency() == 10
    assert account.aws.count_vpcs() == 2
    assert account.aws.count_addresses() == 1


def test_offers_of_the_region(account: _Account) -> None:
    cloudformation, rds = account.stub("cloudformation"), account.stub("rds")
    cloudformation.add_response("describe_type", {}, {"Type": "RESOURCE", "TypeName": "AWS::Budgets::Budget"})
    cloudformation.add_client_error("describe_type", "TypeNotFoundException")
    assert account.aws.has_type("AWS::Budgets::Budget")
    assert not account.aws.has_type("AWS::Budgets::Budget")

    def offer(version: str, **properties: Any) -> dict[str, Any]:
        suitable = {"StorageType": "gp3", "SupportsStorageEncryption": True, "MultiAZCapable": True}
        return {"EngineVersion": version, **suitable, **properties}

    asked = {"Engine": "postgres", "DBInstanceClass": "db.t4g.micro", "Vpc": True}
    first = [offer("17.6"), offer("17.6", StorageType="io1"), offer("14.1", StorageType="gp2")]
    second = [offer("16.4", MultiAZCapable=False), offer("13.1", SupportsStorageEncryption=False)]
    for _ in range(2):
        rds.add_response(
            "describe_orderable_db_instance_options", {"OrderableDBInstanceOptions": first, "Marker": "more"}, asked
        )
        rds.add_response(
            "describe_orderable_db_instance_options",
            {"OrderableDBInstanceOptions": second},
            {**asked, "Marker": "more"},
        )
    assert account.aws.postgres_versions("db.t4g.micro", multi_az=False) == ["16.4", "17.6"]
    assert account.aws.postgres_versions("db.t4g.micro", multi_az=True) == ["17.6"]

    wanted = {"CacheNodeType": "cache.t4g.micro", "MaxRecords": 20}
    for offers in ([{"CacheNodeType": "cache.t4g.micro"}], []):
        answer = {"ReservedCacheNodesOfferings": offers}
        account.stub("elasticache").add_response("describe_reserved_cache_nodes_offerings", answer, wanted)
    assert account.aws.has_cache_node("cache.t4g.micro")
    assert not account.aws.has_cache_node("cache.t4g.micro")
    zones = {"AvailabilityZones": [{"ZoneName": "eu-central-1a", "ZoneId": "euc1-az2"}]}
    account.stub("ec2").add_response("describe_availability_zones", zones, {})
    assert account.aws.zones() == {"eu-central-1a": "euc1-az2"}


def test_roles_and_secrets_exist_or_not(account: _Account) -> None:
    iam, secrets = account.stub("iam"), account.stub("secretsmanager")
    made = {
        "Path": "/",
        "RoleName": "AWSServiceRoleForECS",
        "RoleId": "AROA1234567890123",
        "Arn": "arn:aws:iam::123456789012:role/x",
        "CreateDate": dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
    }
    iam.add_response("get_role", {"Role": made}, {"RoleName": "AWSServiceRoleForECS"})
    iam.add_client_error("get_role", "NoSuchEntity")
    secrets.add_response("describe_secret", {"ARN": "arn:of:the:secret:globus-AbCdEf"}, {"SecretId": "arn:globus"})
    secrets.add_client_error("describe_secret", "ResourceNotFoundException")
    assert account.aws.has_role("AWSServiceRoleForECS")
    assert not account.aws.has_role("AWSServiceRoleForRDS")
    assert account.aws.secret_arn("arn:globus") == "arn:of:the:secret:globus-AbCdEf"
    assert account.aws.secret_arn("arn:other") is None


@pytest.mark.parametrize(("free", "reservable"), [(1000, 961), (39, 0)])
def test_own_reserved_concurrency_counts_as_reservable(account: _Account, free: int, reservable: int) -> None:
    functions = account.stub("lambda")
    limits = {"AccountLimit": {"ConcurrentExecutions": 1061, "UnreservedConcurrentExecutions": free}}
    functions.add_response("get_account_settings", limits)
    functions.add_response("get_function_concurrency", {"ReservedConcurrentExecutions": 61}, {"FunctionName": "api"})
    functions.add_response("get_function_concurrency", {}, {"FunctionName": "authorizer"})
    assert account.aws.reservable_concurrency(["api", "authorizer"]) == reservable


def test_a_stack_is_read_or_missing(account: _Account) -> None:
    cloudformation = account.stub("cloudformation")
    found = {
        "StackName": "farcall-api",
        "CreationTime": dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        "StackStatus": "UPDATE_COMPLETE",
        "EnableTerminationProtection": True,
        "StackStatusReason": "all is well",
        "LastUpdatedTime": dt.datetime(2026, 2, 1, tzinfo=dt.UTC),
        "Parameters": [{"ParameterKey": "GlobusScope", "ParameterValue": "scope"}],
        "Outputs": [{"OutputKey": "ApiUrl", "OutputValue": "https://api"}],
    }
    cloudformation.add_response("describe_stacks", {"Stacks": [found]}, {"StackName": "farcall-api"})
    message = "Stack with id farcall-data does not exist"
    cloudformation.add_client_error("describe_stacks", "ValidationError", message)
    stack = account.aws.stack("farcall-api")
    assert stack is not None
    assert (stack.status, stack.outputs, stack.is_protected) == ("UPDATE_COMPLETE", {"ApiUrl": "https://api"}, True)
    assert stack.reason == "all is well"
    assert stack.parameters == {"GlobusScope": "scope"}
    assert stack.changed_at == dt.datetime(2026, 2, 1, tzinfo=dt.UTC)
    assert account.aws.stack("farcall-data") is None


def test_resources_tasks_alarms_and_databases(account: _Account) -> None:
    now = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    summary = {"LogicalResourceId": "X", "ResourceType": "AWS::S3::Bucket", "LastUpdatedTimestamp": now}
    summary["ResourceStatus"] = "CREATE_COMPLETE"
    listed = {"StackResourceSummaries": [{**summary, "PhysicalResourceId": "bucket"}, summary]}
    account.stub("cloudformation").add_response("list_stack_resources", listed, {"StackName": "farcall-data"})
    arn = "arn:aws:ecs:eu-central-1:123456789012:service/cluster/forwarder"
    service = {
        "serviceArn": arn,
        "desiredCount": 2,
        "runningCount": 1,
        "tags": [{"key": "farcall:sleeps", "value": "after 15 minutes"}],
        "events": [{"message": "unable to place a task"}, {"message": "an older one"}],
    }
    account.stub("ecs").add_response(
        "describe_services", {"services": [service]}, {"cluster": "cluster", "services": [arn], "include": ["TAGS"]}
    )
    alarms = {"MetricAlarms": [{"AlarmName": "farcall-api-errors", "StateValue": "ALARM"}]}
    account.stub("cloudwatch").add_response(
        "describe_alarms", alarms, {"AlarmNames": ["farcall-api-errors"], "MaxRecords": 100}
    )
    rds = account.stub("rds")
    instance = {
        "DBInstanceStatus": "available",
        "AllocatedStorage": 20,
        "DeletionProtection": True,
        "Engine": "postgres",
        "EngineVersion": "16.9",
    }
    groups = [{"DBParameterGroupName": "ours", "ParameterApplyStatus": "pending-reboot"}]
    for found in (instance, {**instance, "DBParameterGroups": groups}):
        rds.add_response("describe_db_instances", {"DBInstances": [found]}, {"DBInstanceIdentifier": "db"})
    rds.add_client_error("describe_db_instances", "DBInstanceNotFound")
    assert account.aws.resources("farcall-data") == [Resource("AWS::S3::Bucket", "bucket")]
    assert account.aws.tasks(arn) == Tasks(2, running=1, may_sleep=True, last_event="unable to place a task")
    assert account.aws.alarms(["farcall-api-errors"]) == {"farcall-api-errors": "ALARM"}
    database = Database("available", 20, is_protected=True, version="postgres 16.9")
    assert account.aws.database("db") == database
    assert account.aws.database("db") == dataclasses.replace(database, needs_restart=True)
    assert account.aws.database("db") is None


def test_the_queue_is_described(account: _Account) -> None:
    group = {"Status": "available", "MemberClusters": ["group-001", "group-002"]}
    account.stub("elasticache").add_response(
        "describe_replication_groups", {"ReplicationGroups": [group]}, {"ReplicationGroupId": "group"}
    )
    assert account.aws.queue("group") == Queue("available", ("group-001", "group-002"))


def test_the_newest_of_each_metric_is_read(account: _Account) -> None:
    now, at = dt.datetime(2026, 1, 1, 3, tzinfo=dt.UTC), dt.datetime(2026, 1, 1, 2, 59, tzinfo=dt.UTC)
    storage = Metric("AWS/RDS", "FreeStorageSpace", "Minimum", ("DBInstanceIdentifier", "db"))
    silent = Metric("Farcall/farcall", "CanaryTime", "Maximum")
    made = {"Namespace": "AWS/RDS", "MetricName": "FreeStorageSpace"}
    made_2 = {"Namespace": "Farcall/farcall", "MetricName": "CanaryTime", "Dimensions": []}
    dimensions = [{"Name": "DBInstanceIdentifier", "Value": "db"}]
    asked = {
        "MetricDataQueries": [
            {"Id": "m0", "MetricStat": {"Metric": {**made, "Dimensions": dimensions}, "Period": 60, "Stat": "Minimum"}},
            {"Id": "m1", "MetricStat": {"Metric": made_2, "Period": 60, "Stat": "Maximum"}},
        ],
        "StartTime": dt.datetime(2026, 1, 1, 2, tzinfo=dt.UTC),
        "EndTime": now,
        "ScanBy": "TimestampDescending",
    }
    older = dt.datetime(2026, 1, 1, 2, 58, tzinfo=dt.UTC)
    answers = [{"Id": "m1", "Timestamps": [], "Values": []}, {"Id": "m0", "Timestamps": [at, older], "Values": [7, 8]}]
    account.stub("cloudwatch").add_response("get_metric_data", {"MetricDataResults": answers}, asked)
    assert account.aws.newest([storage, silent], now=now, within_s=3600) == {storage: Sample(7, at)}


def test_remaining_backups_are_found_by_their_tag(account: _Account) -> None:
    rds = account.stub("rds")
    ours = {"TagList": [{"Key": "farcall:deployment", "Value": "farcall"}], "AllocatedStorage": 20}
    theirs = {"TagList": [{"Key": "farcall:deployment", "Value": "farcall2"}], "AllocatedStorage": 30}
    snapshots = [{"DBSnapshotIdentifier": "final", **ours}, {"DBSnapshotIdentifier": "other", **theirs}]
    rds.add_response("describe_db_snapshots", {"DBSnapshots": snapshots[:1], "Marker": "2"}, {"SnapshotType": "manual"})
    rds.add_response("describe_db_snapshots", {"DBSnapshots": snapshots[1:]}, {"SnapshotType": "manual", "Marker": "2"})
    backup = {"DBInstanceIdentifier": "db", "DbiResourceId": "db-1", "Status": "retained", **ours}
    answer = {"DBInstanceAutomatedBackups": [backup, {**backup, "Status": "active"}]}
    rds.add_response("describe_db_instance_automated_backups", answer, {})
    assert account.aws.left_behind("farcall") == [
        LeftBehind("snapshot final", 20, "aws rds delete-db-snapshot --db-snapshot-identifier final"),
        LeftBehind(
            "automated backups of db, until they expire",
            20,
            "aws rds delete-db-instance-automated-backup --dbi-resource-id db-1",
        ),
    ]


def test_buckets_are_found_by_their_tag(account: _Account) -> None:
    asked = {
        "TagFilters": [{"Key": "farcall:deployment", "Values": ["farcall"]}],
        "ResourceTypeFilters": ["s3"],
    }
    found = {"ResourceTagMappingList": [{"ResourceARN": "arn:aws:s3:::blobs"}]}
    account.stub("resourcegroupstaggingapi").add_response("get_resources", found, asked)
    assert account.aws.buckets("farcall") == ["blobs"]


def test_a_service_linked_role_is_created(account: _Account) -> None:
    asked = {"AWSServiceName": "rds.amazonaws.com"}
    account.stub("iam").add_response("create_service_linked_role", {}, asked)
    account.stub("iam").add_client_error("create_service_linked_role", "InvalidInput", expected_params=asked)
    account.aws.make_service_role("rds.amazonaws.com")
    account.aws.make_service_role("rds.amazonaws.com")


def test_protections_are_turned_off(account: _Account) -> None:
    asked = {"DBInstanceIdentifier": "db", "DeletionProtection": False, "ApplyImmediately": True}
    account.stub("rds").add_response("modify_db_instance", {}, asked)
    account.stub("cloudformation").add_response(
        "update_termination_protection", {}, {"StackName": "farcall-data", "EnableTerminationProtection": False}
    )
    account.aws.unprotect_database("db")
    account.aws.unprotect_stack("farcall-data")


def _described(status: str) -> dict[str, Any]:
    created = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    return {"Stacks": [{"StackName": "farcall-api", "CreationTime": created, "StackStatus": status}]}


def test_a_function_is_invoked_and_its_failure_is_an_error(account: _Account) -> None:
    stub = account.stub("lambda")
    sent = {"FunctionName": "keeper", "Payload": b'{"action": "start"}'}
    stub.add_response("invoke", {"Payload": io.BytesIO(b'{"status": "creating"}')}, sent)
    failed = {"FunctionError": "Unhandled", "Payload": io.BytesIO(b'{"errorMessage": "ElastiCache refuses"}')}
    stub.add_response("invoke", failed, sent)
    assert account.aws.invoke("keeper", {"action": "start"}) == {"status": "creating"}
    with pytest.raises(Unavailable, match="keeper failed: ElastiCache refuses"):
        account.aws.invoke("keeper", {"action": "start"})


def test_a_value_of_a_secret_is_added_and_then_made_the_current_one(account: _Account) -> None:
    stub, secret = account.stub("secretsmanager"), {"SecretId": SECRET}
    old, new = "1" * 32, "2" * 32
    stub.add_response(
        "get_secret_value",
        {"SecretString": '{"username": "farcall_api"}', "VersionId": old},
        {**secret, "VersionStage": "AWSCURRENT"},
    )
    added = {**secret, "SecretString": '{"username": "farcall_api_b"}', "VersionStages": ["AWSPENDING"]}
    stub.add_response("put_secret_value", {"VersionId": new}, added)
    moved = {**secret, "VersionStage": "AWSCURRENT", "MoveToVersionId": new, "RemoveFromVersionId": old}
    stub.add_response("update_secret_version_stage", {}, moved)
    assert account.aws.secret_value(SECRET) == ({"username": "farcall_api"}, old)
    assert account.aws.add_pending_value(SECRET, {"username": "farcall_api_b"}) == new
    account.aws.make_current(SECRET, new, instead_of=old)


def test_deleting_a_cache_waits_for_its_end(account: _Account) -> None:
    stub, named = account.stub("elasticache"), {"ServerlessCacheName": "farcall-exchange"}
    cache = {**named, "Status": "deleting"}
    stub.add_response("delete_serverless_cache", {"ServerlessCache": cache}, named)
    stub.add_response("describe_serverless_caches", {"ServerlessCaches": [cache]}, named)
    stub.add_client_error("describe_serverless_caches", "ServerlessCacheNotFoundFault", expected_params=named)
    account.aws.delete_cache("farcall-exchange", poll_s=0)
    stub.add_client_error("delete_serverless_cache", "InvalidServerlessCacheStateFault")
    stub.add_response("describe_serverless_caches", {"ServerlessCaches": [cache]}, named)
    stub.add_response("describe_serverless_caches", {"ServerlessCaches": [cache]}, named)
    with pytest.raises(DeploymentFailed, match="still there"):
        account.aws.delete_cache("farcall-exchange", poll_s=0, timeout_s=-1)
    assert account.aws.has_cache("farcall-exchange")


def test_deleting_a_stack_waits_for_its_end(account: _Account) -> None:
    cloudformation = account.stub("cloudformation")
    cloudformation.add_response("delete_stack", {}, {"StackName": "farcall-api"})
    cloudformation.add_response("describe_stacks", _described("DELETE_IN_PROGRESS"))
    cloudformation.add_response("describe_stacks", _described("DELETE_COMPLETE"))
    account.aws.delete_stack("farcall-api", poll_s=0)


def test_a_stack_that_cannot_be_deleted_has_a_reason(account: _Account) -> None:
    cloudformation = account.stub("cloudformation")
    cloudformation.add_response("delete_stack", {}, {"StackName": "farcall-api"})
    cloudformation.add_response("describe_stacks", _described("DELETE_FAILED"))
    event = {
        "StackId": "arn:stack",
        "EventId": "1",
        "StackName": "farcall-api",
        "Timestamp": dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        "LogicalResourceId": "Group",
        "ResourceStatus": "DELETE_FAILED",
        "ResourceStatusReason": "has a dependent object",
    }
    cloudformation.add_response("describe_stack_events", {"StackEvents": [event]})
    with pytest.raises(DeploymentFailed, match="Group: has a dependent object"):
        account.aws.delete_stack("farcall-api", poll_s=0)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("ExpiredToken", CredentialsMissing),
        ("RequestExpired", CredentialsMissing),
        ("InvalidClientTokenId", CredentialsMissing),
        ("AccessDenied", AwsRefused),
        ("UnauthorizedOperation", AwsRefused),
        ("Throttling", Unavailable),
    ],
)
def test_aws_errors_are_converted_with_a_hint(account: _Account, code: str, expected: type[FarcallError]) -> None:
    account.stub("sts").add_client_error("get_caller_identity", code, "no")
    with pytest.raises(expected) as caught:
        account.aws.caller()
    assert caught.value.hint


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NoCredentialsError(), CredentialsMissing),
        (LoginRefreshRequired(), CredentialsMissing),
        (UnauthorizedSSOTokenError(), CredentialsMissing),
        (CredentialRetrievalError(provider="process", error_msg="it ended with 1"), CredentialsMissing),
        (ConfigParseError(path="/home/ada/.aws/config"), CredentialsMissing),
        (EndpointConnectionError(endpoint_url="https://sts.mars-1.amazonaws.com"), Unavailable),
    ],
)
def test_client_side_errors_are_converted(error: Exception, expected: type[FarcallError]) -> None:
    class Client:
        def get_caller_identity(self) -> None:
            raise error

    with pytest.raises(expected):
        Aws(lambda _service: Client(), region="mars-1").caller()


def test_without_a_region_there_is_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="no AWS region") as caught:
        connect()
    assert "--region" in caught.value.hint
    assert connect("eu-central-1").region == "eu-central-1"
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert connect().region == "eu-west-1"


def test_an_unknown_profile_is_missing_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("AWS_PROFILE", "missing")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(CredentialsMissing, match="missing"):
        connect("eu-central-1")
