"""Fields of Globus Compute and Parsl that are not fields here: their names here, or why there is none."""

from __future__ import annotations

from typing import Final

RENAMED: Final = {
    "max_workers": "max_workers_per_node",
    "max_tasks_per_child": "max_tasks_per_worker",
    "prefetch_capacity": "prefetch",
    "run_in_sandbox": "sandbox",
}
"""Fields of the engine, and their names here."""

_PROTECTION: Final = "Farcall does not enforce it: an endpoint is private until its owner shares it"
_MANY_USERS: Final = "an endpoint runs as its owner, with one configuration"
_EACH_ADDRESS: Final = "without address, nodes try the name and each address of this machine"

REASONS: Final = {
    "admins": _PROTECTION,
    "amqp_port": "the agent has one outbound connection, to the forwarder",
    "audit_log_path": _MANY_USERS,
    "authentication_policy": _PROTECTION,
    "block_error_handler": "max_block_failures limits failed blocks",
    "encrypted": "connections to nodes are always encrypted",
    "endpoint_setup": "run its commands before farcall-endpoint start",
    "endpoint_teardown": "run its commands after farcall-endpoint stop",
    "environment": "the address of the API is in config.toml or FARCALL_API_URL",
    "high_assurance": _PROTECTION,
    "identity_mapping_config_path": _MANY_USERS,
    "idle_heartbeats_hard": "the agent runs until it is stopped; idle blocks are released",
    "idle_heartbeats_soft": "the agent runs until it is stopped; idle blocks are released",
    "label": "logs name the endpoint",
    "local_compute_services": "the address of the API is in config.toml or FARCALL_API_URL",
    "max_retries_on_system_failure": "each task has its own max_attempts",
    "max_workers_per_block": "an MPI task takes the nodes that it requests",
    "mpi_launcher": "write export FARCALL_MPI_LAUNCHER=... into worker_init",
    "multi_user": _MANY_USERS,
    "pam": _MANY_USERS,
    "public": "its owner shares an endpoint with users, groups or all",
    "strategy": "blocks follow the number of tasks; max_idletime releases idle ones",
    "strategy_period": "blocks follow the number of tasks at once",
    "subscription_id": "every feature is available without a subscription",
    "user_config_schema_path": _MANY_USERS,
    "user_config_template_path": _MANY_USERS,
    "worker_debug": "debug: true, at the top, logs more",
    "worker_logdir_root": "managers write their logs below the endpoint's directory",
}
"""Fields without an equivalent."""

ADDRESSES: Final = {
    "address_by_hostname": _EACH_ADDRESS,
    "address_by_query": "a public address is not needed; without address, nodes try each address of this machine",
    "address_by_route": _EACH_ADDRESS,
}
"""Kinds of ``address`` that are not needed."""

VALUES: Final = {
    "container_type: custom": "name the technology, and write its options into container_cmd_options",
    "container_type: none": "leave it out: tasks run in the endpoint's own Python then",
    "container_type: uv": "leave it out: a task names its packages, by requirements",
    "type: GlobusComputeEngine": "write FarcallEngine, or leave type out",
    "type: GlobusMPIEngine": "leave type out, and write export FARCALL_MPI_LAUNCHER=srun into worker_init",
    "type: ProcessPoolEngine": "leave type out; max_workers_per_node limits the workers",
    "type: ThreadPoolEngine": "leave type out; max_workers_per_node limits the workers",
}
"""Values that no field here has, as ``field: value``, and what to do."""


def advice(field: str) -> str:
    """Return the correction of a field of Globus Compute or Parsl; empty for any other name."""
    match field:
        case "job_status_kwargs":
            return "write its max_idletime under engine, without job_status_kwargs"
        case "ifname":
            return "write address: {interface: NAME}"
        case "idle_release":
            return "write max_idletime"
        case "heartbeat_s":
            return "write heartbeat_period"
        case _ if field in RENAMED:
            return f"write {RENAMED[field]}"
        case _ if field in REASONS:
            return f"remove it: {REASONS[field]}"
        case _:
            return ""
