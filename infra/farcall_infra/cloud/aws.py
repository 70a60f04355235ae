"""The account as ``farcall cloud`` sees it: a few questions and the four changes of ``destroy``, over boto3's clients.

The only module that calls AWS. Foreign errors become ours here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import boto3
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
    WaiterError,
)

from farcall_common.errors import ConfigurationError, Unavailable
from farcall_infra.cloud.errors import AwsRefused, CredentialsMissing, DeploymentFailed

__all__ = ["Aws", "Caller", "Database", "LeftBehind", "Resource", "Stack", "Tasks", "connect"]

_NO_IDENTITY: Final = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidClientTokenId",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    }
)
_REFUSED: Final = frozenset(
    {"AccessDenied", "AccessDeniedException", "AuthFailure", "OptInRequired", "UnauthorizedOperation"}
)
_NO_QUOTA: Final = ("NoSuchResourceException",)
_BOOTSTRAP: Final = "/cdk-bootstrap/hnb659fds/version"


@dataclasses.dataclass(frozen=True)
class Caller:
    """Who the credentials belong to."""

    account: str
    arn: str


@dataclasses.dataclass(frozen=True)
class Stack:
    """A stack of CloudFormation."""

    name: str
    status: str
    outputs: Mapping[str, str]
    is_protected: bool


@dataclasses.dataclass(frozen=True)
class Resource:
    """What a stack made: its type, and its physical id."""

    kind: str
    physical_id: str


@dataclasses.dataclass(frozen=True)
class Tasks:
    """How many tasks of a service should run, and do."""

    desired: int
    running: int


@dataclasses.dataclass(frozen=True)
class Database:
    """A database instance; ``storage_gib`` is what its final snapshot will be billed for at most."""

    status: str
    storage_gib: int
    is_protected: bool


@dataclasses.dataclass(frozen=True)
class LeftBehind:
    """Something of a database that outlives it, with its size in GiB."""

    what: str
    storage_gib: int


def connect(region: str | None = None) -> Aws:
    """The account of the usual credentials (``AWS_PROFILE`` …), in ``region`` or the configured one.

    :raises CredentialsMissing: if the named profile does not exist.
    :raises ConfigurationError: if no region is given or configured.
    """
    with _translated():
        # boto3 alone of all AWS' programs does not look at AWS_REGION.
        session = boto3.Session(region_name=region or os.environ.get("AWS_REGION"))
        if session.region_name is None:
            raise NoRegionError
    return Aws(session.client, region=session.region_name)  # type: ignore[arg-type]  # overloads for each literal


class Aws:
    """One account in one ``region``; ``make_client`` makes boto3's client of a service.

    Every method raises CredentialsMissing, AwsRefused or Unavailable when AWS does not know the caller, refuses the
    call or cannot be reached.
    """

    def __init__(self, make_client: Callable[[str], Any], *, region: str) -> None:
        self._make_client = make_client
        self._clients: dict[str, Any] = {}
        self.region = region

    # -- questions of the doctor ---------------------------------------------------------------------------------------

    def caller(self) -> Caller:
        """Who we are."""
        with _translated():
            answer = self._client("sts").get_caller_identity()
        return Caller(answer["Account"], answer["Arn"])

    def bootstrap_version(self) -> int | None:
        """The version of the CDK's bootstrap stack, or None without one."""
        ask = functools.partial(self._client("ssm").get_parameter, Name=_BOOTSTRAP)
        answer = _unless(("ParameterNotFound",), ask)
        return int(answer["Parameter"]["Value"]) if answer else None

    def quota(self, service: str, code: str) -> float | None:
        """The value of a service quota, or None where the region does not have it."""
        quotas = self._client("service-quotas")
        # The account's own value, or the one that holds for everybody if nobody has asked for another.
        for ask in (quotas.get_service_quota, quotas.get_aws_default_service_quota):
            if answer := _unless(_NO_QUOTA, functools.partial(ask, ServiceCode=service, QuotaCode=code)):
                return float(answer["Quota"]["Value"])
        return None

    def function_concurrency(self) -> int:
        """How many Lambda functions may run at once in this account and region."""
        with _translated():
            return int(self._client("lambda").get_account_settings()["AccountLimit"]["ConcurrentExecutions"])

    def count_vpcs(self) -> int:
        """How many VPCs there are."""
        with _translated():
            pages = self._client("ec2").get_paginator("describe_vpcs").paginate()
            return sum(len(page["Vpcs"]) for page in pages)

    def count_addresses(self) -> int:
        """How many elastic addresses are taken."""
        with _translated():
            return len(self._client("ec2").describe_addresses()["Addresses"])

    def has_role(self, name: str) -> bool:
        """Whether the account has a role of that name."""
        ask = functools.partial(self._client("iam").get_role, RoleName=name)
        return _unless(("NoSuchEntity",), ask) is not None

    def has_secret(self, arn: str) -> bool:
        """Whether the secret exists. Its value is not read."""
        ask = functools.partial(self._client("secretsmanager").describe_secret, SecretId=arn)
        return _unless(("ResourceNotFoundException",), ask) is not None

    # -- questions about a deployment ----------------------------------------------------------------------------------

    def stack(self, name: str) -> Stack | None:
        """The stack of that name, if there is one."""
        with _translated():
            try:
                found = self._client("cloudformation").describe_stacks(StackName=name)["Stacks"][0]
            except ClientError as error:
                # CloudFormation has no error of its own for this.
                if "does not exist" in error.response["Error"].get("Message", ""):
                    return None
                raise
        outputs = {output["OutputKey"]: output["OutputValue"] for output in found.get("Outputs", [])}
        return Stack(name, found["StackStatus"], outputs, found.get("EnableTerminationProtection", False))

    def resources(self, stack: str) -> Sequence[Resource]:
        """What a stack has made."""
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
        with _translated():
            (service,) = self._client("ecs").describe_services(cluster=cluster, services=[service_arn])["services"]
        return Tasks(service["desiredCount"], service["runningCount"])

    def alarms(self, names: Sequence[str]) -> Mapping[str, str]:
        """Name and state of these alarms, up to a hundred of them."""
        with _translated():
            found = self._client("cloudwatch").describe_alarms(AlarmNames=list(names), MaxRecords=100)
        return {alarm["AlarmName"]: alarm["StateValue"] for alarm in found["MetricAlarms"]}

    def database(self, identifier: str) -> Database | None:
        """The database instance of that name, if there is one."""
        ask = functools.partial(self._client("rds").describe_db_instances, DBInstanceIdentifier=identifier)
        answer = _unless(("DBInstanceNotFound", "DBInstanceNotFoundFault"), ask)
        if answer is None:
            return None
        found = answer["DBInstances"][0]
        return Database(found["DBInstanceStatus"], found["AllocatedStorage"], found["DeletionProtection"])

    def left_behind(self, database: str) -> Sequence[LeftBehind]:
        """Snapshots and retained backups of a database instance."""
        rds = self._client("rds")
        with _translated():
            snapshots = rds.describe_db_snapshots(DBInstanceIdentifier=database, SnapshotType="manual")["DBSnapshots"]
        ask = functools.partial(rds.describe_db_instance_automated_backups, DBInstanceIdentifier=database)
        answer = _unless(("DBInstanceAutomatedBackupNotFound", "DBInstanceAutomatedBackupNotFoundFault"), ask)
        backups = answer["DBInstanceAutomatedBackups"] if answer else []
        return [
            *(LeftBehind(f"snapshot {each['DBSnapshotIdentifier']}", each["AllocatedStorage"]) for each in snapshots),
            *(
                LeftBehind(f"automated backups {each['DBInstanceAutomatedBackupsArn']}", each["AllocatedStorage"])
                for each in backups
            ),
        ]

    # -- changes -------------------------------------------------------------------------------------------------------

    def unprotect_database(self, identifier: str) -> None:
        """Let the database be deleted."""
        with _translated():
            self._client("rds").modify_db_instance(
                DBInstanceIdentifier=identifier, DeletionProtection=False, ApplyImmediately=True
            )

    def unprotect_stack(self, name: str) -> None:
        """Let the stack be deleted."""
        with _translated():
            self._client("cloudformation").update_termination_protection(
                StackName=name, EnableTerminationProtection=False
            )

    def delete_stack(self, name: str, *, poll_s: int = 15, timeout_s: int = 3600) -> None:
        """Delete a stack and wait until it is gone. Functions in a VPC keep its groups for up to half an hour.

        :raises DeploymentFailed: if it could not be deleted, with the reasons of the resources that stayed.
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
                    hint="Remove what is named there, and try again.",
                ) from error

    def _client(self, service: str) -> Any:
        if service not in self._clients:
            self._clients[service] = self._make_client(service)
        return self._clients[service]


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Turn boto3's errors into ours."""
    try:
        yield
    except (NoCredentialsError, PartialCredentialsError, ProfileNotFound, SSOError, TokenRetrievalError) as error:
        raise CredentialsMissing(str(error)) from error
    except NoRegionError as error:
        raise ConfigurationError("no AWS region is chosen", hint="pass --region, or set AWS_REGION") from error
    except ClientError as error:
        code = error.response["Error"]["Code"]
        if code in _NO_IDENTITY:
            raise CredentialsMissing(str(error)) from error
        if code in _REFUSED:
            raise AwsRefused(str(error)) from error
        raise Unavailable(str(error)) from error
    except BotoCoreError as error:
        raise Unavailable(f"AWS cannot be reached: {error}", hint="Check the network and --region.") from error


def _unless(codes: Sequence[str], ask: Callable[[], Any]) -> Any:
    """AWS' answer, or None if it says with one of ``codes`` that the thing is not there."""
    with _translated():
        try:
            return ask()
        except ClientError as error:
            if error.response["Error"]["Code"] in codes:
                return None
            raise
