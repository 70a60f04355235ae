"""Endpoint shapes, and the connections of agents and of result streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError

from farcall_lambdas.models.fields import (
    MAX_FUNCTIONS_ALLOWED,
    Description,
    FunctionReference,
    Id,
    Ids,
    Maybe,
    Metadata,
    PublicKey,
    Shape,
    Strategies,
    Text,
    Title,
    WaitingTasks,
)

#: Key in an endpoint's metadata that only a connect writes: the workers, as the agent reported them.
RUNTIME: Final = "runtime"

#: A key of 32 bytes or a signature of 64, in Base64.
PublicBytes = Annotated[str, Field(max_length=88, pattern="^[A-Za-z0-9+/]{43,86}={1,2}$")]


class _EndpointFields(Shape):
    display_name: Title | None = None
    description: Description | None = None
    multi_user: bool | None = None
    public: bool | None = None
    allowed_functions: (
        Annotated[list[FunctionReference], Field(fail_fast=True, max_length=MAX_FUNCTIONS_ALLOWED)] | None
    ) = None
    metadata: Metadata | None = None
    subscription_uuid: Id | None = None
    authentication_policy: Id | None = None
    high_assurance: bool | None = None
    admins: Ids | None = None


class RegisterEndpoint(_EndpointFields):
    endpoint_name: Annotated[Title, Field(min_length=1)]


class UpdateEndpoint(_EndpointFields):
    """A field that is not sent stays as it is. ``waiting_tasks``: whether open tasks that would be refused now are
    cancelled ("cancel", the default if the change takes rights away) or may still run ("keep")."""

    endpoint_name: Annotated[Title, Field(min_length=1)] | None = None
    waiting_tasks: WaitingTasks | None = None


class EndpointTaskEntry(Shape):
    """An open task of an endpoint, as the endpoint's owner sees it. ``age_s`` since its submission."""

    task_id: str
    submitter: str
    function_id: str
    function_version: int
    status: str
    age_s: float


class EndpointTasks(Shape):
    """Open tasks, by their ids. ``next`` is left out when there are no more; ``after`` takes it."""

    tasks: list[EndpointTaskEntry]
    next: Maybe[str] = None


class CancelEndpointTasks(Shape):
    """Tasks to cancel: ``task_ids``, or else those of ``submitter``, of ``function_id``, or of both; after ``after``,
    which is ``next`` of an answer."""

    task_ids: Annotated[Ids, Field(min_length=1)] | None = None
    submitter: Id | None = None
    function_id: Id | None = None
    after: Id | None = None


class QueueInfo(Shape):
    """Globus Compute hands out message-broker queues. Ours is one connection, made by POSTing to ``connection_url``."""

    connection_url: str
    exchange: str
    queue: str


class ResultQueueInfo(QueueInfo):
    queue_publish_kwargs: dict[str, Any] = Field(default_factory=dict)


class EndpointRegistered(Shape):
    endpoint_id: str
    task_queue_info: QueueInfo
    result_queue_info: ResultQueueInfo


class EndpointRegisteredV2(EndpointRegistered):
    warnings: list[str] = Field(default_factory=list)


class EndpointEntry(Shape):
    """An endpoint in a list; ``owned`` by the caller or not, ``status`` online or offline. Clients of Globus Compute do
    not get these two."""

    uuid: str
    name: str
    display_name: str | None
    owner: str
    owned: Maybe[bool] = None
    status: Maybe[str] = None


class EndpointRuntime(Shape):
    """Workers of an endpoint, as its agent reported when it last connected: Python version, packages with versions, ids
    of the serialisation strategies that they read (left out by agents that read all), the operating system,
    and the technologies of environments that they run in (``containers``)."""

    python_version: str
    packages: dict[str, Any]
    serializers: Maybe[list[str]] = None
    platform: Maybe[str] = None
    containers: Maybe[list[str]] = None

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> EndpointRuntime | None:
        """The runtime in an endpoint's metadata; None without one that can be read."""
        try:
            return cls.model_validate(metadata.get(RUNTIME))
        except ValidationError:
            return None


class SealingKeyShape(Shape):
    """The public key to which clients seal calls of an endpoint, signed by the endpoint's identity. Bytes are Base64;
    ``created_at`` is in epoch seconds."""

    identity: PublicBytes
    key: PublicBytes
    created_at: Annotated[int, Field(ge=0, lt=2**53)]
    signature: PublicBytes

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> SealingKeyShape | None:
        """The key in an endpoint's metadata; None without one that can be read."""
        reported = metadata.get(RUNTIME)
        try:
            return cls.model_validate(reported.get("sealing") if isinstance(reported, Mapping) else None)
        except ValidationError:
            return None


class EndpointAnswer(Shape):
    """An endpoint, mostly as its agent registered it. ``owned``: whether it is the caller's. ``runtime`` is left out
    for one that never connected, ``sealing`` for one that opens no sealed calls."""

    uuid: str
    name: str
    display_name: str | None
    multi_user: bool
    public: bool
    owned: bool
    endpoint_config: str
    user_config_template: str
    user_config_schema: dict[str, Any]
    description: str | None
    hostname: str | None
    local_user: str | None
    ip_address: str | None
    endpoint_version: str | None
    sdk_version: str | None
    subscription_uuid: str | None
    runtime: Maybe[EndpointRuntime] = None
    sealing: Maybe[SealingKeyShape] = None


class EndpointDetails(Shape):
    """``blocks`` are those that the agent has requested and that have not ended, ``pending_blocks`` those of them that
    have no manager yet; both are left out until the agent has reported."""

    total_workers: int
    idle_workers: int
    pending_tasks: int
    outstanding_tasks: int
    managers: int
    blocks: Maybe[int] = None
    pending_blocks: Maybe[int] = None


class EnvironmentEntry(Shape):
    """An environment on a node of an endpoint. ``key`` is equal for what runs in the same workers. ``warm`` are its
    idle workers there, ``busy`` those with a task, ``starting`` those that start; with ``forkable`` workers are forked
    from a template. ``text`` is what happens, since ``since`` (epoch seconds); ``problem`` is why it cannot be started,
    and ``retry_at`` when one that has failed is tried again. ``label``, ``text``, ``problem`` and ``retry_at`` are left
    out for environments of others, unless you manage the endpoint."""

    key: str
    type: str
    node: str
    warm: int
    busy: int
    starting: int
    forkable: bool
    label: Maybe[str] = None
    text: Maybe[str] = None
    since: Maybe[float] = None
    problem: Maybe[str] = None
    retry_at: Maybe[float] = None


class EndpointStatusAnswer(Shape):
    """``status`` is "online" or "offline"; the details are the agent's last report, which came at ``reported_at``
    (epoch seconds), ``age_s`` seconds ago; both are left out if there is none. Changes are reported within a second,
    and within five seconds if there are many. ``problem`` is for those who may use the endpoint, as ``environments``
    are; both are left out if there is none."""

    status: str
    details: EndpointDetails
    problem: Maybe[str] = None
    environments: Maybe[list[EnvironmentEntry]] = None
    reported_at: Maybe[float] = None
    age_s: Maybe[float] = None


class AllowedFunctions(Shape):
    endpoint_id: str
    restricted: bool
    functions: list[str]


class EndpointKeyEntry(Shape):
    """``added_at`` in epoch seconds."""

    public_key: str
    added_at: float


class EndpointKeys(Shape):
    """The keys with which agents of an endpoint may connect, the oldest first."""

    endpoint_id: str
    keys: list[EndpointKeyEntry]


class EndpointCredential(Shape):
    """A token that can connect the agent of an endpoint, and nothing else."""

    endpoint_id: str
    credential: str


_Number = Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)]


class WorkerShareShape(Shape):
    """What each task has: cores and accelerators of a worker, those of a node for tasks with whole nodes, and the
    scheduler's account."""

    cores: _Number = 1.0
    gpus: _Number = 0.0
    node_cores: _Number = 1.0
    node_gpus: _Number = 0.0
    account: Annotated[Text, Field(max_length=200)] = ""


class Connect(Shape):
    """An agent requests a connection to a forwarder."""

    public_key: PublicKey
    spool_id: Id | None = None
    python_version: Annotated[Text, Field(max_length=100)] = ""
    packages: Metadata = Field(default_factory=dict)
    serializers: Strategies | None = None
    platform: Annotated[Text, Field(max_length=200)] = ""
    containers: Annotated[list[Annotated[Text, Field(max_length=40)]], Field(fail_fast=True, max_length=32)] = Field(
        default_factory=list
    )
    worker_share: WorkerShareShape | None = None
    sealing: SealingKeyShape | None = None


class OpenStream(Shape):
    """A client requests a result stream."""

    public_key: PublicKey


class ForwarderEntry(Shape):
    address: str
    server_key: str


class StreamAnswer(Shape):
    """Forwarders to try in order, each with the key to pin, and the ticket to present. ``ticket_expires_at`` is in
    epoch seconds."""

    forwarders: list[ForwarderEntry]
    ticket: str
    ticket_expires_at: float
    heartbeat_s: float


class ConnectAnswer(StreamAnswer):
    endpoint_id: str
    owner_id: str
