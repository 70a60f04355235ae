"""Routes of functions."""

from __future__ import annotations

from typing import Annotated

from aws_lambda_powertools.event_handler.openapi.params import Query

from farcall_common.store.model import Function
from farcall_lambdas.models.fields import Id, Text
from farcall_lambdas.models.functions import (
    FunctionAnswer,
    FunctionEntry,
    FunctionList,
    FunctionRegistered,
    RegisterFunction,
    Removed,
)
from farcall_lambdas.routes.call import CurrentCall, new_router

__all__ = ["router"]

router = new_router()


@router.post("/v3/functions", summary="Register a function", tags=["functions"])
@router.post("/v2/functions", summary="Register a function", tags=["functions"])
def register_function(body: RegisterFunction, call: CurrentCall) -> FunctionRegistered:
    function = call.services.functions.register(call.identity, body)
    return FunctionRegistered(function_uuid=function.function_id)


@router.get("/v3/functions", summary="Search your functions, newest first", tags=["functions"])
def list_functions(
    call: CurrentCall,
    search: Annotated[Text, Query(max_length=200)] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> FunctionList:
    found = call.services.functions.search(call.identity, search=search, limit=limit)
    return FunctionList(functions=[_entry(function) for function in found])


@router.get("/v2/functions/<function_id>", summary="Get a function that you may run", tags=["functions"])
def get_function(function_id: Id, call: CurrentCall) -> FunctionAnswer:
    function = call.services.functions.get(call.identity, function_id)
    return FunctionAnswer(
        function_uuid=function.function_id,
        function_name=function.name,
        function_code=function.body.decode(),
        description=function.description,
        metadata=dict(function.metadata),
    )


@router.delete("/v2/functions/<function_id>", summary="Forget a function of yours", tags=["functions"])
def delete_function(function_id: Id, call: CurrentCall) -> Removed:
    call.services.functions.delete(call.identity, function_id)
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
        created_at=function.created_at.timestamp() if function.created_at else None,
    )
