"""``python -m farcall_endpoint.manager``: what a provider starts, once per node."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import socket
from pathlib import Path

import zmq

from farcall_endpoint import protocol
from farcall_endpoint.logs import manager_log_file, set_up_logging
from farcall_endpoint.manager.core import ManagerCore
from farcall_endpoint.manager.launcher import FreshProcessLauncher
from farcall_endpoint.manager.service import Manager
from farcall_endpoint.prefetch import PrefetchPolicy
from farcall_endpoint.transport import agent_socket

_HORIZON_S = 0.003
"""Work to keep in each worker's socket: enough to hide a round trip, too little to be missed when it is recalled."""
_COLLECT_AFTER = 100_000
"""Thousands of tasks are alive at a time and none of them is garbage: look for it less often than the default."""


def main() -> None:
    """Serve an agent until it is gone or says stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--agent", required=True, help="address of the agent's socket")
    parser.add_argument("--agent-pid", type=int, help="of an agent on this machine")
    parser.add_argument("--heartbeat-threshold", type=float, default=120.0, help="seconds: most silence of an agent")
    parser.add_argument("--start-limit", type=float, default=60.0, help="seconds in which a worker has to start")
    parser.add_argument("--manager-id", required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--prefetch", type=int, required=True, help="most tasks to keep behind a running one")
    parser.add_argument("--no-batching", action="store_true", help="one task in each packet to a worker")
    parser.add_argument("--working-dir", type=Path, required=True)
    parser.add_argument("--log-dir", type=Path, help="of the managers' logs; to standard error without")
    parser.add_argument("--log-max-bytes", type=int, default=10 * 2**20)
    parser.add_argument("--log-backups", type=int, default=4)
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="log what is wrong, and nothing else")
    options = parser.parse_args()
    set_up_logging(
        file=options.log_dir and manager_log_file(options.log_dir),
        to_console=options.log_dir is None,
        role="manager",
        level=logging.DEBUG if options.debug else logging.WARNING if options.quiet else logging.INFO,
        style=options.log_format,
        max_bytes=options.log_max_bytes,
        backups=options.log_backups,
    )
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)
    with zmq.Context() as context:
        Manager(
            core=ManagerCore(
                slots=options.slots,
                prefetch=PrefetchPolicy(horizon_s=_HORIZON_S, limit=options.prefetch),
                batching=not options.no_batching,
                start_limit_s=options.start_limit,
            ),
            launcher=FreshProcessLauncher(working_dir=options.working_dir, environment=os.environ),
            agent=agent_socket(context, address=options.agent, manager_id=options.manager_id),
            agent_pid=options.agent_pid,
            agent_silence_limit_s=options.heartbeat_threshold,
            registered=protocol.Registered(
                options.manager_id,
                protocol.software_fingerprint(),
                options.slots,
                os.getpid(),
                socket.gethostname(),
            ),
        ).run()


if __name__ == "__main__":
    main()
