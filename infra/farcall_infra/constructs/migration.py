"""Database migrations: CloudFormation runs them when the code has changed, before anything uses the schema."""

from __future__ import annotations

import aws_cdk as cdk
from constructs import Construct

from farcall_infra.bundles import LAMBDAS
from farcall_infra.constructs.function import PythonFunction
from farcall_infra.constructs.network import Network
from farcall_infra.constructs.stores import Database
from farcall_infra.deployment import Deployment

__all__ = ["Migration"]

_TIMEOUT_S = 600


class Migration(Construct):
    """Depend on this construct to run after the schema is up to date.

    The function answers CloudFormation by itself (``migration_resource.handle``) and not through CDK's provider
    framework: that one is made of Node functions, which the offline tier does not run.
    """

    def __init__(
        self, scope: Construct, construct_id: str, *, deployment: Deployment, network: Network, database: Database
    ) -> None:
        super().__init__(scope, construct_id)
        migrator = PythonFunction(
            self,
            "Migrator",
            deployment=deployment,
            handler="migration_resource.handle",
            description="Brings the database schema up to date",
            environment=database.environment(),
            timeout_s=_TIMEOUT_S,
            network=network,
            retried=False,  # CloudFormation has its answer, and may be putting back the old code
        )
        database.grant(migrator.role)
        resource = cdk.CustomResource(
            self,
            "Run",
            resource_type="Custom::FarcallMigration",
            service_token=migrator.function.function_arn,
            service_timeout=cdk.Duration.seconds(_TIMEOUT_S),
            properties={"Bundle": deployment.packed(LAMBDAS).digest(deployment.target.wheels)},
        )
        resource.node.add_dependency(migrator)
