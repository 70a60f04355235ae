"""Network stack: VPC and security groups. It rarely changes."""

from __future__ import annotations

import aws_cdk as cdk
from constructs import Construct

from farcall_infra.constructs.network import Network
from farcall_infra.deployment import Deployment


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
