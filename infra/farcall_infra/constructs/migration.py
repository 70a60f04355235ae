"""Database migration: CloudFormation runs it when the code has changed, before any program uses the schema."""

from __future__ import annotations

import aws_cdk as cdk
from constructs import Construct

from farcall_infra.bundles import LAMBDAS
from farcall_infra.constructs.function import PythonFunction
from farcall_infra.constructs.network import Network
from farcall_infra.constructs.stores import Database
from farcall_infra.deployment import Deployment

# CloudFormation waits a minute longer than Lambda's limit for the function, which answers before Lambda kills it.
_TIMEOUT_S = 840
_ANSWERED_S = 900


class Migration(Construct):
    """Depend on this construct to run after the schema is up to date.

    The function answers CloudFormation itself (``migration_resource.handle``), without CDK's provider framework: that
    consists of Node functions, which the offline tier does not run.
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
            environment=database.migrator_environment(),
            timeout_s=_TIMEOUT_S,
            network=network,
        )
        # The function itself, and no alias: CloudFormation refuses another function for an existing resource.
        # No retries: CloudFormation has its answer, and may already be rolling back.
        migrator.function.configure_async_invoke(retry_attempts=0)
        database.grant_migrator(migrator.role)
        self.function = migrator.function
        resource = cdk.CustomResource(
            self,
            "Run",
            resource_type="Custom::FarcallMigration",
            service_token=migrator.function.function_arn,
            service_timeout=cdk.Duration.seconds(_ANSWERED_S),
            # The migration runs again when one of these changes: the code, the roles' secrets, or their connection
            # limits.
            properties={
                "Bundle": deployment.packed(LAMBDAS).digest(deployment.target.wheels),
                "Roles": database.role_secret_arns,
                "Connections": str(deployment.profile.database.connections),
            },
        )
        resource.node.add_dependency(migrator)
