"""Functions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from farcall_lambdas.models.fields import Id, JsonObject, Shape, Text, UserBytes

__all__ = ["FunctionAnswer", "FunctionEntry", "FunctionList", "FunctionRegistered", "RegisterFunction", "Removed"]


class RegisterFunction(Shape):
    """``function_code`` is a packed buffer, or source text when ``serialized`` is false. With ``memoize``, calls of the
    function are answered from memory unless they say otherwise."""

    function_name: Annotated[Text, Field(min_length=1, max_length=1000)]
    function_code: Annotated[UserBytes, Field(min_length=1)]
    serialized: bool = True
    description: Text | None = None
    meta: JsonObject | None = None
    public: bool = False
    group: Id | None = None
    ha_endpoint_id: Id | None = None
    memoize: bool = False


class FunctionRegistered(Shape):
    function_uuid: str


class FunctionAnswer(Shape):
    function_uuid: str
    function_name: str
    function_code: str
    description: str | None
    metadata: dict[str, Any]


class FunctionEntry(Shape):
    """A function in a list: everything but its code. ``created_at`` in epoch seconds."""

    function_uuid: str
    function_name: str
    function_hash: str
    version: int
    description: str | None
    public: bool
    metadata: dict[str, Any]
    created_at: float | None


class FunctionList(Shape):
    functions: list[FunctionEntry]


class Removed(Shape):
    """Globus Compute's answer to a DELETE, number included."""

    result: int = 302
