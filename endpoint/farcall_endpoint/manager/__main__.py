"""``python -m farcall_endpoint.manager``: what a provider starts, once per node."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from farcall_common.errors import ConfigurationError, Unavailable
from farcall_common.wire import new_id
from farcall_endpoint import protocol
from farcall_endpoint.logs import manager_log_file, set_up_logging
from farcall_endpoint.manager.core import ManagerCore
from farcall_endpoint.manager.launcher import FreshProcessLauncher
from farcall_endpoint.manager.ledger import Sharing, partition
from farcall_endpoint.manager.node import discover_node, has_amd_accelerators
from farcall_endpoint.manager.sandboxes import SandboxCleaner
from farcall_endpoint.manager.service import Manager
from farcall_endpoint.pipe import Pipe
from farcall_endpoint.prefetch import PrefetchPolicy

if TYPE_CHECKING:
    from farcall_endpoint.transport import SocketLink

_HORIZON_S = 0.003
"""Work to keep in each worker's socket: enough to hide a round trip, too little to be missed when it is recalled."""
_COLLECT_AFTER = 100_000
"""Thousands of tasks are alive at a time and none of them is garbage: look for it less often than the default."""


def main() -> None:
    """Serve an agent until it is gone or says stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--agent", required=True, help="addresses of the agent's socket, separated by commas")
    parser.add_argument("--agent-fd", type=int, help="descriptor of a pipe to an agent on this machine, instead")
    parser.add_argument("--agent-pid", type=int, help="of an agent on this machine")
    parser.add_argument("--heartbeat-threshold", type=float, default=120.0, help="seconds: most silence of an agent")
    parser.add_argument("--start-limit", type=float, default=60.0, help="seconds in which a worker has to start")
    parser.add_argument("--block-id", required=True)
    parser.add_argument("--walltime", type=float, help="seconds that the block lives")
    parser.add_argument("--slots", type=int, help="most workers; one for each core without")
    parser.add_argument("--cores-per-worker", type=float)
    parser.add_argument("--mem-per-worker", type=int, help="bytes")
    parser.add_argument("--accelerators", nargs="+", default=(), help="their names; one for each worker")
    parser.add_argument("--cpu-affinity", choices=("none", "block", "alternating"), default="none")
    parser.add_argument("--prefetch", type=int, required=True, help="most tasks to keep behind a running one")
    parser.add_argument("--no-batching", action="store_true", help="one task in each packet to a worker")
    parser.add_argument("--working-dir", type=Path, required=True)
    parser.add_argument("--sandbox", action="store_true", help="give each task a directory of its own")
    parser.add_argument("--sandbox-retention", type=float, help="seconds after its task that a sandbox is kept")
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
    manager_id = f"{options.block_id}-{socket.gethostname()}-{new_id()[:4]}"
    ends_at = None if options.walltime is None else end_of_block(options.walltime, os.environ, now=time.time())
    sharing = Sharing(
        max_workers=options.slots,
        cores_per_worker=options.cores_per_worker,
        memory_per_worker_bytes=options.mem_per_worker,
        accelerators=tuple(options.accelerators),
        cpu_affinity=options.cpu_affinity,
    )
    node = discover_node(sharing.accelerators, environ=os.environ)
    try:
        slots = partition(node, sharing)
        agent = _connect(options, manager_id)
    except (ConfigurationError, Unavailable) as error:
        sys.exit(str(error))
    if options.sandbox_retention is not None:
        SandboxCleaner(options.working_dir, retention_s=options.sandbox_retention).start()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)
    Manager(
        core=ManagerCore(
            slots=len(slots),
            prefetch=PrefetchPolicy(horizon_s=_HORIZON_S, limit=options.prefetch),
            batching=not options.no_batching,
            start_limit_s=options.start_limit,
        ),
        launcher=FreshProcessLauncher(
            working_dir=options.working_dir,
            environment=os.environ,
            slots=slots,
            amd=has_amd_accelerators(),
            sandboxed=options.sandbox,
        ),
        agent=agent,
        agent_pid=options.agent_pid,
        agent_silence_limit_s=options.heartbeat_threshold,
        memory_per_worker_bytes=sharing.memory_per_worker_bytes,
        registered=protocol.Registered(
            manager_id,
            protocol.software_fingerprint(),
            len(slots),
            os.getpid(),
            socket.gethostname(),
            options.block_id,
            capacity=protocol.Capacity(node.whole_cpus, node.memory_bytes, node.accelerators),
            ends_at=ends_at,
        ),
    ).run()


def _connect(options: argparse.Namespace, manager_id: str) -> Pipe | SocketLink:
    if options.agent_fd is not None:
        return Pipe(socket.socket(fileno=options.agent_fd))
    from farcall_endpoint.manager.network import connect

    return connect(options.agent.split(","), manager_id=manager_id, environ=os.environ)


def end_of_block(walltime_s: float, environ: Mapping[str, str], *, now: float) -> float:
    """When a block that lives so long is over: by the scheduler's own word, or as if it had begun now."""
    told = environ.get("SLURM_JOB_END_TIME", "")
    return min(now + walltime_s, float(told)) if told.isdigit() else now + walltime_s


if __name__ == "__main__":
    main()
