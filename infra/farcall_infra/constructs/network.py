"""The VPC and the four security groups.

There is no NAT anywhere. What is in the private subnets reaches S3 through a gateway endpoint and every other AWS API
over IPv6 through an egress-only gateway, both free; it cannot be reached from outside. The forwarder alone is in the
public subnets, with an address of its own.

The groups live here and not beside what they protect, so that no two stacks need each other.
"""

from __future__ import annotations

from aws_cdk import aws_ec2 as ec2
from constructs import Construct

from farcall_infra.profiles import NetworkShape

__all__ = ["POSTGRES_PORT", "VALKEY_PORT", "Network"]

POSTGRES_PORT = 5432
VALKEY_PORT = 6379

# A synth without an account knows no more zones of a region than two.
_ZONES = 2


class Network(Construct):
    """``vpc``, its ``private`` subnets, and the groups ``functions``, ``forwarder``, ``database`` and ``queue``."""

    def __init__(
        self, scope: Construct, construct_id: str, *, shape: NetworkShape, forwarder_port: int, ipv6: bool
    ) -> None:
        super().__init__(scope, construct_id)
        private = ec2.SubnetType.PRIVATE_WITH_EGRESS if ipv6 else ec2.SubnetType.PRIVATE_ISOLATED
        self.private = ec2.SubnetSelection(subnet_type=private)
        self.vpc = ec2.Vpc(
            self,
            "Vpc",
            ip_protocol=ec2.IpProtocol.DUAL_STACK if ipv6 else ec2.IpProtocol.IPV4_ONLY,
            max_azs=_ZONES,
            nat_gateways=0,
            restrict_default_security_group=False,  # it would need a Node function; nothing uses that group
            subnet_configuration=[
                ec2.SubnetConfiguration(name="Public", subnet_type=ec2.SubnetType.PUBLIC, cidr_mask=24),
                ec2.SubnetConfiguration(name="Private", subnet_type=private, cidr_mask=22),
            ],
            gateway_endpoints={"S3": ec2.GatewayVpcEndpointOptions(service=ec2.GatewayVpcEndpointAwsService.S3)},
        )
        self.functions = self._group("Functions", "Functions of the control plane")
        self.forwarder = self._group("Forwarder", "The forwarder, which endpoints and clients connect to")
        self.database = self._group("Database", "PostgreSQL", outbound=False)
        self.queue = self._group("Queue", "Valkey", outbound=False)
        for peer in (self.functions, self.forwarder):
            self.database.add_ingress_rule(peer, ec2.Port.tcp(POSTGRES_PORT), "from the cloud tier")
            self.queue.add_ingress_rule(peer, ec2.Port.tcp(VALKEY_PORT), "from the cloud tier")
        for cidr in shape.forwarder_cidrs:
            peer_range = ec2.Peer.ipv6(cidr) if ":" in cidr else ec2.Peer.ipv4(cidr)
            self.forwarder.add_ingress_rule(peer_range, ec2.Port.tcp(forwarder_port), "endpoints and clients")

    def _group(self, name: str, description: str, *, outbound: bool = True) -> ec2.SecurityGroup:
        return ec2.SecurityGroup(
            self,
            name,
            vpc=self.vpc,
            description=description,
            allow_all_outbound=outbound,
            allow_all_ipv6_outbound=outbound,
            disable_inline_rules=False,
        )
