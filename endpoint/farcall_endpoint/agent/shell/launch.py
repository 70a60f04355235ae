"""Launch of an agent: builds its parts from an endpoint's directory, and runs it."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import platform
import random
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from secrets import token_bytes
from typing import TYPE_CHECKING, Final

import msgspec
import zmq

from farcall_common.credentials import GLOBUS_CLIENT_VARIABLES, Credentials, expanded
from farcall_common.environments import TYPES
from farcall_common.errors import ConfigurationError
from farcall_common.limits import MAX_FRAME_BYTES, MAX_KEPT_OUTPUT_BYTES
from farcall_common.payload import STRATEGIES, parse_allowed
from farcall_common.wire import Capabilities
from farcall_endpoint.agent.core.agent import AgentCore
from farcall_endpoint.agent.core.connection import Connection
from farcall_endpoint.agent.core.scheduling import load_policy
from farcall_endpoint.agent.shell.access import Access
from farcall_endpoint.agent.shell.fleet import Fleet
from farcall_endpoint.agent.shell.links import Uplink
from farcall_endpoint.agent.shell.memory_root import MemoryRoot
from farcall_endpoint.agent.shell.nodes import expect_workers, image_check, make_network, plan_blocks, provider_of
from farcall_endpoint.agent.shell.output_store import OutputStore
from farcall_endpoint.agent.shell.payers import Payers
from farcall_endpoint.agent.shell.sealing import CallOpener, seal_result
from farcall_endpoint.agent.shell.service import Agent, Clock
from farcall_endpoint.agent.shell.spool import Spool
from farcall_endpoint.agent.shell.transfers import Background, Transfers
from farcall_endpoint.config.providers import KubernetesProviderConfig, LocalProviderConfig
from farcall_endpoint.config.reader import check_binds
from farcall_endpoint.config.schema import Config, EngineConfig
from farcall_endpoint.config.section import BYTES_PER_GB
from farcall_endpoint.contracts.agent_manager import Limits
from farcall_endpoint.contracts.prefetch import PrefetchPolicy
from farcall_endpoint.environments.prepare.technologies import find_installed
from farcall_endpoint.environments.runners.registry import RUNNERS
from farcall_endpoint.files.client import TransferClient
from farcall_endpoint.files.movers import BATCH_SCHEMES
from farcall_endpoint.files.places import files_directory, has_leftovers
from farcall_endpoint.files.plan import Staging
from farcall_endpoint.files.reading import ReadableFiles
from farcall_endpoint.files.settings import GlobusSettings, Storage, TransferSettings
from farcall_endpoint.providers import Provider
from farcall_endpoint.services.cloud import Cloud
from farcall_endpoint.services.directory import EndpointDirectory
from farcall_endpoint.services.sweeper import Sweeper, place_of
from farcall_endpoint.services.valkey import ValkeyServers

if TYPE_CHECKING:
    from farcall_endpoint.agent.core.signatures import SignatureCheck

_logger = logging.getLogger(__name__)

_MANAGER_HORIZON_S: Final = 0.1
_AGENT_HORIZON_S: Final = 1.0
_MAX_WINDOW: Final = 1024
_PACKAGES: Final = ("cloudpickle", "dill", "farcall-common", "farcall-endpoint", "msgspec")


def capabilities(*, signed_functions: bool = False, containers: tuple[str, ...] = ()) -> Capabilities:
    """Return the capabilities of this endpoint: its Python, platform, serializers, packages and containers."""
    return Capabilities(
        python_version=platform.python_version(),
        software_version=importlib.metadata.version("farcall-endpoint"),
        platform=platform.platform(),
        hostname=socket.gethostname(),
        serializers=tuple(sorted(STRATEGIES)),
        packages={name: importlib.metadata.version(name) for name in _PACKAGES},
        signed_functions=signed_functions,
        containers=containers,
    )


def offered_containers(engine: EngineConfig) -> tuple[str, ...]:
    """The technologies of environments that tasks may name: those that are allowed and, where the agent's machine is
    the node, installed. Whether they work, each manager finds out on its node."""
    allowed = TYPES if engine.environments.types is None else engine.environments.types
    return tuple(sorted(find_installed(allowed) if isinstance(engine.provider, LocalProviderConfig) else allowed))


def check_default_environment(engine: EngineConfig) -> None:
    """Make sure that the environment of tasks that name none can work here, where the agent's machine is the node.

    :raises ConfigurationError: if it cannot.
    """
    environment = engine.default_environment
    if environment is None or not isinstance(engine.provider, LocalProviderConfig):
        return
    if reason := RUNNERS[environment.type].missing():
        raise ConfigurationError(
            f"container_type: {environment.type} does not work on this machine: {reason}.",
            hint="Install it, choose another container_type, or remove container_type and container_uri; "
            "`farcall-endpoint diagnose` lists what works.",
        )
    if environment.location.startswith("/") and not Path(environment.location).exists():
        raise ConfigurationError(
            f"container_uri: {environment.location} does not exist on this machine.", hint="Write another path."
        )


def run_agent(
    directory: EndpointDirectory,
    *,
    config: Config,
    login: Credentials | None,
    own_environment: Mapping[str, str],
    environment: Mapping[str, str],
    on_connected: Callable[[], None],
) -> None:
    """Run an endpoint in this process until SIGTERM or SIGINT. The first start registers it with the API.

    :param login: of the endpoint's owner; None if the endpoint has a credential.
    :param own_environment: with the secret of a client, if it logs in as one.
    :param environment: of managers on this machine.
    :raises FarcallError: when it cannot start, or trying again cannot help.
    """
    check_default_environment(config.engine)
    check_binds(config, directory.config_file)
    check_storages(config)
    slots = expect_workers(config.engine.provider, config.engine.sharing, environment=environment)
    with (
        directory.lock(),
        contextlib.closing(
            provider_of(
                config.engine.provider, name=directory.name, environment=environment, script_dir=directory.script_dir
            )
        ) as provider,
        contextlib.closing(Spool(directory.spool_file)) as spool,
        contextlib.closing(OutputStore(directory.output_file, budget_bytes=config.output_storage * 10**6)) as output,
        contextlib.closing(MemoryRoot(is_wanted=_has_memory(config))) as memory,
        zmq.Context() as context,
    ):
        keys = directory.read_keys()
        access = Access(directory, login, cloud_of=functools.partial(Cloud, environ=own_environment))
        endpoint_id = directory.read_endpoint_id() or _register(directory, config, access)
        signatures = _signature_check(directory, config)
        able = capabilities(signed_functions=signatures is not None, containers=offered_containers(config.engine))
        secrets = None if config.sealed == "off" else directory.make_sealing()
        sealing = None if secrets is None else secrets.public(endpoint_id=endpoint_id)
        poller = zmq.Poller()
        seed = random.getrandbits(32)
        core = _core(directory, config, endpoint_id, slots, seed=seed, signatures=signatures)
        working_dir = directory.path / config.engine.working_dir
        background = Background()
        fleet = _fleet(
            directory,
            config,
            slots=slots,
            endpoint_id=endpoint_id,
            provider=provider,
            context=context,
            poller=poller,
            core=core,
            spool=spool,
            memory=memory,
        )
        fleet.payers = Payers(directory.payers_file)
        agent = Agent(
            endpoint_id=endpoint_id,
            heartbeat_s=config.heartbeat_period,
            capabilities=able,
            core=core,
            connection=Connection(heartbeat_s=config.heartbeat_period, rng=random.Random(seed)),  # noqa: S311
            spool=spool,
            output=output,
            opener=CallOpener(
                secrets, endpoint_id=endpoint_id, is_required=config.sealed == "required", was_opened=spool.was_opened
            ),
            uplink=Uplink(context, keys, poller),
            fleet=fleet,
            poller=poller,
            background=background,
            transfers=Transfers(connect_tries=2) if config.blobs == "auto" else Transfers(),
            blobs=config.blobs,
            transfer_memory_bytes=config.transfer_memory * 10**6,
            ask_api=lambda: access.connect(
                endpoint_id,
                public_key=keys.public,
                spool_id=spool.spool_id,
                capabilities=able,
                worker_share=config.engine.worker_share,
                sealing=sealing,
            ),
            clock=Clock(),
            on_connected=on_connected,
            on_owner=directory.write_owner_id,
            on_status=directory.write_status,
            on_events=directory.write_events,
            read_prewarms=directory.read_prewarms,
            write_baselines=directory.write_baselines,
            seed=seed,
            valkey=ValkeyServers(
                config.data.valkey_settings,
                is_local=isinstance(config.engine.provider, LocalProviderConfig),
                ports=config.engine.worker_port_range,
                submit=background.submit,
                send=fleet.answer_valkey,
            ),
            sweeper=Sweeper(
                working_dir,
                memory.path,
                config.data.sweep_settings,
                payers=functools.partial(_places_of_payers, fleet.payers, memory),
            ),
            file_transfers=TransferClient(
                functools.partial(transfer_settings, config, directory),
                poller=poller,
                owner_or=fleet.owner_or,
                environment={**environment, **_globus_secrets(own_environment)},
            ),
            readable_files=readable_files(config, directory, memory),
            has_leftovers=functools.partial(has_leftovers, working_dir),
        )
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it
                signal.signal(number, lambda *_: agent.stop(grace_s=config.shutdown_grace))
        _logger.info("endpoint %s (%s) starts", directory.name, endpoint_id)
        agent.run()
        _logger.info("endpoint %s has ended", directory.name)


def _places_of_payers(payers: Payers, memory: MemoryRoot) -> dict[str, str]:
    """The payers of service accounts, both by the places that the sweeper has for their directories."""
    places: dict[str, str] = {}
    for submitter, payer in payers.items():
        places[place_of(submitter)] = place_of(payer)
        if (in_memory := memory.of(submitter)) is not None and (of_payer := memory.of(payer)) is not None:
            places[in_memory.name] = of_payer.name
    return places


def _has_memory(config: Config) -> bool:
    """Whether submitters have directories in memory, which all of their tasks can see."""
    return isinstance(config.engine.provider, LocalProviderConfig) and config.data.memory != 0


def _node_memory_options(config: Config) -> list[str]:
    """Return the command-line options of managers on nodes that do not share the agent's memory."""
    is_local = isinstance(config.engine.provider, LocalProviderConfig)
    return [] if is_local or config.data.memory == 0 else ["--node-memory"]


def check_storages(config: Config) -> None:
    """Make sure that the storages for files of tasks have the options that they need.

    :raises ConfigurationError: if options of a storage are missing or invalid.
    """
    if not any(each.options for each in config.files.storages):
        return
    # Here, because it takes a while to load.
    from farcall_endpoint.files.movers.objects import open_store

    for number, each in enumerate(config.files.storages):
        scheme, _, rest = each.url.partition("://")
        if not each.options:
            continue
        try:
            open_store(f"{scheme}://{rest.partition('/')[0]}", each.options)
        except ValueError as error:
            raise ConfigurationError(
                f"files.storages[{number}].options: {error}",
                hint="The options are those of obstore: region, endpoint, access_key_id, secret_access_key, ...; $NAME "
                "is a variable of the environment in which the endpoint is started.",
            ) from error


def readable_files(config: Config, directory: EndpointDirectory, memory: MemoryRoot) -> ReadableFiles | None:
    """Return the files that tasks at other endpoints may read from this endpoint; None if they may read none."""
    if not (config.files.enabled and config.files.serve):
        return None
    settings = transfer_settings(config, directory)
    return ReadableFiles(
        working_dir=Path(settings.working_dir),
        storages=settings.storages,
        is_restricted=settings.is_restricted,
        memory_of=memory.of,
    )


def transfer_settings(config: Config, directory: EndpointDirectory) -> TransferSettings:
    """Return the settings of an endpoint's transfer process."""
    return TransferSettings(
        directory=str(directory.path / "files"),
        working_dir=str(directory.path / config.engine.working_dir),
        cache_bytes=config.files.cache_bytes,
        storages=tuple([Storage(**msgspec.structs.asdict(each)) for each in config.files.storages]),
        is_restricted=config.data_only,
        globus=GlobusSettings.of_config(config, directory),
    )


def _globus_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The secret of a client of Globus, which managers do not get."""
    return {name: environment[name] for _, name in GLOBUS_CLIENT_VARIABLES if name in environment}


def _register(directory: EndpointDirectory, config: Config, access: Access) -> str:
    endpoint_id = access.register(
        name=directory.name,
        display_name=config.display_name or directory.name,
        metadata={"hostname": socket.gethostname(), "python_version": platform.python_version()},
    )
    directory.write_endpoint_id(endpoint_id)
    _logger.info("registered as endpoint %s", endpoint_id)
    return endpoint_id


def _signature_check(directory: EndpointDirectory, config: Config) -> SignatureCheck | None:
    """Which functions have a signature that counts; None if they need none.

    :raises ConfigurationError: if the file cannot be read, or others than its owner may write it.
    """
    if config.allowed_signers is None:
        return None
    # Here, because other endpoints need no cryptography, which takes a while to import.
    from farcall_common.ssh_signatures import AllowedSigners
    from farcall_endpoint.agent.core.signatures import SignatureCheck

    path = directory.path / expanded(config.allowed_signers)
    try:
        text, mode = path.read_text(encoding="utf-8"), path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"allowed_signers: {path} cannot be read: {error}.") from error
    if mode & 0o022:
        raise ConfigurationError(
            f"allowed_signers: other users may write {path}.", hint=f"Run `chmod go-w {path}` after a look at it."
        )
    signers = AllowedSigners.parse(text, source=str(path))
    _logger.info("only functions signed by one of %d keys run here (%s)", len(signers), path)
    return SignatureCheck(signers)


def _core(
    directory: EndpointDirectory,
    config: Config,
    endpoint_id: str,
    slots: int,
    *,
    seed: int,
    signatures: SignatureCheck | None = None,
) -> AgentCore:
    limit = config.engine.prefetch
    return AgentCore(
        endpoint_id=endpoint_id,
        policy=load_policy(config.engine.scheduling, random.Random(seed)),  # noqa: S311 - nothing secret
        slots_hint=slots,
        prefetch=PrefetchPolicy(horizon_s=_MANAGER_HORIZON_S, limit=limit),
        window=PrefetchPolicy(horizon_s=_AGENT_HORIZON_S, limit=_MAX_WINDOW, unseen=16),
        max_window=_MAX_WINDOW,
        block_s=config.engine.provider.walltime_s,
        drain_s=config.engine.drain_period,
        max_walltime_s=config.engine.limits.walltime_s,
        weights=config.fair_share,
        allowed_functions=config.allowed_functions,
        signatures=signatures,
        seal=seal_result,
        image_check=image_check(config.engine.environment_settings(directory.path), owner_id=directory.read_owner_id)
        if isinstance(config.engine.provider, KubernetesProviderConfig)
        else None,
        default_environment=config.engine.default_environment,
        jitter=random.Random(seed).random,  # noqa: S311 - nothing secret
        staging=Staging(
            max_transfers=config.files.max_transfers,
            silence_s=config.files.transfer_limit,
            limit_s=config.files.total_limit,
            batch_schemes=frozenset() if config.files.globus is None else BATCH_SCHEMES,
            reads_endpoints=True,
            refusal=config.files_refusal,
            most_bytes=config.files.cache_bytes,
            for_nodes=config.files.node_cache_bytes > 0,
            jitter=random.Random(seed).random,  # noqa: S311 - nothing secret
        ),
        qos=config.qos.settings,
        baselines=directory.read_baselines(),
    )


def _fleet(
    directory: EndpointDirectory,
    config: Config,
    *,
    slots: int,
    endpoint_id: str,
    provider: Provider,
    context: zmq.Context[zmq.Socket[bytes]],
    poller: zmq.Poller,
    core: AgentCore,
    spool: Spool,
    memory: MemoryRoot,
) -> Fleet:
    engine = config.engine
    fleet = Fleet(
        context,
        poller=poller,
        provider=provider,
        blocks=plan_blocks(
            engine.provider,
            slots=slots,
            max_failures=engine.max_block_failures,
            failure_period_s=engine.block_failure_period,
            idle_release_s=engine.max_idletime,
        ),
        network=make_network(
            engine.provider,
            address=engine.address,
            ports=engine.worker_port_range,
            max_frame_bytes=2 * MAX_FRAME_BYTES,  # results are smaller, and CURVE adds to them
        ),
        command_options=[*_manager_options(directory, config), *memory.options, *_node_memory_options(config)],
        variables={"FARCALL_ENDPOINT_ID": endpoint_id, **memory.variables},
        function_body=spool.function,
        payload=spool.payload_to_send,
        demand=core.demand,
        image_of=core.image_of,
        heartbeat_s=engine.heartbeat_period,
        silence_limit_s=engine.heartbeat_threshold,
        limits=Limits(
            engine.limits.walltime_s,
            engine.limits.memory_bytes,
            engine.limits.output,
            None if config.kept_output_bytes == MAX_KEPT_OUTPUT_BYTES else config.kept_output_bytes,
        ),
        is_restricted=config.data_only,
        results_memory_bytes=config.transfer_memory * 10**6,
        files_dir=lambda task_id, submitter: str(
            files_directory(directory.path / config.engine.working_dir, task_id, submitter)
        ),
        files_key=token_bytes(32),
    )
    fleet.owner_id = directory.read_owner_id()
    return fleet


def _manager_options(directory: EndpointDirectory, config: Config) -> list[str]:
    """The command-line options of every manager."""
    working_dir = directory.path / config.engine.working_dir
    working_dir.mkdir(parents=True, exist_ok=True)
    options = [*config.engine.sharing.options(), "--prefetch", str(config.engine.prefetch)]
    options += ["--working-dir", str(working_dir), "--log-dir", str(directory.log_dir)]
    options += ["--sandbox"] if config.engine.sandbox else []
    if config.engine.sandbox_retention is not None:
        options += ["--sandbox-retention", str(config.engine.sandbox_retention)]
    if config.engine.allowed_serializers is not None:
        options += ["--allowed-serializers", *sorted(parse_allowed(config.engine.allowed_serializers))]
    options += ["--isolation", config.engine.isolation, "--private", str(directory.path), str(directory.path.parent)]
    options += ["--max-processes", str(config.engine.limits.processes)]
    if config.engine.readable_paths:
        options += ["--readable", *config.engine.readable_paths]
    if config.engine.pass_environment:
        options += ["--pass-environment", *config.engine.pass_environment]
    for name, gigabytes in (("--graph-memory", config.engine.graph_memory), ("--graph-disk", config.engine.graph_disk)):
        options += [] if gigabytes is None else [name, str(int(gigabytes * BYTES_PER_GB))]
    settings = config.engine.environment_settings(directory.path)
    options += ["--environments", msgspec.json.encode(settings).decode()]
    options += ["--qos", msgspec.json.encode(config.qos.settings).decode()]
    if config.files.node_cache_bytes:
        options += ["--node-cache", str(config.files.node_cache_bytes)]
        if config.files.node_dir is not None:
            options += ["--node-dir", str(expanded(config.files.node_dir))]
    options += ["--data-only"] if config.data_only else []
    options += ["--log-max-bytes", str(config.log_max_bytes), "--log-backups", str(config.log_backups)]
    options += ["--log-format", config.log_format, *(["--debug"] if config.debug else [])]
    return options
