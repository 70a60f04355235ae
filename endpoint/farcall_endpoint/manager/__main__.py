"""Manager process: ``python -m farcall_endpoint.manager``, started by a provider once per node."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import random
import resource
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from farcall_common.errors import ConfigurationError, Unavailable
from farcall_common.wire import new_id
from farcall_endpoint.config.settings import EnvironmentSettings, QosSettings
from farcall_endpoint.contracts import agent_manager
from farcall_endpoint.contracts.prefetch import PrefetchPolicy
from farcall_endpoint.environments.prepare.technologies import technologies
from farcall_endpoint.graphs.values import GraphSettings
from farcall_endpoint.host.cgroups import Cgroups, writable_hierarchies
from farcall_endpoint.host.isolation import Isolation, NodeIsolation, best_of, process_limits
from farcall_endpoint.host.isolation.paths import MEMORY_PREFIX, SHARED_MEMORY
from farcall_endpoint.host.isolation.process import make_private
from farcall_endpoint.host.logs import manager_log_file, set_up_logging
from farcall_endpoint.host.memory_directories import MEMORY_KEY, MemoryDirectories
from farcall_endpoint.host.node import discover_node, has_amd_accelerators
from farcall_endpoint.host.pipe import Pipe
from farcall_endpoint.host.process_directory import ProcessDirectory
from farcall_endpoint.host.slots import Sharing, extra_workers, latency_workers, partition
from farcall_endpoint.manager.core.manager import ManagerCore
from farcall_endpoint.manager.core.warm_pool import WarmPoolSettings
from farcall_endpoint.manager.shell.block_server import BlockServer
from farcall_endpoint.manager.shell.cpu_shares import CpuShares
from farcall_endpoint.manager.shell.file_copies import FileCopies, address_towards
from farcall_endpoint.manager.shell.launcher import FreshProcessLauncher
from farcall_endpoint.manager.shell.service import Manager
from farcall_endpoint.manager.shell.worker_process import Confinement, Workplace
from farcall_endpoint.worker.directories import remove_old_sandboxes
from farcall_endpoint.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from farcall_endpoint.host.transport import SocketLink

_logger = logging.getLogger(__name__)

_HORIZON_S: Final = 0.003
"""Work to keep in each worker's socket: enough to hide a round trip, little enough to recall."""
_GC_THRESHOLD: Final = 100_000
"""Thousands of tasks are alive at a time and none of them is garbage: collect less often than the default."""
_MOST_GRAPH_DISK_BYTES: Final = 16 * 2**30
_MIN_CLEAN_PERIOD_S: Final = 1.0
_MAX_CLEAN_PERIOD_S: Final = 600.0


class SandboxCleaner(threading.Thread):
    """Sandbox retention: removes old sandboxes. A thread, because removing many files may take long.

    :param retention_s: how long after the end of its task a sandbox is kept.
    """

    def __init__(self, working_dir: Path, *, retention_s: float) -> None:
        super().__init__(name="farcall-sandboxes", daemon=True)
        self._working_dir = working_dir
        self._retention_s = retention_s

    def run(self) -> None:
        """Check for old sandboxes until the process ends."""
        period_s = min(max(_MIN_CLEAN_PERIOD_S, self._retention_s / 10), _MAX_CLEAN_PERIOD_S)
        timer = threading.Event()
        while not timer.wait(period_s):
            for sandbox in remove_old_sandboxes(self._working_dir, retention_s=self._retention_s):
                _logger.debug("removed %s, %g s after the end of its task", sandbox, self._retention_s)


def main() -> None:
    """Serve an agent until it is gone or stops the manager."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--agent", help="addresses of the agent's socket, separated by commas")
    parser.add_argument("--agent-fd", type=int, help="instead: descriptor of a pipe to an agent on this machine")
    parser.add_argument("--agent-pid", type=int, help="process id of an agent on this machine")
    parser.add_argument(
        "--heartbeat-threshold",
        type=float,
        default=120.0,
        help="seconds without a message after which the agent counts as lost",
    )
    parser.add_argument("--start-limit", type=float, default=60.0, help="seconds within which a worker must start")
    parser.add_argument("--block-id", required=True)
    parser.add_argument("--walltime", type=float, help="lifetime of the block in seconds")
    parser.add_argument("--slots", type=int, help="maximum number of workers; default: one for each core")
    parser.add_argument("--cores-per-worker", type=float)
    parser.add_argument("--mem-per-worker", type=int, help="bytes")
    parser.add_argument("--accelerators", nargs="+", default=(), help="names of accelerators; one for each worker")
    parser.add_argument("--cpu-affinity", choices=("none", "block", "alternating"), default="none")
    parser.add_argument(
        "--prefetch", type=int, required=True, help="maximum number of tasks queued behind a running one"
    )
    parser.add_argument("--no-batching", action="store_true", help="send one task in each packet to a worker")
    parser.add_argument("--working-dir", type=Path, required=True)
    parser.add_argument("--sandbox", action="store_true", help="run each task in a separate directory")
    parser.add_argument("--sandbox-retention", type=float, help="seconds for which a sandbox is kept after its task")
    parser.add_argument("--allowed-serializers", nargs="+", default=(), help="ids of the strategies that may be read")
    parser.add_argument("--data-only", action="store_true", help="unless these are given: read arguments in JSON only")
    parser.add_argument("--isolation", choices=tuple(Isolation), type=Isolation, default=Isolation.AUTO)
    parser.add_argument("--readable", nargs="+", default=(), help="directories that confined tasks may read")
    parser.add_argument("--private", nargs="+", type=Path, default=(), help="directories that they never may")
    parser.add_argument(
        "--max-processes", type=int, default=0, help="of a worker, for tasks of submitters other than the owner; 0: any"
    )
    parser.add_argument(
        "--pass-environment", nargs="+", default=(), help="variables for tasks of submitters other than the owner"
    )
    parser.add_argument("--environments", help="EnvironmentSettings in JSON")
    parser.add_argument("--qos", help="QosSettings in JSON")
    parser.add_argument("--graph-memory", type=int, help="bytes for values between calls of graphs, in memory")
    parser.add_argument("--graph-disk", type=int, help="bytes for such values on disk")
    parser.add_argument("--node-memory", action="store_true", help="make such a directory for this node, for blocks")
    parser.add_argument("--memory-root", type=Path, help="where the directories of submitters in memory are")
    parser.add_argument("--node-cache", type=int, default=0, help="bytes for copies of files on this node")
    parser.add_argument("--node-dir", type=Path, help="where these are; default: the temporary directory")
    parser.add_argument("--native", action="store_true", help="for an engine, which has no other submitters")
    parser.add_argument("--log-dir", type=Path, help="directory of the managers' logs; default: log to standard error")
    parser.add_argument("--log-max-bytes", type=int, default=10 * 2**20)
    parser.add_argument("--log-backups", type=int, default=4)
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="log warnings and errors only")
    options = parser.parse_args()
    make_private()
    memory_key = os.environ.pop(MEMORY_KEY, "")  # tasks must not see it
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
        isolation = NodeIsolation(Isolation.NONE) if options.native else best_of(options.isolation)
        agent, agent_host = _connect(options, manager_id)
    except (ConfigurationError, Unavailable) as error:
        sys.exit(str(error))
    if options.sandbox_retention is not None:
        SandboxCleaner(options.working_dir, retention_s=options.sandbox_retention).start()
    environments = EnvironmentSettings()
    if options.environments is not None:
        environments = msgspec.json.decode(options.environments, type=EnvironmentSettings)
    if environments.memory_bytes is None:
        environments = msgspec.structs.replace(environments, memory_bytes=node.memory_bytes // 2)
    processes = process_limits.share(options.max_processes, workers=len(slots))
    qos = QosSettings() if options.qos is None else msgspec.json.decode(options.qos, type=QosSettings)
    files = _file_copies(options, agent_host)
    node_memory = _node_memory() if options.node_memory else None
    memory = None
    # With bubblewrap, other submitters' directories do not exist for a task; below landlock, nothing protects a key.
    is_sealed = isolation.landlock and not isolation.bubblewrap
    if node_memory is not None:
        memory = MemoryDirectories(node_memory.path, secrets.token_bytes(16), is_sealed=is_sealed)
    elif options.memory_root:
        memory = MemoryDirectories(options.memory_root, memory_key.encode(), is_sealed=is_sealed)
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    Manager(
        core=ManagerCore(
            slots=len(slots),
            # A process keeps what it has in the memory of an accelerator.
            steps_aside=not any(slot.accelerators for slot in slots),
            prefetch=PrefetchPolicy(horizon_s=_HORIZON_S, limit=options.prefetch),
            batching=not options.no_batching,
            start_limit_s=options.start_limit,
            shared_workers=isolation.level is Isolation.NONE,
            refusal=isolation.refusal,
            default_environment=environments.default,
            environment_start_limit_s=environments.start_limit_s,
            warm=WarmPoolSettings(
                idle_s=environments.idle_s,
                memory_bytes=environments.memory_bytes,
                eviction=environments.eviction,
                extra_workers=extra_workers(slots, environments.extra_workers),
            ),
            tasks_per_worker=environments.tasks_per_worker,
            graphs=_graph_settings(options, node.memory_bytes),
            types=technologies(environments),
            agent_host=agent_host,
            node_cache_bytes=options.node_cache,
            qos=qos,
            latency_workers=latency_workers(slots, qos.latency_workers),
            jitter=random.random,
        ),
        launcher=FreshProcessLauncher(
            Workplace(
                working_dir=options.working_dir,
                environment=os.environ,
                slots=slots,
                amd=has_amd_accelerators(),
                settings=WorkerSettings(
                    sandboxed=options.sandbox,
                    allowed_serializers=tuple(options.allowed_serializers),
                    data_only=options.data_only,
                    native=options.native,
                    is_of_node=node_memory is not None,
                ),
                passed=options.pass_environment,
                confinement=Confinement(options.readable, isolation.landlock, isolation.bubblewrap)
                if isolation.landlock or isolation.bubblewrap
                else None,
                private=options.private,
                memory=memory,
                processes=processes,
                copies=None if files is None else files.directory_of,
            ),
            environments=environments,
            log_dir=options.log_dir,
        ),
        agent=agent,
        agent_pid=options.agent_pid,
        agent_silence_limit_s=options.heartbeat_threshold,
        memory_per_worker_bytes=sharing.memory_per_worker_bytes,
        processes=processes,
        shares=CpuShares(Cgroups(writable_hierarchies()), processors=node.whole_cpus, actuator=qos.actuator),
        files=files,
        blocks=BlockServer(memory, host=(lambda: address_towards(agent_host)) if node_memory is not None else None),
        registered=agent_manager.Registered(
            manager_id,
            agent_manager.software_fingerprint(),
            len(slots),
            os.getpid(),
            socket.gethostname(),
            options.block_id,
            capacity=agent_manager.Capacity(node.whole_cpus, node.memory_bytes, node.accelerators),
            ends_at=ends_at,
            isolation=isolation.level,
            refusal=isolation.refusal,
            environments=technologies(environments),
            files_address="" if files is None else files.address,
            has_blocks=node_memory is not None,
            latency_workers=latency_workers(slots, qos.latency_workers),
        ),
    ).run()
    if node_memory is not None:
        node_memory.remove()


def _node_memory() -> ProcessDirectory | None:
    """The directory of submitters in the memory of this node; None if there can be none."""
    try:
        directory = ProcessDirectory(Path(SHARED_MEMORY), prefix=MEMORY_PREFIX)
    except OSError as error:
        _logger.warning("tasks keep no blocks in the memory of this node: %s", error)
        return None
    directory.remove_leftovers()
    return directory


def _file_copies(options: argparse.Namespace, agent_host: str) -> FileCopies | None:
    """The copies of files on this node; None if it keeps none, or cannot: then tasks read those of the endpoint."""
    if not options.node_cache:
        return None
    parent = options.node_dir or Path(tempfile.gettempdir())
    try:
        return FileCopies(parent, working_dir=options.working_dir, host=address_towards(agent_host))
    except OSError as error:
        _logger.error("this node keeps no copies of files: %s", error)
        return None


def _graph_settings(options: argparse.Namespace, memory_bytes: int) -> GraphSettings:
    disk_bytes = options.graph_disk
    if disk_bytes is None:
        disk_bytes = _MOST_GRAPH_DISK_BYTES
        with contextlib.suppress(OSError):  # the first worker makes the directory, or says why it cannot
            disk_bytes = min(disk_bytes, shutil.disk_usage(options.working_dir).free // 2)
    return GraphSettings(
        memory_bytes=memory_bytes // 4 if options.graph_memory is None else options.graph_memory,
        disk_bytes=disk_bytes,
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2,
        node=socket.gethostname(),
    )


def _connect(options: argparse.Namespace, manager_id: str) -> tuple[Pipe | SocketLink, str]:
    """The connection to the agent, and the host where that is."""
    if options.agent_fd is not None:
        return Pipe(socket.socket(fileno=options.agent_fd)), "127.0.0.1"
    from farcall_endpoint.host.transport import connect_to_agent  # loads ZeroMQ, which a local manager does not need

    link = connect_to_agent(options.agent.split(","), manager_id=manager_id, environ=os.environ)
    return link, link.host


def end_of_block(walltime_s: float, environ: Mapping[str, str], *, now: float) -> float:
    """The end of the block: as reported by Slurm, or ``walltime_s`` from now."""
    slurm_end = environ.get("SLURM_JOB_END_TIME", "")
    return min(now + walltime_s, float(slurm_end)) if slurm_end.isdigit() else now + walltime_s


if __name__ == "__main__":
    main()
