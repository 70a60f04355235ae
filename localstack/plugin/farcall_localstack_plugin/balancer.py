"""Network load balancer for TCP: one relay process for each listener, with ECS tasks as targets."""

from __future__ import annotations

import json
import threading
import uuid
from pathlib import Path

from farcall_localstack_plugin.children import Child, ChildDied
from farcall_localstack_plugin.engines import HOST, start_relay
from farcall_localstack_plugin.files import write_whole
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
)
from farcall_localstack_plugin.settings import settings


class TargetGroup:
    """The targets of a relay, in a file. The relay reads it for each connection, so a deregistered target gets none."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.file = directory / "targets.json"
        self.address = ""  # of the group's listener; empty until there is one
        self._ports: list[int] = []
        self._lock = threading.Lock()
        self._write()

    def register(self, port: int) -> None:
        """Send connections also to ``port`` of this machine."""
        with self._lock:
            self._ports.append(port)
            self._write()

    def deregister(self, port: int) -> None:
        """Send no more connections to ``port``; its connections stay open, as on AWS."""
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
    """The file with the relay's targets, written by ECS services."""

    TYPE = "AWS::ElasticLoadBalancingV2::TargetGroup"
    SCHEMA: Model = schema(TYPE, "TargetGroupArn")

    def create(self, request: Request) -> Event:
        model = request.desired_state
        model["TargetGroupArn"] = _arn(request, "targetgroup")
        _groups[model["TargetGroupArn"]] = TargetGroup(settings().directory / "targets" / uuid.uuid4().hex)
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
        group.address = f"{HOST}:{port}"
        return done(model)

    def delete(self, request: Request) -> Event:
        model = current(request)
        if relay := _relays.pop(model.get("ListenerArn", ""), None):
            relay.stop()
        return done(model)
