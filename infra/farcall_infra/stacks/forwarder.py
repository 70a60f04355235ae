"""Forwarder stack: the Fargate service. It changes with every release."""

from __future__ import annotations

import aws_cdk as cdk
from constructs import Construct

from farcall_infra.constructs.forwarder_service import ForwarderService
from farcall_infra.constructs.network import Network
from farcall_infra.constructs.stores import Stores
from farcall_infra.deployment import Deployment


class ForwarderStack(cdk.Stack):
    """The Fargate service that holds the connections of endpoints and clients."""

    def __init__(
        self, scope: Construct, construct_id: str, *, deployment: Deployment, network: Network, stores: Stores
    ) -> None:
        super().__init__(scope, construct_id, description="Farcall: forwarder")
        forwarder = ForwarderService(self, "Forwarder", deployment=deployment, network=network, stores=stores)
        self.service = forwarder.service
        self.log_group = forwarder.log_group
