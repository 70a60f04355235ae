"""Load balancer of the forwarders: fixed addresses for sites with firewalls that list every destination."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_elasticloadbalancingv2 as elb
from constructs import Construct

from farcall_infra.constructs.nag_suppressions import suppress
from farcall_infra.constructs.network import Network
from farcall_infra.profiles import ForwarderSize


class LoadBalancer(Construct):
    """A network load balancer that passes TCP through, so that CURVE stays end to end; ``address`` is its DNS name.

    Its port is the forwarder's. Its health check is ``/healthz`` on the health port, not a connection to the ZeroMQ
    port. A draining task keeps its connections for ``drain_s`` seconds.
    """

    def __init__(
        self, scope: Construct, construct_id: str, *, network: Network, size: ForwarderSize, drain_s: int
    ) -> None:
        super().__init__(scope, construct_id)
        assert network.load_balancer is not None
        balancer = elb.NetworkLoadBalancer(
            self,
            "Balancer",
            vpc=network.vpc,
            internet_facing=True,
            cross_zone_enabled=True,
            security_groups=[network.load_balancer],
            subnet_mappings=[
                elb.SubnetMapping(subnet=subnet, allocation_id=allocation_id)
                for subnet, allocation_id in zip(network.vpc.public_subnets, network.addresses, strict=True)
            ],
        )
        suppress(
            balancer,
            "ELB2",
            "A network load balancer writes access logs for TLS listeners only, and this one passes CURVE through as "
            "TCP. The forwarder logs who connects.",
        )
        self._targets = elb.NetworkTargetGroup(
            self,
            "Targets",
            vpc=network.vpc,
            port=size.port,
            protocol=elb.Protocol.TCP,
            target_type=elb.TargetType.IP,
            deregistration_delay=cdk.Duration.seconds(drain_s),
            connection_termination=True,
            health_check=elb.HealthCheck(
                protocol=elb.Protocol.HTTP,
                path="/healthz",
                port=str(size.health_port),
                interval=cdk.Duration.seconds(10),
                healthy_threshold_count=2,
                unhealthy_threshold_count=2,
            ),
        )
        balancer.add_listener("Peers", port=size.port, protocol=elb.Protocol.TCP, default_target_groups=[self._targets])
        self.address = balancer.load_balancer_dns_name

    def add_service(self, service: ecs.FargateService) -> None:
        """Send peers to the tasks of ``service``."""
        service.attach_to_network_target_group(self._targets)
