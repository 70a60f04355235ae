"""Data stack: database, queue, blobs and ticket key, which the other stacks use."""

from __future__ import annotations

import json

import aws_cdk as cdk
from constructs import Construct

from farcall_infra.constructs.network import Network
from farcall_infra.constructs.stores import BlobStore, Database, Queue, Stores, TicketKey
from farcall_infra.deployment import OVERRIDES_OUTPUT, PROFILE_OUTPUT, SETTINGS_OUTPUT, Deployment


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
            name = f"{SETTINGS_OUTPUT}{section.capitalize()}"
            cdk.CfnOutput(self, name, value=json.dumps(values, separators=(",", ":")))
        if deployment.overrides:
            cdk.CfnOutput(self, OVERRIDES_OUTPUT, value=",".join(deployment.overrides))
        cdk.CfnOutput(self, "BlobBucket", value=self.stores.blobs.environment()["FARCALL_BLOB_BUCKET"])
