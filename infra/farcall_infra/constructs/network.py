"""The VPC, its security groups, and the fixed addresses of a load balancer.

There is no NAT. Programs in the private subnets reach S3 through a gateway endpoint and every other AWS API over IPv6
through an egress-only gateway, both free; they cannot be reached from outside. Only the forwarder is in the public
subnets, with its own address. With a load balancer, it can be reached only through that.

Groups and addresses are here, and not next to their resources, so that no two stacks depend on each other, and so that
replacing a load balancer does not change the addresses in sites' firewalls.
"""

from __future__ import annotations

from aws_cdk import aws_ec2 as ec2
from constructs import Construct

from farcall_infra.constructs.nag_suppressions import suppress
from farcall_infra.profiles import ZONES, ForwarderSize, NetworkShape

POSTGRES_PORT = 5432
VALKEY_PORT = 6379


class Network(Construct):
    """``vpc``, its ``private`` subnets, and the groups ``functions``, ``forwarder``, ``database`` and ``queue``.

    With a load balancer also its group ``load_balancer``, and the allocation ids of its ``addresses``, one for each
    public subnet.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        shape: NetworkShape,
        forwarder: ForwarderSize,
        ipv6: bool,
    ) -> None:
        super().__init__(scope, construct_id)
        private = ec2.SubnetType.PRIVATE_WITH_EGRESS if ipv6 else ec2.SubnetType.PRIVATE_ISOLATED
        self.private = ec2.SubnetSelection(subnet_type=private)
        self.vpc = ec2.Vpc(
            self,
            "Vpc",
            ip_protocol=ec2.IpProtocol.DUAL_STACK if ipv6 else ec2.IpProtocol.IPV4_ONLY,
            # CDK accepts only one of the two.
            max_azs=None if shape.zones else ZONES,
            availability_zones=list(shape.zones) or None,
            nat_gateways=0,
            restrict_default_security_group=False,  # that would need a Node function; nothing uses the group
            subnet_configuration=[
                ec2.SubnetConfiguration(name="Public", subnet_type=ec2.SubnetType.PUBLIC, cidr_mask=24),
                ec2.SubnetConfiguration(name="Private", subnet_type=private, cidr_mask=22),
            ],
            gateway_endpoints={"S3": ec2.GatewayVpcEndpointOptions(service=ec2.GatewayVpcEndpointAwsService.S3)},
        )
        suppress(
            self.vpc,
            "VPC7",
            "Flow logs cost half a dollar per GB of traffic. The groups let in the ports of the stores within and one "
            "from outside, and the services behind them authenticate every caller. Flow logs can be added to this VPC "
            "if required.",
        )
        self.functions = self._group("Functions", "Functions of the control plane")
        self.forwarder = self._group("Forwarder", "The forwarder, which endpoints and clients connect to")
        self.database = self._group("Database", "PostgreSQL", outbound=False)
        self.queue = self._group("Queue", "Valkey", outbound=False)
        for peer in (self.functions, self.forwarder):
            self.database.add_ingress_rule(peer, ec2.Port.tcp(POSTGRES_PORT), "from the cloud tier")
            self.queue.add_ingress_rule(peer, ec2.Port.tcp(VALKEY_PORT), "from the cloud tier")
        if shape.secrets_endpoint:
            self._add_secrets_endpoint()
        self.load_balancer: ec2.SecurityGroup | None = None
        reached = self.forwarder
        self.addresses: list[str] = []
        if shape.load_balancer:
            self.load_balancer = reached = self._group("Front", "The load balancer before the forwarder")
            for port in (forwarder.port, forwarder.health_port):
                self.forwarder.add_ingress_rule(self.load_balancer, ec2.Port.tcp(port), "from the load balancer")
            self.addresses = [
                ec2.CfnEIP(self, f"Address{number}", domain="vpc").attr_allocation_id
                for number, _subnet in enumerate(self.vpc.public_subnets, start=1)
            ]
        for cidr in shape.forwarder_cidrs:
            peer_range = ec2.Peer.ipv6(cidr) if ":" in cidr else ec2.Peer.ipv4(cidr)
            reached.add_ingress_rule(peer_range, ec2.Port.tcp(forwarder.port), "endpoints and clients")
        suppress(
            reached,
            "EC23",
            "The one port that endpoints and clients connect to, from anywhere unless network.forwarder_cidrs is "
            "narrower. CURVE refuses every key that the API did not admit.",
        )

    def _add_secrets_endpoint(self) -> None:
        """A VPC endpoint for Secrets Manager. All programs in the VPC use it, the forwarder included."""
        group = self._group("Secrets", "Secrets Manager", outbound=False)
        for peer in (self.functions, self.forwarder):
            group.add_ingress_rule(peer, ec2.Port.tcp(443), "from the cloud tier")
        self.vpc.add_interface_endpoint(
            "SecretsManager",
            service=ec2.InterfaceVpcEndpointAwsService.SECRETS_MANAGER,
            subnets=self.private,
            security_groups=[group],
            open=False,
        )

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
