"""Data stack: what must not be lost, and what the other stacks hold on to."""

from __future__ import annotations

import aws_cdk as cdk
from constructs import Construct

from farcall_infra.constructs.network import Network
from farcall_infra.constructs.stores import BlobStore, Database, Queue, Stores, TicketKey
from farcall_infra.deployment import Deployment

__all__ = ["DataStack"]


class DataStack(cdk.Stack):
    """Database, queue, blob bucket and ticket key."""

    def __init__(self, scope: Construct, construct_id: str, *, deployment: Deployment, network: Network) -> None:
        keep = deployment.keeps_data
        super().__init__(scope, construct_id, description="Farcall: data", termination_protection=keep)
        profile = deployment.profile
        tls = deployment.target.store_tls
        self.stores = Stores(
            database=Database(self, "Database", network=network, size=profile.database, tls=tls, keep=keep),
            queue=Queue(self, "Queue", network=network, size=profile.queue, tls=tls),
            blobs=BlobStore(self, "Blobs", blob_days=profile.retention.blob_days, keep=keep),
            tickets=TicketKey(self, "Tickets"),
        )
        cdk.CfnOutput(self, "Profile", value=profile.name)  # what `farcall cloud deploy` goes on with
        cdk.CfnOutput(self, "BlobBucket", value=self.stores.blobs.environment()["FARCALL_BLOB_BUCKET"])
