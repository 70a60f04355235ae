"""API stack: migration, API, reconciler and canary. It changes with every release."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_lambda as lambda_
from constructs import Construct

from farcall_infra.constructs.fleet import Fleet
from farcall_infra.constructs.function import PythonFunction
from farcall_infra.constructs.identity import Identity
from farcall_infra.constructs.migration import Migration
from farcall_infra.constructs.network import Network
from farcall_infra.constructs.scheduled import Canary, Reconciler
from farcall_infra.constructs.stores import Stores
from farcall_infra.constructs.web_api import STAGE, WebApi
from farcall_infra.deployment import Deployment


class ApiStack(cdk.Stack):
    """Migration, API function behind API Gateway and its authorizer, reconciler, canary."""

    def __init__(
        self, scope: Construct, construct_id: str, *, deployment: Deployment, network: Network, stores: Stores
    ) -> None:
        super().__init__(scope, construct_id, description="Farcall: API")
        size = deployment.profile.api
        migration = Migration(self, "Migration", deployment=deployment, network=network, database=stores.database)
        identity = Identity(self, "Identity", deployment=deployment)
        # The authorizer calls the identity provider, so it is outside of the VPC, which has no internet access.
        authorizer = PythonFunction(
            self,
            "Authorizer",
            deployment=deployment,
            handler="farcall_lambdas.handlers.authorizer.handle",
            description="Turns a bearer token into an identity",
            environment=identity.environment(),
            timeout_s=10,
        )
        identity.grant(authorizer.role)
        fleet = Fleet(deployment)
        api = PythonFunction(
            self,
            "Api",
            deployment=deployment,
            handler="farcall_lambdas.handlers.api.handle",
            description="The REST API",
            environment=stores.environment("api") | fleet.environment() | deployment.profile.api_environment(),
            timeout_s=size.timeout_s,
            memory_mib=size.memory_mib,
            network=network,
            concurrency=deployment.api_concurrency or None,
        )
        stores.grant(api.role, "api")
        fleet.grant(self, api.role)
        api.node.add_dependency(migration)
        self.function = api.function
        self.web_api = WebApi(self, "Web", size=size, handler=api.function, authorizer=authorizer.function)
        reconciler = Reconciler(self, "Reconciler", deployment=deployment, network=network, stores=stores)
        reconciler.node.add_dependency(migration)
        self.reconciler = reconciler.function
        self.canary: lambda_.Function | None = None
        if deployment.profile.canary.minutes:
            self.canary = Canary(self, "Canary", deployment=deployment, api=api.function).function
        cdk.CfnOutput(self, "ApiUrl", value=self.web_api.url)
        cdk.CfnOutput(self, "ApiId", value=self.web_api.api_id)
        cdk.CfnOutput(self, "ApiStage", value=STAGE)
