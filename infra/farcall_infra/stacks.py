"""CloudFormation stacks: they connect constructs and own no resources themselves.

The network and the data rarely change; the API and the forwarder change with every release. Observability can be
replaced or left out without other changes.
"""

from __future__ import annotations

import json

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from constructs import Construct

from farcall_infra.constructs.alarms import API_ERRORS, Alarms, Notifications, alarm_name
from farcall_infra.constructs.dashboard import Dashboard
from farcall_infra.constructs.exchange import ExchangeBucket, ExchangeCache, ExpressBucket
from farcall_infra.constructs.fleet import Fleet
from farcall_infra.constructs.forwarder_service import ForwarderService
from farcall_infra.constructs.function import PythonFunction
from farcall_infra.constructs.identity import CallerKey, Identity
from farcall_infra.constructs.metrics import Metrics, Monitored
from farcall_infra.constructs.migration import Migration
from farcall_infra.constructs.nag_suppressions import suppress
from farcall_infra.constructs.network import Network
from farcall_infra.constructs.scheduled import Canary, Reconciler
from farcall_infra.constructs.stores import BlobStore, Database, Queue, Stores, TicketKey
from farcall_infra.constructs.traffic_shift import TrafficShift
from farcall_infra.constructs.web_api import STAGE, WebApi
from farcall_infra.deployment import (
    CACHE_FUNCTION_OUTPUT,
    CACHE_NAME_OUTPUT,
    EXPRESS_OUTPUT,
    LOGIN_OUTPUT,
    MIGRATOR_OUTPUT,
    OVERRIDES_OUTPUT,
    PROFILE_OUTPUT,
    SETTINGS_OUTPUT,
    STORAGE_OUTPUT,
    TARGET_OUTPUT,
    Deployment,
)


class NetworkStack(cdk.Stack):
    """The VPC and its security groups."""

    def __init__(self, scope: Construct, construct_id: str, *, deployment: Deployment) -> None:
        super().__init__(scope, construct_id, description="Farcall: network")
        profile = deployment.profile
        self.network = Network(
            self,
            "Network",
            shape=profile.network,
            forwarder=profile.forwarder,
            ipv6=deployment.target.ipv6,
        )


class DataStack(cdk.Stack):
    """Database, queue, blob bucket and ticket key."""

    def __init__(self, scope: Construct, construct_id: str, *, deployment: Deployment, network: Network) -> None:
        keep = deployment.keeps_data
        super().__init__(scope, construct_id, description="Farcall: data", termination_protection=keep)
        profile = deployment.profile
        tls = deployment.target.store_tls
        self.stores = Stores(
            database=Database(
                self,
                "Database",
                network=network,
                size=profile.database,
                tls=tls,
                verified=deployment.verifies_database,
                keep=keep,
            ),
            queue=Queue(self, "Queue", network=network, size=profile.queue, tls=tls),
            blobs=BlobStore(self, "Blobs", blob_days=profile.retention.blob_days, keep=keep),
            tickets=TicketKey(self, "Tickets"),
        )
        # `farcall cloud deploy` reads these outputs to show which settings it changes.
        cdk.CfnOutput(self, PROFILE_OUTPUT, value=profile.name)
        for section, values in deployment.settings.items():
            if section == "analytics" and not deployment.profile.analytics.enabled:
                continue
            name = f"{SETTINGS_OUTPUT}{section.capitalize()}"
            cdk.CfnOutput(self, name, value=json.dumps(values, separators=(",", ":")))
        if deployment.overrides:
            cdk.CfnOutput(self, OVERRIDES_OUTPUT, value=",".join(deployment.overrides))
        if not deployment.target.observed:  # `farcall cloud status` does not miss the stack
            cdk.CfnOutput(self, TARGET_OUTPUT, value=deployment.target.name)
        for program, arn in self.stores.database.login_arns.items():
            cdk.CfnOutput(self, f"{LOGIN_OUTPUT}{program.capitalize()}", value=arn)
        cdk.CfnOutput(self, "BlobBucket", value=self.stores.blobs.environment()["FARCALL_BLOB_BUCKET"])


class ApiStack(cdk.Stack):
    """Migration, API function behind API Gateway and its authorizer, reconciler, canary."""

    def __init__(
        self, scope: Construct, construct_id: str, *, deployment: Deployment, network: Network, stores: Stores
    ) -> None:
        super().__init__(scope, construct_id, description="Farcall: API")
        size = deployment.profile.api
        migration = Migration(self, "Migration", deployment=deployment, network=network, database=stores.database)
        identity = Identity(self, "Identity", deployment=deployment)
        key = CallerKey(self, "CallerKey", signer="authorizer")
        # A key of its own: with the authorizer's the canary could be anyone.
        canary_key = CallerKey(self, "CanaryKey", signer="canary") if deployment.profile.canary.minutes else None
        # The authorizer calls the identity provider, so it is outside of the VPC, which has no internet access.
        authorizer = PythonFunction(
            self,
            "Authorizer",
            deployment=deployment,
            handler="farcall_lambdas.handlers.authorizer.handle",
            description="Turns a bearer token into an identity",
            environment=identity.environment() | key.environment(),
            timeout_s=10,
            concurrency=deployment.authorizer_concurrency or None,
            parameters=identity.parameters,
        )
        identity.grant(authorizer.role)
        key.grant(authorizer.role)
        fleet = Fleet(deployment)
        api = PythonFunction(
            self,
            "Api",
            deployment=deployment,
            handler="farcall_lambdas.handlers.api.handle",
            description="The REST API",
            environment=stores.environment("api")
            | fleet.environment()
            | deployment.profile.api_environment()
            | key.environment()
            | identity.api_environment()
            | (canary_key.environment("FARCALL_CANARY_SECRET_ARN") if canary_key else {}),
            timeout_s=size.timeout_s,
            memory_mib=size.memory_mib,
            network=network,
            concurrency=deployment.api_concurrency or None,
            parameters=identity.parameters,
        )
        stores.grant(api.role, "api")
        fleet.grant(self, api.role)
        for each in (key, canary_key):
            if each:
                each.grant(api.role)
        api.node.add_dependency(migration)
        self.function = api.function
        self.authorizer = authorizer.function
        self.web_api = WebApi(
            self,
            "Web",
            size=size,
            handler=api.live,
            authorizer=authorizer.live,
            token_pattern=identity.token_pattern,
        )
        if deployment.shifts_traffic:
            TrafficShift(
                self,
                "Shift",
                aliases={"Api": api.live, "Authorizer": authorizer.live},
                alarms=[alarm_name(deployment.name, API_ERRORS)],
            )
        reconciler = Reconciler(self, "Reconciler", deployment=deployment, network=network, stores=stores)
        reconciler.node.add_dependency(migration)
        self.reconciler = reconciler.function
        self.canary: lambda_.Function | None = None
        if canary_key:
            self.canary = Canary(self, "Canary", deployment=deployment, api=api.live, key=canary_key).function
        cdk.CfnOutput(self, MIGRATOR_OUTPUT, value=migration.function.function_name)
        cdk.CfnOutput(self, "ApiUrl", value=self.web_api.url)
        cdk.CfnOutput(self, "ApiId", value=self.web_api.api_id)
        cdk.CfnOutput(self, "ApiStage", value=STAGE)


class ForwarderStack(cdk.Stack):
    """The Fargate service that holds the connections of endpoints and clients."""

    def __init__(
        self, scope: Construct, construct_id: str, *, deployment: Deployment, network: Network, stores: Stores
    ) -> None:
        super().__init__(scope, construct_id, description="Farcall: forwarder")
        forwarder = ForwarderService(self, "Forwarder", deployment=deployment, network=network, stores=stores)
        self.service = forwarder.service
        self.targets = forwarder.targets
        self.log_group = forwarder.log_group


class ObservabilityStack(cdk.Stack):
    """Metrics, alarms, dashboard, budget."""

    def __init__(self, scope: Construct, construct_id: str, *, deployment: Deployment, monitored: Monitored) -> None:
        super().__init__(scope, construct_id, description="Farcall: observability")
        profile, name = deployment.profile, deployment.name
        notifications = Notifications(self, "News", deployment=deployment)
        metrics = Metrics(self, "Metrics", deployment=name, monitored=monitored, sleeps=profile.forwarder.sleeps)
        Alarms(
            self,
            "Alarms",
            deployment=name,
            profile=profile,
            monitored=monitored,
            metrics=metrics,
            topic=notifications.topic,
        )
        sleeps = profile.forwarder.sleeps
        Dashboard(self, "Dashboard", name=name, monitored=monitored, metrics=metrics, sleeps=sleeps)
        cdk.CfnOutput(self, "AlarmTopic", value=notifications.topic.topic_arn)


class AnalyticsStack(cdk.Stack):
    """The storage of exchanges of farcall-analytics, and a policy for those who use it. Optional: no other stack needs
    it."""

    def __init__(self, scope: Construct, construct_id: str, *, deployment: Deployment, network: Network) -> None:
        super().__init__(scope, construct_id, description="Farcall: storage of analytics")
        shape, target = deployment.profile.analytics, deployment.target
        bucket = ExchangeBucket(self, "Exchange", keep=not target.deletable)
        cdk.CfnOutput(self, STORAGE_OUTPUT, value=bucket.address)
        statements = bucket.statements()
        if shape.express_zone and target.serverless:
            express = ExpressBucket(self, "Express", zone=shape.express_zone)
            cdk.CfnOutput(self, EXPRESS_OUTPUT, value=express.address)
            statements += express.statements()
        if shape.cache_gb and target.serverless:
            cache = ExchangeCache(self, "Cache", deployment=deployment, network=network)
            cdk.CfnOutput(self, CACHE_FUNCTION_OUTPUT, value=cache.function_arn)
            cdk.CfnOutput(self, CACHE_NAME_OUTPUT, value=cache.name)
            cdk.CfnOutput(self, "WorkerSecurityGroup", value=cache.workers.security_group_id)
            statements += cache.statements()
        policy = iam.ManagedPolicy(
            self, "Users", description="Programs and workers of farcall-analytics", statements=statements
        )
        suppress(
            policy,
            f"IAM5[Resource::<{self.resolve(bucket.bucket.bucket_arn)['Fn::GetAtt'][0]}.Arn>/*]",
            "The names of blocks have the id of a job, unknown in advance; the bucket holds nothing else, for a day.",
        )
        cdk.CfnOutput(self, "UserPolicy", value=policy.managed_policy_arn)
