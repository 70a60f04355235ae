"""Network load balancer for TCP: one relay process for each listener, with ECS tasks as targets."""

from __future__ import annotations

import uuid

from farcall_localstack_plugin.children import Child, ChildDied
from farcall_localstack_plugin.engines import HOST, start_relay
from farcall_localstack_plugin.providers import (
    Event,
    Model,
    Provider,
    Request,
    current,
    done,
    failed,
    new_name,
    schema,
    updated,
)
from farcall_localstack_plugin.settings import settings
from farcall_localstack_plugin.targets import TargetGroup

#: Attribute of a listener with the seconds without data after which it ends a connection, and its default.
_IDLE_S = "tcp.idle_timeout.seconds", "350"


_groups: dict[str, TargetGroup] = {}
_relays: dict[str, Child] = {}


def target_group(arn: str) -> TargetGroup:
    """The group with that ARN.

    :raises KeyError: if there is none.
    """
    return _groups[arn]


def _arn(request: Request, kind: str) -> str:
    return f"arn:aws:elasticloadbalancing:{request.region_name}:{request.account_id}:{kind}/{new_name(request)}"


class LoadBalancerProvider(Provider):
    """A name for the listeners, which do the work."""

    TYPE = "AWS::ElasticLoadBalancingV2::LoadBalancer"
    SCHEMA: Model = schema(TYPE, "LoadBalancerArn")

    def create(self, request: Request) -> Event:
        model = request.desired_state
        if model.get("Type") != "network":
            return failed(model, f"only network load balancers are supported here, not {model.get('Type')}")
        model |= {"LoadBalancerArn": _arn(request, "loadbalancer/net"), "DNSName": HOST}
        return done(model)


class TargetGroupProvider(Provider):
    """The file with the relay's targets, which ECS services register and whose health is checked."""

    TYPE = "AWS::ElasticLoadBalancingV2::TargetGroup"
    SCHEMA: Model = schema(TYPE, "TargetGroupArn")

    def create(self, request: Request) -> Event:
        model = request.desired_state
        model["TargetGroupArn"] = _arn(request, "targetgroup")
        directory = settings().directory / "targets" / uuid.uuid4().hex
        _groups[model["TargetGroupArn"]] = TargetGroup(directory, model, speed=settings().speed)
        return done(model)

    def update(self, request: Request) -> Event:
        model = updated(request)
        target_group(model["TargetGroupArn"]).update(model)
        return done(model)

    def delete(self, request: Request) -> Event:
        model = current(request)
        _groups.pop(model.get("TargetGroupArn", ""), None)
        return done(model)


class ListenerProvider(Provider):
    """Starts a relay on any free port: several deployments cannot share the port of the template."""

    TYPE = "AWS::ElasticLoadBalancingV2::Listener"
    SCHEMA: Model = schema(TYPE, "ListenerArn")

    def create(self, request: Request) -> Event:
        model = request.desired_state
        (action,) = model["DefaultActions"]
        if model["Protocol"] != "TCP" or action["Type"] != "forward":
            return failed(model, "a listener can only forward TCP connections here")
        model["ListenerArn"] = arn = _arn(request, "listener/net")
        group = target_group(action["TargetGroupArn"])
        try:
            _relays[arn], port = start_relay(new_name(request), group.file, settings=settings())
        except ChildDied as error:
            return failed(model, str(error))
        attributes = {each["Key"]: each["Value"] for each in model.get("ListenerAttributes", [])}
        group.use_listener(f"{HOST}:{port}", idle_s=float(attributes.get(*_IDLE_S)))
        return done(model)

    def delete(self, request: Request) -> Event:
        model = current(request)
        if relay := _relays.pop(model.get("ListenerArn", ""), None):
            relay.stop()
        return done(model)
