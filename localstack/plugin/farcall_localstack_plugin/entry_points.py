"""Entry points of the plugin, listed in ``pyproject.toml`` for plux.

They import their code when they are loaded: LocalStack reads every entry point at start, and most of its modules are
slow to import.
"""

from __future__ import annotations

from typing import Any

from localstack.services.cloudformation.resource_provider import CloudFormationResourceProviderPlugin
from localstack.services.plugins import Service as ApiService
from localstack.services.plugins import aws_provider
from plux import Plugin  # type: ignore[import-untyped]  # it has no types


@aws_provider(api="ecs")
def ecs_api() -> ApiService:
    """The ECS calls that our programs make, and those that describe the resources."""
    from localstack.aws.skeleton import create_skeleton

    from farcall_localstack_plugin.ecs_api import EcsApi

    return ApiService("ecs", skeleton=create_skeleton("ecs", EcsApi()))


@aws_provider(api="elasticache")
def elasticache_api() -> ApiService:
    """The ElastiCache calls that describe the queue."""
    from localstack.aws.skeleton import create_skeleton

    from farcall_localstack_plugin.elasticache import ElastiCacheApi

    return ApiService("elasticache", skeleton=create_skeleton("elasticache", ElastiCacheApi()))


@aws_provider(api="rds")
def rds_api() -> ApiService:
    """The RDS calls that deployments make."""
    from localstack.aws.skeleton import create_skeleton

    from farcall_localstack_plugin.rds_api import RdsApi

    return ApiService("rds", skeleton=create_skeleton("rds", RdsApi()))


class ProcessExecutorPlugin(Plugin):
    """``LAMBDA_RUNTIME_EXECUTOR=process``."""

    namespace = "localstack.lambda.runtime_executor"
    name = "process"

    def load(self, *_args: Any, **_options: Any) -> Any:
        from farcall_localstack_plugin.executor import ProcessRuntimeExecutor

        return ProcessRuntimeExecutor


class _ProviderPlugin(CloudFormationResourceProviderPlugin):
    """Base: LocalStack calls ``factory`` to get a provider."""

    factory: Any = None

    def load(self) -> None:
        from farcall_localstack_plugin import balancer, ecs, elasticache, providers

        if self.name in providers.RECORDS:
            self.factory = providers.record_provider(self.name, providers.RECORDS[self.name])
            return
        resource_providers = (
            balancer.ListenerProvider,
            balancer.LoadBalancerProvider,
            balancer.TargetGroupProvider,
            providers.AuthorizerProvider,
            providers.CustomResourceProvider,
            providers.DBInstanceProvider,
            providers.DBParameterGroupProvider,
            elasticache.ReplicationGroupProvider,
            ecs.ClusterProvider,
            ecs.ServiceProvider,
            ecs.TaskDefinitionProvider,
        )
        self.factory = next(provider for provider in resource_providers if self.name == provider.TYPE)


class Authorizer(_ProviderPlugin):
    name = "AWS::ApiGateway::Authorizer"


class CustomResource(_ProviderPlugin):
    name = "AWS::CloudFormation::CustomResource"


class ElasticAddress(_ProviderPlugin):
    name = "AWS::EC2::EIP"


class SecurityGroupIngress(_ProviderPlugin):
    name = "AWS::EC2::SecurityGroupIngress"


class Cluster(_ProviderPlugin):
    name = "AWS::ECS::Cluster"


class Service(_ProviderPlugin):
    name = "AWS::ECS::Service"


class TaskDefinition(_ProviderPlugin):
    name = "AWS::ECS::TaskDefinition"


class CacheParameterGroup(_ProviderPlugin):
    name = "AWS::ElastiCache::ParameterGroup"


class ReplicationGroup(_ProviderPlugin):
    name = "AWS::ElastiCache::ReplicationGroup"


class CacheSubnetGroup(_ProviderPlugin):
    name = "AWS::ElastiCache::SubnetGroup"


class Listener(_ProviderPlugin):
    name = "AWS::ElasticLoadBalancingV2::Listener"


class LoadBalancer(_ProviderPlugin):
    name = "AWS::ElasticLoadBalancingV2::LoadBalancer"


class TargetGroup(_ProviderPlugin):
    name = "AWS::ElasticLoadBalancingV2::TargetGroup"


class DBInstance(_ProviderPlugin):
    name = "AWS::RDS::DBInstance"


class DBParameterGroup(_ProviderPlugin):
    name = "AWS::RDS::DBParameterGroup"


class DBSubnetGroup(_ProviderPlugin):
    name = "AWS::RDS::DBSubnetGroup"
