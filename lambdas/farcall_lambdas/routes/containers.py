"""Container routes."""

from typing import Annotated

from aws_lambda_powertools.event_handler.openapi.params import Query

from farcall_common.store.model import Container
from farcall_lambdas.models.containers import (
    BuildStatus,
    ContainerAnswer,
    ContainerEntry,
    ContainerList,
    ContainerRegistered,
    RegisterContainer,
)
from farcall_lambdas.models.fields import Id, Reference
from farcall_lambdas.models.functions import Removed
from farcall_lambdas.routes.call import CurrentCall, new_router

router = new_router()


@router.post("/v3/containers", summary="Register a container", tags=["containers"])
@router.post("/v2/containers", summary="Register a container", tags=["containers"])
def register_container(body: RegisterContainer, call: CurrentCall) -> ContainerRegistered:
    return ContainerRegistered(container_id=call.services.containers.register(call.identity, body).container_id)


@router.get("/v3/containers", summary="List your containers, newest first", tags=["containers"])
def list_containers(call: CurrentCall, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> ContainerList:
    found = call.services.containers.newest(call.identity, limit=limit)
    return ContainerList(containers=[_entry(container) for container in found])


@router.get("/v3/containers/<container>", summary="Get a container of yours by id or name", tags=["containers"])
def find_container(container: Reference, call: CurrentCall) -> ContainerEntry:
    return _entry(call.services.containers.get(call.identity, container))


@router.delete("/v3/containers/<container>", summary="Delete a container of yours", tags=["containers"])
def delete_container(container: Reference, call: CurrentCall) -> Removed:
    call.services.containers.delete(call.identity, container)
    return Removed()


@router.get("/v2/containers/build/<container_id>", summary="The build status of a container", tags=["containers"])
def get_build_status(container_id: Id, call: CurrentCall) -> BuildStatus:
    return BuildStatus(container_id=call.services.containers.get(call.identity, container_id).container_id)


@router.get("/v2/containers/<container_id>/<technology>", summary="Get a container of a type", tags=["containers"])
def get_container(container_id: Id, technology: str, call: CurrentCall) -> ContainerAnswer:
    found = call.services.containers.get(call.identity, container_id, technology=technology)
    return ContainerAnswer(container=_entry(found))


def _entry(container: Container) -> ContainerEntry:
    return ContainerEntry(
        container_uuid=container.container_id,
        name=container.name,
        type=container.technology,
        location=container.image,
        requirements=list(container.requirements),
        preload=None if container.preload is None else list(container.preload),
        description=container.description,
        created_at=container.created_at.timestamp() if container.created_at else None,
    )
