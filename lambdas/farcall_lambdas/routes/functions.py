"""Routes of functions."""

from collections.abc import Mapping
from typing import Annotated, Final

from aws_lambda_powertools.event_handler.openapi.params import Query

from farcall_common.store.model import Function, FunctionAlias
from farcall_lambdas.models.fields import Id, Name, Reference, Text, WaitingTasks
from farcall_lambdas.models.functions import (
    AliasEntry,
    AliasList,
    FunctionAnswer,
    FunctionEntry,
    FunctionFound,
    FunctionList,
    FunctionRegistered,
    FunctionUpdated,
    FunctionVersions,
    PutAlias,
    RegisterFunction,
    Removed,
    UpdateFunction,
    VersionEntry,
)
from farcall_lambdas.routes.call import CurrentCall, new_router
from farcall_lambdas.services.functions import environment_of

router = new_router()

#: Keys that Globus Compute's clients read in each function's metadata; None where the registration had none.
_GLOBUS_METADATA: Final[Mapping[str, None]] = {"python_version": None, "sdk_version": None}


@router.post("/v3/functions", summary="Register a function", tags=["functions"])
@router.post("/v2/functions", summary="Register a function", tags=["functions"])
def register_function(body: RegisterFunction, call: CurrentCall) -> FunctionRegistered:
    function = call.services.functions.register(call.identity, body)
    return FunctionRegistered(function_uuid=function.function_id, environment=_environment(function))


@router.get("/v3/functions", summary="Search your functions, newest first", tags=["functions"])
def list_functions(
    call: CurrentCall,
    search: Annotated[Text, Query(max_length=200)] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> FunctionList:
    found = call.services.functions.search(call.identity, search=search, limit=limit)
    return FunctionList(functions=[_entry(function) for function in found])


@router.get("/v2/functions/<function_id>", summary="Get a function that you may run", tags=["functions"])
def get_function(
    function_id: Id, call: CurrentCall, version: Annotated[int | None, Query(ge=1, lt=2**31)] = None
) -> FunctionAnswer:
    reference = function_id if version is None else f"{function_id}@{version}"
    function = call.services.functions.get(call.identity, reference)
    return FunctionAnswer(
        function_uuid=function.function_id,
        function_name=function.name,
        function_code=function.body.decode(),
        description=function.description,
        metadata={**(_GLOBUS_METADATA if call.is_globus_client else {}), **function.metadata},
    )


@router.delete("/v2/functions/<function_id>", summary="Delete a function of yours", tags=["functions"])
def delete_function(
    function_id: Id, call: CurrentCall, waiting_tasks: Annotated[WaitingTasks, Query()] = "cancel"
) -> Removed:
    """``waiting_tasks``: whether open tasks of others with it are cancelled, or may still run ("keep")."""
    call.services.functions.delete(call.identity, function_id, waiting_tasks=waiting_tasks)
    return Removed()


@router.put("/v3/functions/<function_id>", summary="Change a function of yours, or add a version", tags=["functions"])
def update_function(function_id: Id, body: UpdateFunction, call: CurrentCall) -> FunctionUpdated:
    function = call.services.functions.update(call.identity, function_id, body)
    environment = _environment(function)
    return FunctionUpdated(function_uuid=function.function_id, version=function.version, environment=environment)


@router.get("/v3/functions/<function>", summary="Find a function by id, version or alias", tags=["functions"])
def find_function(function: Reference, call: CurrentCall) -> FunctionFound:
    found, reference = call.services.functions.find(call.identity, function)
    return FunctionFound(**_entry(found).model_dump(), reference=reference)


@router.get("/v3/functions/<function_id>/versions", summary="List versions, newest first", tags=["functions"])
def list_versions(
    function_id: Id, call: CurrentCall, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> FunctionVersions:
    versions = [
        VersionEntry(
            version=each.version,
            function_hash=each.body_hash,
            metadata=dict(each.metadata),
            created_at=_epoch_s(each),
        )
        for each in call.services.functions.versions(call.identity, function_id, limit=limit)
    ]
    return FunctionVersions(function_uuid=function_id, versions=versions)


@router.post("/v3/aliases", summary="Give a function or a version of one a name of yours", tags=["functions"])
def put_alias(body: PutAlias, call: CurrentCall) -> AliasEntry:
    return _alias(call.services.functions.put_alias(call.identity, body))


@router.get("/v3/aliases", summary="List your aliases", tags=["functions"])
def list_aliases(call: CurrentCall) -> AliasList:
    return AliasList(aliases=[_alias(each) for each in call.services.functions.aliases(call.identity)])


@router.delete("/v3/aliases/<name>", summary="Delete an alias of yours", tags=["functions"])
def delete_alias(name: Name, call: CurrentCall) -> Removed:
    call.services.functions.delete_alias(call.identity, name)
    return Removed()


def _entry(function: Function) -> FunctionEntry:
    return FunctionEntry(
        function_uuid=function.function_id,
        function_name=function.name,
        function_hash=function.body_hash,
        version=function.version,
        description=function.description,
        public=function.public,
        metadata=dict(function.metadata),
        created_at=_epoch_s(function),
    )


def _environment(function: Function) -> str | None:
    found = environment_of(function)
    return found.label if found else None


def _alias(alias: FunctionAlias) -> AliasEntry:
    return AliasEntry(name=alias.name, function_uuid=alias.function_id, version=alias.version)


def _epoch_s(function: Function) -> float | None:
    return function.created_at.timestamp() if function.created_at else None
