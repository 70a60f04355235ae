"""A network load balancer of TCP connections: one relay process for each listener, tasks behind it."""

from __future__ import annotations

import json
import threading
import uuid
from pathlib import Path

from farcall_localstack_plugin.children import Child, ChildDied
from farcall_localstack_plugin.engines import HOST, start_relay
from farcall_localstack_plugin.files import write_whole
from farcall_localstack_plugin.providers import Event, Model, Provider, Request, done, failed, new_name, schema
from farcall_localstack_plugin.settings import settings

__all__ = ["ListenerProvider", "LoadBalancerProvider", "TargetGroup", "TargetGroupProvider", "target_group"]


class TargetGroup:
    """Where the relay may send connections. It reads the file anew for each one, so that what has left gets none."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.file = directory / "targets.json"
        self.address = ""  # of the listener that stands before the group; empty until there is one
        self._ports: list[int] = []
        self._lock = threading.Lock()
        self._write()

    def register(self, port: int) -> None:
        """Send connections to ``port`` of this machine too."""
        with self._lock:
            self._ports.append(port)
            self._write()

    def deregister(self, port: int) -> None:
        """Send no more connections to ``port``; those that it has stay, as they do on AWS."""
        with self._lock:
            if port in self._ports:
                self._ports.remove(port)
                self._write()

    def _write(self) -> None:
        write_whole(self.file, json.dumps(self._ports))


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
    """The name that listeners have in common; they do the work."""

    TYPE = "AWS::ElasticLoadBalancingV2::LoadBalancer"
    SCHEMA: Model = schema(TYPE, "LoadBalancerArn")

    def create(self, request: Request) -> Event:
        model = request.desired_state
        if model.get("Type") != "network":
            return failed(model, f"only network load balancers are available here, not {model.get('Type')}")
        model |= {"LoadBalancerArn": _arn(request, "loadbalancer/net"), "DNSName": HOST}
        return done(model)


class TargetGroupProvider(Provider):
    """The file that the relay reads its targets from; ECS services write it."""

    TYPE = "AWS::ElasticLoadBalancingV2::TargetGroup"
    SCHEMA: Model = schema(TYPE, "TargetGroupArn")

    def create(self, request: Request) -> Event:
        model = request.desired_state
        model["TargetGroupArn"] = _arn(request, "targetgroup")
        _groups[model["TargetGroupArn"]] = TargetGroup(settings().directory / "targets" / uuid.uuid4().hex)
        return done(model)

    def delete(self, request: Request) -> Event:
        model = request.previous_state or request.desired_state
        _groups.pop(model.get("TargetGroupArn", ""), None)
        return done(model)


class ListenerProvider(Provider):
    """Starts a relay on any free port: several deployments cannot all have the port of the template."""

    TYPE = "AWS::ElasticLoadBalancingV2::Listener"
    SCHEMA: Model = schema(TYPE, "ListenerArn")

    def create(self, request: Request) -> Event:
        model = request.desired_state
        (action,) = model["DefaultActions"]
        if model["Protocol"] != "TCP" or action["Type"] != "forward":
            return failed(model, "a listener can only pass TCP connections on here")
        model["ListenerArn"] = arn = _arn(request, "listener/net")
        group = target_group(action["TargetGroupArn"])
        try:
            _relays[arn], port = start_relay(new_name(request), group.file, settings=settings())
        except ChildDied as error:
            return failed(model, str(error))
        group.address = f"{HOST}:{port}"
        return done(model)

    def delete(self, request: Request) -> Event:
        model = request.previous_state or request.desired_state
        if relay := _relays.pop(model.get("ListenerArn", ""), None):
            relay.stop()
        return done(model)
