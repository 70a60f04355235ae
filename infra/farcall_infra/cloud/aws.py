"""The AWS client of ``farcall cloud``: a few queries and changes, over boto3's clients.

This is the only module that calls AWS. It converts boto3's errors to ours.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import boto3
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConfigParseError,
    CredentialRetrievalError,
    InvalidConfigError,
    LoginError,
    NoAuthTokenError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
    RefreshWithMFAUnsupportedError,
    SSOError,
    TokenRetrievalError,
    UnknownCredentialError,
    WaiterError,
)
from botocore.parsers import ResponseParserError

from farcall_common.errors import ConfigurationError, Unavailable
from farcall_infra.cloud.account import Caller, Database, LeftBehind, Metric, Queue, Resource, Sample, Stack, Tasks
from farcall_infra.cloud.errors import AwsRefused, CredentialsMissing, DeploymentFailed
from farcall_infra.deployment import DEPLOYMENT_TAG, SLEEPS_TAG

#: Lambda concurrency that an account keeps for functions without a reservation.
UNRESERVABLE: Final = 100

_NO_IDENTITY: Final = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidClientTokenId",
        "RequestExpired",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    }
)
_REFUSED: Final = frozenset(
    {"AccessDenied", "AccessDeniedException", "AuthFailure", "OptInRequired", "UnauthorizedOperation"}
)
_NO_LOGIN: Final = (
    ConfigParseError,
    CredentialRetrievalError,
    InvalidConfigError,
    LoginError,
    NoAuthTokenError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    RefreshWithMFAUnsupportedError,
    SSOError,
    TokenRetrievalError,
    UnknownCredentialError,
)
_ROLE_EXISTS: Final = ("InvalidInput", "EntityAlreadyExists")  # AWS documents the first
_NO_QUOTA: Final = ("NoSuchResourceException",)
_NO_TYPE: Final = ("TypeNotFoundException",)
_NO_CACHE: Final = ("ServerlessCacheNotFoundFault",)
_PENDING: Final = "AWSPENDING"
_CURRENT: Final = "AWSCURRENT"
_BOOTSTRAP: Final = "/cdk-bootstrap/hnb659fds/version"


def connect(region: str | None = None) -> Aws:
    """Connect with the usual credentials (``AWS_PROFILE`` …), to ``region`` or the configured one.

    :raises CredentialsMissing: if the named profile does not exist.
    :raises ConfigurationError: if no region is given or configured.
    """
    with _translated():
        # boto3 is the only AWS program that ignores AWS_REGION.
        session = boto3.Session(region_name=region or os.environ.get("AWS_REGION"))
        if session.region_name is None:
            raise NoRegionError
    endpoint_url = os.environ.get("AWS_ENDPOINT_URL", "")
    return Aws(session.client, region=session.region_name, endpoint_url=endpoint_url)  # type: ignore[arg-type]  # overloads for each literal


class Aws:
    """One account in one ``region``; ``make_client`` returns boto3's client of a service. ``endpoint_url`` is the
    address that replaces those of all services (LocalStack), empty for AWS.

    Every method raises CredentialsMissing, AwsRefused or Unavailable if the credentials are invalid, AWS refuses the
    call or cannot be reached.
    """

    def __init__(self, make_client: Callable[[str], Any], *, region: str, endpoint_url: str = "") -> None:
        self._make_client = make_client
        self.endpoint_url = endpoint_url.rstrip("/")
        self._clients: dict[str, Any] = {}
        self.region = region

    # -- queries of the doctor -----------------------------------------------------------------------------------------

    def caller(self) -> Caller:
        """The caller's identity."""
        with _translated():
            answer = self._client("sts").get_caller_identity()
        return Caller(answer["Account"], answer["Arn"])

    def bootstrap_version(self) -> int | None:
        """The version of the CDK's bootstrap stack, or None without one."""
        call = functools.partial(self._client("ssm").get_parameter, Name=_BOOTSTRAP)
        answer = _unless(("ParameterNotFound",), call)
        return int(answer["Parameter"]["Value"]) if answer else None

    def quota(self, service: str, code: str) -> float | None:
        """The value of a service quota, or None where the region does not have it."""
        quotas = self._client("service-quotas")
        # The account's own value, or AWS's default if the account has none.
        for call in (quotas.get_service_quota, quotas.get_aws_default_service_quota):
            if answer := _unless(_NO_QUOTA, functools.partial(call, ServiceCode=service, QuotaCode=code)):
                return float(answer["Quota"]["Value"])
        return None

    def function_concurrency(self) -> int:
        """The number of Lambda functions that may run at once in this account and region."""
        with _translated():
            return int(self._client("lambda").get_account_settings()["AccountLimit"]["ConcurrentExecutions"])

    def reservable_concurrency(self, functions: Sequence[str]) -> int:
        """The part of the account's Lambda concurrency that may be reserved, including what ``functions`` have reserved
        already. Lambda refuses to reserve the last 100."""
        client = self._client("lambda")
        with _translated():
            free = int(client.get_account_settings()["AccountLimit"]["UnreservedConcurrentExecutions"])
            ours = [client.get_function_concurrency(FunctionName=name) for name in functions]
        return max(0, free - UNRESERVABLE + sum(int(each.get("ReservedConcurrentExecutions", 0)) for each in ours))

    def count_vpcs(self) -> int:
        """The number of VPCs."""
        with _translated():
            pages = self._client("ec2").get_paginator("describe_vpcs").paginate()
            return sum(len(page["Vpcs"]) for page in pages)

    def count_addresses(self) -> int:
        """The number of allocated elastic IP addresses."""
        with _translated():
            return len(self._client("ec2").describe_addresses()["Addresses"])

    def has_type(self, name: str) -> bool:
        """Whether CloudFormation has a resource type in this region."""
        call = functools.partial(self._client("cloudformation").describe_type, Type="RESOURCE", TypeName=name)
        return _unless(_NO_TYPE, call) is not None

    def zones(self) -> Mapping[str, str]:
        """The region's availability zones, and local zones that the account has enabled: names and ids."""
        with _translated():
            found = self._client("ec2").describe_availability_zones()["AvailabilityZones"]
        return {zone["ZoneName"]: zone["ZoneId"] for zone in found}

    def postgres_versions(self, instance_class: str, *, multi_az: bool) -> Sequence[str]:
        """The versions of PostgreSQL that RDS offers on an instance class, encrypted, on gp3."""
        with _translated():
            offers = list(
                _all_of(
                    self._client("rds"),
                    "describe_orderable_db_instance_options",
                    "OrderableDBInstanceOptions",
                    Engine="postgres",
                    DBInstanceClass=instance_class,
                    Vpc=True,
                )
            )
        return sorted(
            {
                offer["EngineVersion"]
                for offer in offers
                if offer["StorageType"] == "gp3"
                and offer["SupportsStorageEncryption"]
                and (offer["MultiAZCapable"] or not multi_az)
            }
        )

    def has_cache_node(self, node_type: str) -> bool:
        """Whether ElastiCache sells reservations of a node type. It has no query for other offers."""
        with _translated():
            call = self._client("elasticache").describe_reserved_cache_nodes_offerings
            return bool(call(CacheNodeType=node_type, MaxRecords=20)["ReservedCacheNodesOfferings"])

    def has_role(self, name: str) -> bool:
        """Whether the account has a role of that name."""
        call = functools.partial(self._client("iam").get_role, RoleName=name)
        return _unless(("NoSuchEntity",), call) is not None

    def secret_arn(self, secret: str) -> str | None:
        """The full ARN of a secret, which may be given without its last six characters; None if there is none. The
        value is not read."""
        call = functools.partial(self._client("secretsmanager").describe_secret, SecretId=secret)
        answer = _unless(("ResourceNotFoundException",), call)
        return None if answer is None else str(answer["ARN"])

    def secret_value(self, secret: str) -> tuple[Mapping[str, str], str]:
        """The current value of a secret, and the id of its version."""
        with _translated():
            answer = self._client("secretsmanager").get_secret_value(SecretId=secret, VersionStage=_CURRENT)
        return json.loads(answer["SecretString"]), str(answer["VersionId"])

    # -- queries about a deployment ------------------------------------------------------------------------------------

    def stack(self, name: str) -> Stack | None:
        """The stack of that name, if there is one."""
        with _translated():
            try:
                found = self._client("cloudformation").describe_stacks(StackName=name)["Stacks"][0]
            except ClientError as error:
                # CloudFormation has no specific error code for this.
                if "does not exist" in error.response["Error"].get("Message", ""):
                    return None
                raise
        return Stack(
            name,
            found["StackStatus"],
            {output["OutputKey"]: output["OutputValue"] for output in found.get("Outputs", [])},
            found.get("EnableTerminationProtection", False),
            reason=found.get("StackStatusReason", ""),
            parameters={each["ParameterKey"]: each.get("ParameterValue", "") for each in found.get("Parameters", [])},
            changed_at=found.get("LastUpdatedTime", found.get("CreationTime")),
        )

    def resources(self, stack: str) -> Sequence[Resource]:
        """The resources of a stack."""
        with _translated():
            pages = self._client("cloudformation").get_paginator("list_stack_resources").paginate(StackName=stack)
            return [
                Resource(each["ResourceType"], each["PhysicalResourceId"])
                for page in pages
                for each in page["StackResourceSummaries"]
                if "PhysicalResourceId" in each
            ]

    def tasks(self, service_arn: str) -> Tasks:
        """The tasks of an ECS service."""
        cluster = service_arn.split("/")[1]
        call = self._client("ecs").describe_services
        with _translated():
            (service,) = call(cluster=cluster, services=[service_arn], include=["TAGS"])["services"]
        return Tasks(
            service["desiredCount"],
            service["runningCount"],
            may_sleep=any(tag["key"] == SLEEPS_TAG for tag in service.get("tags", [])),
            last_event=next((event["message"] for event in service.get("events", [])), ""),  # the newest is first
        )

    def alarms(self, names: Sequence[str]) -> Mapping[str, str]:
        """Names and states of up to a hundred alarms."""
        with _translated():
            found = self._client("cloudwatch").describe_alarms(AlarmNames=list(names), MaxRecords=100)
        return {alarm["AlarmName"]: alarm["StateValue"] for alarm in found["MetricAlarms"]}

    def database(self, identifier: str) -> Database | None:
        """The database instance of that name, if there is one."""
        call = functools.partial(self._client("rds").describe_db_instances, DBInstanceIdentifier=identifier)
        answer = _unless(("DBInstanceNotFound", "DBInstanceNotFoundFault"), call)
        if answer is None:
            return None
        found = answer["DBInstances"][0]
        version = f"{found['Engine']} {found['EngineVersion']}"
        return Database(
            found["DBInstanceStatus"],
            found["AllocatedStorage"],
            found["DeletionProtection"],
            version,
            needs_restart=any(
                group.get("ParameterApplyStatus") == "pending-reboot" for group in found.get("DBParameterGroups", [])
            ),
        )

    def queue(self, identifier: str) -> Queue:
        """The replication group of that name."""
        with _translated():
            call = self._client("elasticache").describe_replication_groups
            (found,) = call(ReplicationGroupId=identifier)["ReplicationGroups"]
        return Queue(found["Status"], tuple(found["MemberClusters"]))

    def newest(self, metrics: Sequence[Metric], *, now: dt.datetime, within_s: int) -> Mapping[Metric, Sample]:
        """The newest value of each metric, if one is not older than ``within_s``; metrics without a value are left
        out."""
        queries = [
            {
                "Id": f"m{number}",
                "MetricStat": {
                    "Metric": {
                        "Namespace": metric.namespace,
                        "MetricName": metric.name,
                        "Dimensions": [dict(zip(("Name", "Value"), metric.dimension, strict=True))]
                        if metric.dimension
                        else [],
                    },
                    "Period": 60,
                    "Stat": metric.statistic,
                },
            }
            for number, metric in enumerate(metrics)
        ]
        with _translated():
            answers = self._client("cloudwatch").get_metric_data(
                MetricDataQueries=queries,
                StartTime=now - dt.timedelta(seconds=within_s),
                EndTime=now,
                ScanBy="TimestampDescending",
            )["MetricDataResults"]
        return {
            metrics[int(answer["Id"][1:])]: Sample(answer["Values"][0], answer["Timestamps"][0])
            for answer in answers
            if answer["Values"]
        }

    def left_behind(self, deployment: str) -> Sequence[LeftBehind]:
        """Snapshots and retained backups of a deployment's database: they keep its tag after it was deleted."""
        rds = self._client("rds")
        wanted = {"Key": DEPLOYMENT_TAG, "Value": deployment}
        with _translated():
            snapshots = list(_all_of(rds, "describe_db_snapshots", "DBSnapshots", SnapshotType="manual"))
            backups = list(_all_of(rds, "describe_db_instance_automated_backups", "DBInstanceAutomatedBackups"))
        return [
            *(
                LeftBehind(
                    f"snapshot {each['DBSnapshotIdentifier']}",
                    each["AllocatedStorage"],
                    f"aws rds delete-db-snapshot --db-snapshot-identifier {each['DBSnapshotIdentifier']}",
                )
                for each in snapshots
                if wanted in each.get("TagList", [])
            ),
            *(
                LeftBehind(
                    f"automated backups of {each['DBInstanceIdentifier']}, until they expire",
                    each["AllocatedStorage"],
                    f"aws rds delete-db-instance-automated-backup --dbi-resource-id {each['DbiResourceId']}",
                )
                for each in backups
                if wanted in each.get("TagList", []) and each.get("Status") == "retained"
            ),
        ]

    def buckets(self, deployment: str) -> Sequence[str]:
        """The buckets with the tag of a deployment."""
        with _translated():
            found = _all_of(
                self._client("resourcegroupstaggingapi"),
                "get_resources",
                "ResourceTagMappingList",
                TagFilters=[{"Key": DEPLOYMENT_TAG, "Values": [deployment]}],
                ResourceTypeFilters=["s3"],
            )
            return [each["ResourceARN"].rpartition(":")[2] for each in found]

    def has_cache(self, name: str) -> bool:
        """Whether there is a serverless cache of that name, in any state."""
        call = functools.partial(self._client("elasticache").describe_serverless_caches, ServerlessCacheName=name)
        return _unless(_NO_CACHE, call) is not None

    # -- changes -------------------------------------------------------------------------------------------------------

    def make_service_role(self, service: str) -> None:
        """Create the service-linked role of a service (``rds.amazonaws.com``), unless it exists."""
        call = functools.partial(self._client("iam").create_service_linked_role, AWSServiceName=service)
        _unless(_ROLE_EXISTS, call)

    def unprotect_database(self, identifier: str) -> None:
        """Turn off the database's deletion protection."""
        with _translated():
            self._client("rds").modify_db_instance(
                DBInstanceIdentifier=identifier, DeletionProtection=False, ApplyImmediately=True
            )

    def unprotect_stack(self, name: str) -> None:
        """Turn off the stack's termination protection."""
        with _translated():
            self._client("cloudformation").update_termination_protection(
                StackName=name, EnableTerminationProtection=False
            )

    def add_pending_value(self, secret: str, value: Mapping[str, str]) -> str:
        """Add a value to a secret without making it the current one. Returns the id of its version."""
        with _translated():
            answer = self._client("secretsmanager").put_secret_value(
                SecretId=secret, SecretString=json.dumps(value), VersionStages=[_PENDING]
            )
        return str(answer["VersionId"])

    def make_current(self, secret: str, version: str, *, instead_of: str) -> None:
        """Make a pending version of a secret the current one.

        :raises Unavailable: if ``instead_of`` is not the current one any more.
        """
        with _translated():
            self._client("secretsmanager").update_secret_version_stage(
                SecretId=secret, VersionStage=_CURRENT, MoveToVersionId=version, RemoveFromVersionId=instead_of
            )

    def invoke(self, function: str, event: Mapping[str, str]) -> Mapping[str, str]:
        """The answer of a Lambda function to an event.

        :raises Unavailable: if the function fails.
        """
        with _translated():
            answer = self._client("lambda").invoke(FunctionName=function, Payload=json.dumps(event).encode())
        found: Mapping[str, str] = json.load(answer["Payload"])
        if "FunctionError" in answer:
            raise Unavailable(f"the function {function} failed: {found.get('errorMessage', 'no message')}")
        return found

    def delete_cache(self, name: str, *, poll_s: float = 5.0, timeout_s: float = 900.0) -> None:
        """Delete a serverless cache and wait until that is done. No error if there is none.

        :raises DeploymentFailed: if it is still there in the end.
        """
        call = functools.partial(self._client("elasticache").delete_serverless_cache, ServerlessCacheName=name)
        _unless((*_NO_CACHE, "InvalidServerlessCacheStateFault"), call)
        deadline = time.monotonic() + timeout_s
        while self.has_cache(name):
            if time.monotonic() > deadline:
                raise DeploymentFailed(
                    f"the cache {name} is still there after {timeout_s:.0f} s", hint="Run the command again."
                )
            time.sleep(poll_s)

    def delete_stack(self, name: str, *, poll_s: int = 15, timeout_s: int = 3600) -> None:
        """Delete a stack and wait until that is done. Functions in a VPC keep its security groups for up to half an
        hour.

        :raises DeploymentFailed: if it could not be deleted, with the reason of each resource that remains.
        """
        cloudformation = self._client("cloudformation")
        with _translated():
            cloudformation.delete_stack(StackName=name)
            try:
                cloudformation.get_waiter("stack_delete_complete").wait(
                    StackName=name, WaiterConfig={"Delay": poll_s, "MaxAttempts": max(1, timeout_s // max(1, poll_s))}
                )
            except WaiterError as error:
                events = cloudformation.describe_stack_events(StackName=name)["StackEvents"]
                reasons = "; ".join(
                    f"{event['LogicalResourceId']}: {event.get('ResourceStatusReason', 'no reason given')}"
                    for event in events
                    if event.get("ResourceStatus") == "DELETE_FAILED"
                )
                raise DeploymentFailed(
                    f"{name} could not be deleted: {reasons or error}",
                    hint="Remove the resources named there, and run the command again.",
                ) from error

    def _client(self, service: str) -> Any:
        if service not in self._clients:
            self._clients[service] = self._make_client(service)
        return self._clients[service]


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Convert boto3's errors to ours."""
    try:
        yield
    except _NO_LOGIN as error:
        raise CredentialsMissing(str(error)) from error
    except NoRegionError as error:
        raise ConfigurationError("no AWS region is set", hint="Pass --region, or set AWS_REGION.") from error
    except ClientError as error:
        code = error.response["Error"]["Code"]
        if code in _NO_IDENTITY:
            raise CredentialsMissing(str(error)) from error
        if code in _REFUSED:
            raise AwsRefused(str(error)) from error
        raise Unavailable(str(error)) from error
    except (BotoCoreError, ResponseParserError) as error:
        raise Unavailable(f"AWS cannot be reached: {error}", hint="Check the network and --region.") from error


def _all_of(client: Any, operation: str, key: str, **parameters: Any) -> Iterator[Any]:
    """The items under ``key`` of all pages of an answer."""
    for page in client.get_paginator(operation).paginate(**parameters):
        yield from page[key]


def _unless(codes: Sequence[str], call: Callable[[], Any]) -> Any:
    """AWS's answer, or None if it is an error with one of ``codes``: the resource does not exist."""
    with _translated():
        try:
            return call()
        except ClientError as error:
            if error.response["Error"]["Code"] in codes:
                return None
            raise
