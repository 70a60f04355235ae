"""Nodes of an endpoint: the provider, the plan for its blocks, and the addresses at which nodes reach the agent."""

from __future__ import annotations

import fnmatch
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

from farcall_common.environments import Environment
from farcall_common.errors import ConfigurationError
from farcall_common.wire import new_id
from farcall_endpoint.agent.core.blocks import Blocks, SimpleScaling
from farcall_endpoint.agent.core.environments import image_of
from farcall_endpoint.agent.shell.links import Network
from farcall_endpoint.config.providers import LocalProviderConfig, ProviderConfig
from farcall_endpoint.config.schema import InterfaceConfig
from farcall_endpoint.config.settings import EnvironmentSettings
from farcall_endpoint.host.isolation.environment import SECRETS
from farcall_endpoint.host.node import discover_node
from farcall_endpoint.host.slots import Sharing, partition
from farcall_endpoint.host.transport import FleetKeys, new_curve_keys
from farcall_endpoint.providers import LocalProvider, Provider


def own_addresses(given: str | InterfaceConfig | None) -> Sequence[str]:
    """The given name or address, or those of the given interface; else this machine's name and the IPv4 addresses of
    its interfaces, the most likely first. Managers try them in turn.

    :raises ConfigurationError: if this machine has no such interface, or it has no address.
    """
    if isinstance(given, InterfaceConfig):
        return _interface_addresses(given.interface)
    if given is not None:
        return [given]
    active = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    addresses = [
        address.address
        for name, entries in psutil.net_if_addrs().items()
        if name in active
        for address in entries
        if address.family is socket.AF_INET and not address.address.startswith("127.")
    ]
    return [socket.gethostname(), *addresses]


def _interface_addresses(name: str) -> Sequence[str]:
    by_name = {
        interface: [entry.address for entry in entries if entry.family is socket.AF_INET]
        for interface, entries in psutil.net_if_addrs().items()
    }
    if addresses := by_name.get(name):
        return addresses
    others = ", ".join(sorted(interface for interface, found in by_name.items() if found)) or "none"
    raise ConfigurationError(
        f"engine.address: the interface {name!r} {'has no IPv4 address' if name in by_name else 'does not exist'} on "
        f"{socket.gethostname()}.",
        hint=f"Interfaces with an address: {others}.",
    )


def image_check(
    settings: EnvironmentSettings | None, *, owner_id: Callable[[], str]
) -> Callable[[Environment, str], str]:
    """Why a submitter (empty: the owner) may not have an environment's image run in a pod; empty if it may, or has
    none.

    :param settings: the technologies and locations that are allowed.
    """
    rules = settings or EnvironmentSettings()

    def check(environment: Environment, submitter: str) -> str:
        if not image_of(environment):
            return ""
        if rules.types is not None and environment.type not in rules.types:
            return f"the endpoint's settings do not allow {environment.type}"
        is_foreign = submitter not in ("", owner_id())
        if (
            is_foreign
            and rules.locations
            and not any(fnmatch.fnmatch(environment.location, each) for each in rules.locations)
        ):
            return "the endpoint's settings do not allow its location to other users than the owner"
        return ""

    return check


_LOCAL_BACKOFF_S: Final = 1.0
_BATCH_BACKOFF_S: Final = 5.0


def provider_of(config: ProviderConfig, *, name: str, environment: Mapping[str, str], script_dir: Path) -> Provider:
    """The provider that a configuration names.

    :param name: of the endpoint.
    :param environment: of managers on this machine; nodes elsewhere have their own.
    :param script_dir: for what a scheduler reads and writes; on a file system that the nodes share.
    :raises ConfigurationError: if it cannot be used from here.
    """
    if isinstance(config, LocalProviderConfig):
        return LocalProvider({name: value for name, value in environment.items() if name not in SECRETS})
    from farcall_endpoint.providers.batch import BatchProvider
    from farcall_endpoint.providers.schedulers import make_scheduler

    scheduler = make_scheduler(config, script_dir=script_dir)
    return BatchProvider(
        scheduler,
        name=name,
        script_dir=script_dir,
        walltime_s=config.walltime_s,
        worker_init=config.worker_init,
    )


def expect_workers(config: ProviderConfig, sharing: Sharing, *, environment: Mapping[str, str]) -> int:
    """Workers to expect on each node.

    :raises ConfigurationError: if the node is this machine, and not even one worker fits.
    """
    if isinstance(config, LocalProviderConfig):
        return len(partition(discover_node(sharing.accelerators, environ=environment), sharing))
    return sharing.guess(len(os.sched_getaffinity(0)))


def plan_blocks(
    config: ProviderConfig, *, slots: int, max_failures: int, failure_period_s: float, idle_release_s: float
) -> Blocks:
    """When to start blocks, and when to release them.

    :param slots: workers to expect on each node, until one has shown how many it has.
    :param max_failures, failure_period_s: see :class:`Blocks`.
    """
    return Blocks(
        policy=SimpleScaling(
            min_blocks=config.min_blocks,
            max_blocks=config.max_blocks,
            parallelism=config.parallelism,
            idle_release_s=idle_release_s,
        ),
        first_blocks=config.first_blocks,
        slots_per_block=slots * config.nodes_per_block,
        max_failures=max_failures,
        failure_period_s=failure_period_s,
        backoff_s=_LOCAL_BACKOFF_S if isinstance(config, LocalProviderConfig) else _BATCH_BACKOFF_S,
        new_block_id=lambda: f"block-{new_id()[:8]}",
    )


def make_network(
    config: ProviderConfig,
    *,
    address: str | InterfaceConfig | None,
    ports: tuple[int, int] | None,
    max_frame_bytes: int | None = None,
) -> Network | None:
    """How nodes reach this machine; None if they are this machine.

    :raises ConfigurationError: if the machine lacks the interface that ``address`` names.
    """
    if isinstance(config, LocalProviderConfig):
        return None
    return Network(own_addresses(address), FleetKeys(new_curve_keys(), new_curve_keys()), ports, max_frame_bytes)
