"""``python -m farcall_endpoint.worker DESCRIPTOR``: what a launcher starts. DESCRIPTOR is the worker's channel end."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys

from farcall_endpoint.worker.capture import Capture
from farcall_endpoint.worker.channel import Channel, Ready, Run
from farcall_endpoint.worker.runner import Runner


def main(descriptor: int) -> None:
    """Serve tasks until the manager is gone."""
    faulthandler.enable()
    os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=descriptor))
    runner = Runner(Capture(), endpoint_id=os.environ.get("FARCALL_ENDPOINT_ID", ""))
    channel.send(Ready(os.getpid()))
    while (received := channel.receive()) is not None:
        order, body = received
        assert isinstance(order, Run)
        answer, result = runner.run(order, body)
        channel.send(answer, (result,))


if __name__ == "__main__":
    main(int(sys.argv[1]))
