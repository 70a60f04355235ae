"""Functions, their versions and their aliases."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from farcall_lambdas.models.containers import EnvironmentShape
from farcall_lambdas.models.fields import (
    Description,
    Id,
    Maybe,
    Metadata,
    Name,
    Reference,
    Shape,
    Text,
    Title,
    UserBytes,
    WaitingTasks,
)
from farcall_lambdas.models.qos import QosShape

Version = Annotated[int, Field(ge=1, lt=2**31)]

#: An SSH signature of a function's name and body, for endpoints that run signed functions only. The service stores it
#: and does not check it.
Signature = Annotated[Text, Field(max_length=8192, pattern="^-----BEGIN SSH SIGNATURE-----")]


class RegisterFunction(Shape):
    """``function_code`` is a packed buffer, or source text when ``serialized`` is false. With ``memoize``, calls of the
    function are memoized unless they say otherwise; ``qos`` is the latency that they are to hold unless they say
    otherwise. ``container`` (id or name of a container of yours; Globus Compute
    says ``container_uuid``) or ``environment``: in which its calls run unless they name another one. The definition is
    copied: it stays as it is now, also for others who run the function, and if the container is deleted."""

    function_name: Annotated[Title, Field(min_length=1)]
    function_code: Annotated[UserBytes, Field(min_length=1)]
    serialized: bool = True
    description: Description | None = None
    meta: Metadata | None = None
    public: bool = False
    group: Id | None = None
    ha_endpoint_id: Id | None = None
    memoize: bool = False
    qos: QosShape | None = None
    container: Reference | None = None
    container_uuid: Reference | Literal[""] | None = None
    environment: EnvironmentShape | None = None
    signature: Signature | None = None


class UpdateFunction(Shape):
    """Fields that are left out stay as they are. Other code, ``meta``, ``container``, ``environment`` or ``qos`` make a
    new version, which has the ``meta`` given and no other; an empty ``container`` means none, and so does a ``qos``
    without a target. Another name or other code
    end the ``signature``, unless a new one is given. ``waiting_tasks``: whether open tasks of others that would be
    refused now are cancelled ("cancel", the default if the function is made private) or may still run ("keep")."""

    function_name: Annotated[Title, Field(min_length=1)] | None = None
    function_code: Annotated[UserBytes, Field(min_length=1)] | None = None
    serialized: bool = True
    description: Description | None = None
    meta: Metadata | None = None
    public: bool | None = None
    memoize: bool | None = None
    qos: QosShape | None = None
    container: Reference | Literal[""] | None = None
    environment: EnvironmentShape | None = None
    signature: Signature | None = None
    waiting_tasks: WaitingTasks | None = None


class FunctionRegistered(Shape):
    """``environment``: the label of the one that its calls run in; left out if it has none."""

    function_uuid: str
    environment: Maybe[str] = None


class FunctionUpdated(FunctionRegistered):
    """``version`` is the newest one: a new one if code, ``meta`` or the environment changed."""

    version: int


class FunctionAnswer(Shape):
    function_uuid: str
    function_name: str
    function_code: str
    description: str | None
    metadata: dict[str, Any]


class FunctionEntry(Shape):
    """A function in a list: everything but its code. ``version`` is the newest one, and so how many there are;
    ``created_at`` in epoch seconds."""

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


class FunctionFound(FunctionEntry):
    """The version of a function that a reference names; submits name it by ``reference``."""

    reference: str


class VersionEntry(Shape):
    """``created_at`` in epoch seconds."""

    version: int
    function_hash: str
    metadata: dict[str, Any]
    created_at: float | None


class FunctionVersions(Shape):
    """Newest first."""

    function_uuid: str
    versions: list[VersionEntry]


class PutAlias(Shape):
    """Without ``version``, the alias follows the newest."""

    name: Name
    function_id: Id
    version: Version | None = None


class AliasEntry(Shape):
    """``version`` is null when the alias follows the newest."""

    name: str
    function_uuid: str
    version: int | None


class AliasList(Shape):
    aliases: list[AliasEntry]


class Removed(Shape):
    """Globus Compute's answer to a DELETE, number included."""

    result: int = 302
