"""Endpoint routes, and the connections of agents and result streams."""

from typing import Annotated, Any, Literal

import msgspec
from aws_lambda_powertools.event_handler.openapi.params import Query

from farcall_common.errors import Unsupported
from farcall_common.store.model import Endpoint, EnvironmentState
from farcall_lambdas.models.endpoints import (
    AllowedFunctions,
    Connect,
    ConnectAnswer,
    EndpointAnswer,
    EndpointCredential,
    EndpointDetails,
    EndpointEntry,
    EndpointKeyEntry,
    EndpointKeys,
    EndpointRegistered,
    EndpointRegisteredV2,
    EndpointRuntime,
    EndpointStatusAnswer,
    EnvironmentEntry,
    ForwarderEntry,
    OpenStream,
    QueueInfo,
    RegisterEndpoint,
    ResultQueueInfo,
    SealingKeyShape,
    StreamAnswer,
    UpdateEndpoint,
)
from farcall_lambdas.models.fields import Id, PublicKey
from farcall_lambdas.models.functions import Removed
from farcall_lambdas.models.qos import EndpointQos
from farcall_lambdas.routes.call import Call, CurrentCall, new_router, no_result_queue
from farcall_lambdas.services.connect import Admitted

router = new_router()


@router.post("/v3/endpoints", summary="Register an endpoint", tags=["endpoints"])
def register_endpoint(body: RegisterEndpoint, call: CurrentCall) -> EndpointRegistered:
    endpoint = call.services.endpoints.register(call.identity, body)
    return EndpointRegistered(**_registered(endpoint))


@router.post("/v2/endpoints", summary="Register an endpoint (older form)", tags=["endpoints"])
def register_endpoint_v2(body: RegisterEndpoint, call: CurrentCall) -> EndpointRegisteredV2:
    endpoint = call.services.endpoints.register(call.identity, body)
    return EndpointRegisteredV2(**_registered(endpoint))


@router.put("/v3/endpoints/<endpoint_id>", summary="Change an endpoint of yours", tags=["endpoints"])
def update_endpoint(endpoint_id: Id, body: UpdateEndpoint, call: CurrentCall) -> EndpointRegistered:
    endpoint = call.services.endpoints.update(call.identity, endpoint_id, body)
    return EndpointRegistered(**_registered(endpoint))


@router.get("/v2/endpoints", summary="List endpoints: yours, or any that you may use", tags=["endpoints"])
def list_endpoints(
    call: CurrentCall, role: Annotated[Literal["owner", "any"], Query()] = "owner"
) -> list[EndpointEntry]:
    found = call.services.endpoints.search(call.identity, role=role)
    return [
        EndpointEntry(
            uuid=each.endpoint_id,
            name=each.name,
            display_name=each.display_name,
            owner=each.owner_id,
            owned=None if call.is_globus_client else call.identity.owns(each.owner_id),
            status=None if call.is_globus_client else call.services.endpoints.state(each).value,
        )
        for each in found
    ]


@router.get("/v2/endpoints/<endpoint_id>", summary="Get an endpoint that you may use", tags=["endpoints"])
def get_endpoint(endpoint_id: Id, call: CurrentCall) -> EndpointAnswer:
    endpoint = call.services.endpoints.get(call.identity, endpoint_id)
    reported = endpoint.metadata
    return EndpointAnswer(
        uuid=endpoint.endpoint_id,
        name=endpoint.name,
        display_name=endpoint.display_name,
        multi_user=endpoint.multi_user,
        public=endpoint.public,
        owned=call.identity.owns(endpoint.owner_id),
        endpoint_config=_text(reported.get("endpoint_config", reported.get("config"))) or "",
        user_config_template=_text(reported.get("user_config_template")) or "",
        user_config_schema=schema if isinstance(schema := reported.get("user_config_schema"), dict) else {},
        description=endpoint.description,
        hostname=_text(reported.get("hostname")),
        local_user=_text(reported.get("local_user")),
        ip_address=_text(reported.get("ip_address")),
        endpoint_version=_text(reported.get("endpoint_version")),
        sdk_version=_text(reported.get("sdk_version")),
        subscription_uuid=_text(reported.get("subscription_uuid")),
        runtime=EndpointRuntime.read(reported),
        sealing=SealingKeyShape.read(reported),
    )


@router.delete("/v2/endpoints/<endpoint_id>", summary="Delete an endpoint of yours", tags=["endpoints"])
def delete_endpoint(endpoint_id: Id, call: CurrentCall) -> Removed:
    call.services.endpoints.delete(call.identity, endpoint_id)
    return Removed()


@router.get("/v2/endpoints/<endpoint_id>/status", summary="Whether an endpoint is online", tags=["endpoints"])
def get_endpoint_status(endpoint_id: Id, call: CurrentCall) -> EndpointStatusAnswer:
    endpoint = call.services.endpoints.get(call.identity, endpoint_id)
    shown = call.services.endpoints.environments(call.identity, endpoint)
    return EndpointStatusAnswer(
        status=call.services.endpoints.state(endpoint).value,
        details=endpoint_details(endpoint),
        problem=call.services.endpoints.problem(call.identity, endpoint),
        environments=[environment_entry(each, is_whole=is_whole) for each, is_whole in shown] or None,
        reported_at=endpoint.status.reported_at,
        age_s=call.services.endpoints.report_age_s(endpoint),
    )


@router.get("/v3/endpoints/<endpoint_id>/qos", summary="How an endpoint holds latency targets", tags=["endpoints"])
def get_endpoint_qos(endpoint_id: Id, call: CurrentCall) -> EndpointQos:
    endpoint, report = call.services.endpoints.qos(call.identity, endpoint_id)
    found = msgspec.to_builtins(report) | {"reported_at": report.reported_at or None}
    return EndpointQos(endpoint_id=endpoint.endpoint_id, **found)


@router.get(
    "/v3/endpoints/<endpoint_id>/allowed_functions", summary="The functions that an endpoint allows", tags=["endpoints"]
)
def get_allowed_functions(endpoint_id: Id, call: CurrentCall) -> AllowedFunctions:
    allowed = call.services.endpoints.get(call.identity, endpoint_id).allowed_functions
    return AllowedFunctions(endpoint_id=endpoint_id, restricted=allowed is not None, functions=list(allowed or ()))


@router.post("/v3/endpoints/<endpoint_id>/connect", summary="Connect the agent of an endpoint", tags=["connections"])
def connect_endpoint(endpoint_id: Id, body: Connect, call: CurrentCall) -> ConnectAnswer:
    admitted = call.services.connect.connect(call.identity, endpoint_id, body)
    return ConnectAnswer(endpoint_id=endpoint_id, owner_id=admitted.owner_id, **_connection(admitted, call))


@router.get("/v3/endpoints/<endpoint_id>/keys", summary="The keys of an endpoint of yours", tags=["connections"])
def list_endpoint_keys(endpoint_id: Id, call: CurrentCall) -> EndpointKeys:
    found = call.services.endpoints.keys(call.identity, endpoint_id)
    keys = [EndpointKeyEntry(public_key=each.public_key, added_at=each.added_at.timestamp()) for each in found]
    return EndpointKeys(endpoint_id=endpoint_id, keys=keys)


@router.delete("/v3/endpoints/<endpoint_id>/keys", summary="Revoke a key of an endpoint of yours", tags=["connections"])
def revoke_endpoint_key(endpoint_id: Id, call: CurrentCall, public_key: Annotated[PublicKey, Query()]) -> Removed:
    """The session of an agent with this key ends, and the key is refused from now on."""
    call.services.endpoints.revoke_key(call.identity, endpoint_id, public_key)
    return Removed()


@router.post(
    "/v3/endpoints/<endpoint_id>/credential", summary="Make a credential of an endpoint of yours", tags=["connections"]
)
def make_endpoint_credential(endpoint_id: Id, call: CurrentCall) -> EndpointCredential:
    """A token that can connect the agent of this endpoint, and nothing else. It replaces the former one."""
    credential = call.services.endpoints.make_credential(call.identity, endpoint_id)
    return EndpointCredential(endpoint_id=endpoint_id, credential=credential)


@router.delete(
    "/v3/endpoints/<endpoint_id>/credential",
    summary="Revoke the credential of an endpoint of yours",
    tags=["connections"],
)
def revoke_endpoint_credential(endpoint_id: Id, call: CurrentCall) -> Removed:
    """The session of the endpoint's agent ends, and the credential is refused from now on."""
    call.services.endpoints.revoke_credential(call.identity, endpoint_id)
    return Removed()


@router.post("/v3/stream", summary="Connect a client to its result stream", tags=["connections"])
def open_stream(body: OpenStream, call: CurrentCall) -> StreamAnswer:
    return StreamAnswer(**_connection(call.services.connect.stream(call.identity, body.public_key), call))


def endpoint_details(endpoint: Endpoint) -> EndpointDetails:
    """The numbers that an agent last reported."""
    status = endpoint.status
    blocks = {} if status.reported_at is None else {"blocks": status.blocks, "pending_blocks": status.pending_blocks}
    return EndpointDetails(
        total_workers=status.total_workers,
        idle_workers=status.idle_workers,
        pending_tasks=status.pending_tasks,
        outstanding_tasks=status.outstanding_tasks,
        managers=status.managers,
        **blocks,
    )


def environment_entry(state: EnvironmentState, *, is_whole: bool) -> EnvironmentEntry:
    """An environment on a node; ``is_whole``: with its names and sentences."""
    return EnvironmentEntry(
        key=state.key,
        type=state.type,
        node=state.node,
        warm=state.warm,
        busy=state.busy,
        starting=state.starting,
        forkable=state.forkable,
        label=state.label if is_whole else None,
        text=(state.text or None) if is_whole else None,
        since=state.since,
        problem=(state.problem or None) if is_whole else None,
        retry_at=state.retry_at if is_whole else None,
    )


def _registered(endpoint: Endpoint) -> dict[str, Any]:
    url = f"/v3/endpoints/{endpoint.endpoint_id}/connect"
    return {
        "endpoint_id": endpoint.endpoint_id,
        "task_queue_info": QueueInfo(connection_url=url, exchange="tasks", queue=endpoint.endpoint_id),
        "result_queue_info": ResultQueueInfo(connection_url=url, exchange="results", queue=endpoint.endpoint_id),
    }


def _connection(admitted: Admitted, call: Call) -> dict[str, Any]:
    return {
        "forwarders": [
            ForwarderEntry(address=each.address, server_key=each.server_key) for each in admitted.forwarders
        ],
        "ticket": admitted.ticket,
        "ticket_expires_at": admitted.expires_at,
        "heartbeat_s": call.settings.heartbeat_s,
    }


def _text(value: object) -> str | None:
    """A text that an agent reported, which is free-form JSON; None for anything else."""
    return value if isinstance(value, str) else None


@router.get("/v2/get_amqp_result_connection_url", summary="Refused: there is no message broker", tags=["connections"])
def get_amqp_result_connection_url() -> Removed:
    raise no_result_queue()


@router.post("/v2/endpoints/<endpoint_id>/lock", summary="Refused: see the error", tags=["endpoints"])
def lock_endpoint_v2(endpoint_id: Id, call: CurrentCall) -> Removed:
    raise _no_lock(endpoint_id, call)


@router.post("/v3/endpoints/<endpoint_id>/lock", summary="Refused: see the error", tags=["endpoints"])
def lock_endpoint(endpoint_id: Id, call: CurrentCall) -> Removed:
    raise _no_lock(endpoint_id, call)


def _no_lock(endpoint_id: str, call: Call) -> Unsupported:
    """:raises EndpointUnknown: if the caller may not see the endpoint."""
    call.services.endpoints.get(call.identity, endpoint_id)
    return Unsupported(
        "Endpoints cannot be locked.",
        hint="Stop it on its machine with `farcall-endpoint stop`, or delete it with "
        f"`farcall endpoints rm {endpoint_id}`.",
    )
