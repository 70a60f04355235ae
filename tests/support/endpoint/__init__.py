"""Scripted peers of endpoints: real sockets, CURVE, HTTP and processes, without a cloud behind them."""

from tests.support.endpoint.endpoint_process import EndpointProcess, running_endpoint, wait_gone
from tests.support.endpoint.fake_agent import FakeAgent
from tests.support.endpoint.fake_cloud import Ended, FakeCloud
from tests.support.endpoint.faults import Fault, FaultInjector, FaultKind, plan_faults

__all__ = [
    "Ended",
    "EndpointProcess",
    "FakeAgent",
    "FakeCloud",
    "Fault",
    "FaultInjector",
    "FaultKind",
    "plan_faults",
    "running_endpoint",
    "wait_gone",
]
