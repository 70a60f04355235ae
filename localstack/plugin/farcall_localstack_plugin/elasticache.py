"""ElastiCache: replication groups as Valkey servers, and the calls of its API that describe them."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import subprocess

from localstack.aws.api import CommonServiceException, RequestContext, handler

from farcall_localstack_plugin.children import Child
from farcall_localstack_plugin.engines import HOST, start_valkey
from farcall_localstack_plugin.providers import (
    Event,
    Model,
    Provider,
    Request,
    current,
    done,
    failed,
    new_name,
    schema,
    updated,
)
from farcall_localstack_plugin.settings import settings

_NO_REPLICA = "Replication group must have at least one read replica to enable autofailover."


@dataclasses.dataclass
class _Group:
    """A replication group with one node, the Valkey ``server``; ``model`` has the properties of its resource."""

    identifier: str
    server: Child
    port: int
    model: Model
    created_at: dt.datetime

    @property
    def node(self) -> str:
        return f"{self.identifier}-001"

    @property
    def is_available(self) -> bool:
        """Whether the server runs. It is restarted after a failure."""
        return self.server.alive


_groups: dict[str, _Group] = {}


class ReplicationGroupProvider(Provider):
    """A Valkey server. The wheel has no TLS, so a template with encryption in transit is refused. Replica settings are
    validated as in ElastiCache, although replicas are not started."""

    TYPE = "AWS::ElastiCache::ReplicationGroup"
    SCHEMA: Model = schema(TYPE, "ReplicationGroupId")

    def create(self, request: Request) -> Event:
        model = request.desired_state
        if _is_true(model, "TransitEncryptionEnabled"):
            return failed(model, "Valkey has no TLS here; synthesise with -c target=localstack")
        if _fails_over(model) and _nodes(model) == 1:
            return failed(model, _NO_REPLICA)
        name = model.setdefault("ReplicationGroupId", new_name(request))
        server, port = start_valkey(name, settings=settings())
        model["PrimaryEndPoint"] = {"Address": HOST, "Port": str(port)}
        _groups[name] = _Group(name, server, port, dict(model), dt.datetime.now(dt.UTC))
        return done(model)

    def update(self, request: Request) -> Event:
        # CloudFormation turns fail-over on before it adds the replica that fail-over needs.
        before, model = request.previous_state or {}, updated(request)
        if _fails_over(request.desired_state) and min(_nodes(before), _nodes(request.desired_state)) == 1:
            return failed(before, _NO_REPLICA)
        _groups[model["ReplicationGroupId"]].model = dict(model)
        return done(model)

    def delete(self, request: Request) -> Event:
        model = current(request)
        if group := _groups.pop(model.get("ReplicationGroupId", ""), None):
            group.server.stop()
        return done(model)


def _is_true(group: Model, setting: str) -> bool:
    return str(group.get(setting, False)).lower() == "true"


def _fails_over(group: Model) -> bool:
    return _is_true(group, "AutomaticFailoverEnabled")


def _nodes(group: Model) -> int:
    return int(group.get("NumCacheClusters", 1))


class ElastiCacheApi:
    """The operations of the API; others are not implemented. They show the one node that runs, not the replicas of the
    template."""

    @handler("DescribeReplicationGroups", expand=False)
    def describe_groups(self, context: RequestContext, request: Model) -> Model:
        found = list(_groups.values())
        if wanted := request.get("ReplicationGroupId"):
            found = [group for group in found if group.identifier == wanted]
            if not found:
                raise _missing("ReplicationGroupNotFoundFault", f"ReplicationGroup {wanted} not found.")
        return {"ReplicationGroups": [_described_group(group, context) for group in found]}

    @handler("DescribeCacheClusters", expand=False)
    def describe_nodes(self, context: RequestContext, request: Model) -> Model:
        found = list(_groups.values())
        if wanted := request.get("CacheClusterId"):
            found = [group for group in found if group.node == wanted]
            if not found:
                raise _missing("CacheClusterNotFound", f"CacheCluster {wanted} not found.")
        if request.get("ShowCacheClustersNotInReplicationGroups"):
            found = []
        shown = bool(request.get("ShowCacheNodeInfo"))
        return {"CacheClusters": [_described_node(group, context, endpoints=shown) for group in found]}

    @handler("DescribeServerlessCaches", expand=False)
    def describe_serverless(self, _context: RequestContext, request: Model) -> Model:
        if wanted := request.get("ServerlessCacheName"):
            raise _missing("ServerlessCacheNotFoundFault", f"ServerlessCache {wanted} not found.")
        return {"ServerlessCaches": []}  # not supported


def _described_group(group: _Group, context: RequestContext) -> Model:
    model, status = group.model, "available" if group.is_available else "modifying"
    endpoint = {"Address": HOST, "Port": group.port}
    member = {"CacheClusterId": group.node, "CacheNodeId": "0001", "CurrentRole": "primary", "ReadEndpoint": endpoint}
    return {
        "ReplicationGroupId": group.identifier,
        "ARN": f"arn:aws:elasticache:{context.region}:{context.account_id}:replicationgroup:{group.identifier}",
        "Description": model.get("ReplicationGroupDescription", ""),
        "Status": status,
        "MemberClusters": [group.node],
        "NodeGroups": [
            {"NodeGroupId": "0001", "Status": status, "PrimaryEndpoint": endpoint, "NodeGroupMembers": [member]}
        ],
        "AutomaticFailover": "enabled" if _fails_over(model) else "disabled",
        "MultiAZ": "enabled" if _is_true(model, "MultiAZEnabled") else "disabled",
        "ClusterEnabled": False,
        "CacheNodeType": model.get("CacheNodeType", ""),
        "TransitEncryptionEnabled": False,
        "AtRestEncryptionEnabled": False,
        "Engine": "valkey",
        "ReplicationGroupCreateTime": group.created_at,
    }


def _described_node(group: _Group, context: RequestContext, *, endpoints: bool) -> Model:
    model, status = group.model, "available" if group.is_available else "rebooting cluster nodes"
    node = {
        "CacheNodeId": "0001",
        "CacheNodeStatus": status,
        "CacheNodeCreateTime": group.created_at,
        "Endpoint": {"Address": HOST, "Port": group.port},
    }
    return {
        "CacheClusterId": group.node,
        "ARN": f"arn:aws:elasticache:{context.region}:{context.account_id}:cluster:{group.node}",
        "CacheClusterStatus": status,
        "CacheNodeType": model.get("CacheNodeType", ""),
        "NumCacheNodes": 1,
        "Engine": "valkey",
        "EngineVersion": _version(),
        "ReplicationGroupId": group.identifier,
        "CacheSubnetGroupName": model.get("CacheSubnetGroupName", ""),
        "CacheClusterCreateTime": group.created_at,
        **({"CacheNodes": [node]} if endpoints else {}),
    }


@functools.cache
def _version() -> str:
    """The version of the installed Valkey, independent of the template: there is only one."""
    output = subprocess.run([settings().valkey, "--version"], check=True, capture_output=True, text=True).stdout
    return output.partition(" v=")[2].partition(" ")[0]


def _missing(code: str, message: str) -> CommonServiceException:
    return CommonServiceException(code, message, 404, True)
