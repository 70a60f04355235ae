"""A scripted cloud for tests of endpoints: real sockets, real CURVE, real HTTP, real processes, nothing behind them."""

from farcall_endpoint.testing.endpoint_process import EndpointProcess, running_endpoint, wait_gone, wait_until
from farcall_endpoint.testing.fake_cloud import Ended, FakeCloud

__all__ = ["Ended", "EndpointProcess", "FakeCloud", "running_endpoint", "wait_gone", "wait_until"]
