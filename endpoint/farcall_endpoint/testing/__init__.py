"""A scripted cloud for tests of endpoints: real sockets, real CURVE, real HTTP, real processes, nothing behind them."""

from farcall_endpoint.testing.endpoint_process import EndpointProcess, running_endpoint, wait_gone, wait_until
from farcall_endpoint.testing.fake_agent import FakeAgent
from farcall_endpoint.testing.fake_cloud import Ended, FakeCloud
from farcall_endpoint.testing.faults import Fault, FaultInjector, FaultKind, plan_faults

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
    "wait_until",
]
