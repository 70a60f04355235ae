"""RDS API: the calls of deployments and their tests, which describe, restart, stop and start instances, describe
snapshots, turn deletion protection off, change the owner's password, and take and delete snapshots."""

from __future__ import annotations

import re
import subprocess
from typing import Any

from localstack.aws.api import CommonServiceException, RequestContext, handler

from farcall_localstack_plugin import databases
from farcall_localstack_plugin.databases import Instance, Snapshot
from farcall_localstack_plugin.engines import HOST

Request = dict[str, Any]
_CHANGEABLE = {"DBInstanceIdentifier", "ApplyImmediately", "DeletionProtection", "MasterUserPassword"}


class RdsApi:
    """The operations of the API; others are not implemented."""

    @handler("DescribeDBInstances", expand=False)
    def describe_instances(self, context: RequestContext, request: Request) -> Request:
        wanted = request.get("DBInstanceIdentifier")
        found = [_instance(wanted)] if wanted else list(databases.databases.values())
        return {"DBInstances": [_described_instance(each, context) for each in found]}

    @handler("ModifyDBInstance", expand=False)
    def modify_instance(self, context: RequestContext, request: Request) -> Request:
        if unknown := request.keys() - _CHANGEABLE:
            raise _invalid(f"These properties cannot be changed here: {', '.join(sorted(unknown))}.")
        instance = _instance(request["DBInstanceIdentifier"])
        instance.model["DeletionProtection"] = request.get("DeletionProtection", instance.is_protected)
        if password := request.get("MasterUserPassword"):
            instance.change_password(password)
        return {"DBInstance": _described_instance(instance, context)}

    @handler("RebootDBInstance", expand=False)
    def reboot_instance(self, context: RequestContext, request: Request) -> Request:
        instance = _instance(request["DBInstanceIdentifier"])
        _require(instance, stopped=False)
        instance.stop()
        instance.start()
        return {"DBInstance": {**_described_instance(instance, context), "DBInstanceStatus": "rebooting"}}

    @handler("StopDBInstance", expand=False)
    def stop_instance(self, context: RequestContext, request: Request) -> Request:
        instance = _instance(request["DBInstanceIdentifier"])
        _require(instance, stopped=False)
        instance.stop()
        return {"DBInstance": {**_described_instance(instance, context), "DBInstanceStatus": "stopping"}}

    @handler("StartDBInstance", expand=False)
    def start_instance(self, context: RequestContext, request: Request) -> Request:
        instance = _instance(request["DBInstanceIdentifier"])
        _require(instance, stopped=True)
        instance.start()
        return {"DBInstance": {**_described_instance(instance, context), "DBInstanceStatus": "starting"}}

    @handler("CreateDBSnapshot", expand=False)
    def create_snapshot(self, context: RequestContext, request: Request) -> Request:
        identifier = request["DBSnapshotIdentifier"]
        if identifier in databases.snapshots:
            raise CommonServiceException(
                "DBSnapshotAlreadyExists", f"DBSnapshot {identifier} exists already.", 400, True
            )
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]{0,254}", identifier):
            raise _invalid(f"{identifier} is not a valid snapshot name.")
        try:
            snapshot = databases.take_snapshot(
                identifier, _instance(request["DBInstanceIdentifier"]), tags=request.get("Tags", ())
            )
        except subprocess.CalledProcessError as error:
            raise CommonServiceException("InternalFailure", error.stderr, 500) from error
        return {"DBSnapshot": _described_snapshot(snapshot, context)}

    @handler("DescribeDBSnapshots", expand=False)
    def describe_snapshots(self, context: RequestContext, request: Request) -> Request:
        if request.get("SnapshotType", "manual") != "manual":
            return {"DBSnapshots": []}
        if wanted := request.get("DBSnapshotIdentifier"):
            return {"DBSnapshots": [_described_snapshot(_snapshot(wanted), context)]}
        of = request.get("DBInstanceIdentifier")
        return {
            "DBSnapshots": [
                _described_snapshot(each, context)
                for each in databases.snapshots.values()
                if of in (None, each.instance)
            ]
        }

    @handler("DeleteDBSnapshot", expand=False)
    def delete_snapshot(self, context: RequestContext, request: Request) -> Request:
        found = _snapshot(request["DBSnapshotIdentifier"])
        databases.delete_snapshot(found.identifier)
        return {"DBSnapshot": {**_described_snapshot(found, context), "Status": "deleted"}}

    @handler("DescribeDBInstanceAutomatedBackups", expand=False)
    def describe_backups(self, _context: RequestContext, _request: Request) -> Request:
        return {"DBInstanceAutomatedBackups": []}  # automated backups are not supported


def _instance(identifier: str) -> Instance:
    try:
        return databases.databases[identifier]
    except KeyError:
        raise CommonServiceException("DBInstanceNotFound", f"DBInstance {identifier} not found.", 404, True) from None


def _require(instance: Instance, *, stopped: bool) -> None:
    if instance.is_stopped is not stopped:
        state = "stopped" if instance.is_stopped else "available"
        raise CommonServiceException(
            "InvalidDBInstanceState", f"Instance {instance.identifier} is in state {state}.", 400, True
        )


def _snapshot(identifier: str) -> Snapshot:
    try:
        return databases.snapshots[identifier]
    except KeyError:
        raise CommonServiceException("DBSnapshotNotFound", f"DBSnapshot {identifier} not found.", 404, True) from None


def _invalid(message: str) -> CommonServiceException:
    return CommonServiceException("InvalidParameterValue", message, 400, True)


def _described_instance(instance: Instance, context: RequestContext) -> Request:
    return {
        "DBInstanceIdentifier": instance.identifier,
        "DBInstanceArn": f"arn:aws:rds:{context.region}:{context.account_id}:db:{instance.identifier}",
        "DBInstanceClass": instance.model.get("DBInstanceClass", ""),
        "DBInstanceStatus": "stopped" if instance.is_stopped else "available",
        "Engine": "postgres",
        "EngineVersion": instance.version,
        "MasterUsername": instance.user,
        "DBName": instance.database,
        "Endpoint": {"Address": HOST, "Port": instance.port},
        "AllocatedStorage": instance.storage_gib,
        "InstanceCreateTime": instance.created_at,
        "DeletionProtection": instance.is_protected,
        "TagList": list(instance.tags),
        "DBParameterGroups": _described_parameters(instance),
    }


def _described_parameters(instance: Instance) -> list[Request]:
    if not instance.parameter_group or instance.is_stopped:
        return []
    status = "pending-reboot" if instance.needs_restart else "in-sync"
    return [{"DBParameterGroupName": instance.parameter_group, "ParameterApplyStatus": status}]


def _described_snapshot(snapshot: Snapshot, context: RequestContext) -> Request:
    return {
        "DBSnapshotIdentifier": snapshot.identifier,
        "DBSnapshotArn": f"arn:aws:rds:{context.region}:{context.account_id}:snapshot:{snapshot.identifier}",
        "DBInstanceIdentifier": snapshot.instance,
        "SnapshotCreateTime": snapshot.created_at,
        "SnapshotType": "manual",
        "Status": "available",
        "PercentProgress": 100,
        "Engine": "postgres",
        "MasterUsername": snapshot.user,
        "AllocatedStorage": snapshot.storage_gib,
        "TagList": list(snapshot.tags),
    }
