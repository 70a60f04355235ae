"""Functions: registration, versions, aliases, deletion. Their bodies are opaque."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from farcall_common.environments import Environment
from farcall_common.errors import Conflict, FunctionUnknown, InvalidRequest, PayloadTooLarge
from farcall_common.nested_json import sent_bytes
from farcall_common.qos import QoS
from farcall_common.store.model import SIGNATURE, Function, FunctionAlias, Quota, Quotable, Right
from farcall_common.wire.ids import is_uuid, new_id
from farcall_lambdas.identity import Identity
from farcall_lambdas.models.containers import EnvironmentShape
from farcall_lambdas.models.fields import WaitingTasks
from farcall_lambdas.models.functions import PutAlias, RegisterFunction, UpdateFunction
from farcall_lambdas.models.qos import QosShape
from farcall_lambdas.services.base import Context, Service
from farcall_lambdas.services.containers import ContainerService
from farcall_lambdas.services.limits import check_quota
from farcall_lambdas.services.memo import MEMOIZE
from farcall_lambdas.services.withdrawal import WithdrawalService

#: Keys in a function's metadata: the environment of its calls, and the latency that they are to hold.
ENVIRONMENT: Final = "task_environment"
TARGET: Final = "task_qos"

#: Attempts to number a version, when another one is added at the same moment.
_ATTEMPTS: Final = 5


class FunctionService(Service):
    """Functions of the caller, and those of others that the caller may run."""

    def __init__(self, context: Context, withdrawals: WithdrawalService, containers: ContainerService) -> None:
        super().__init__(context)
        self._withdrawals = withdrawals
        self._containers = containers

    def register(self, identity: Identity, wanted: RegisterFunction) -> Function:
        """Register a function under a new id.

        :raises InvalidRequest: for sharing that could not be enforced, for two environments, and for a baseline as a
            target.
        :raises ContainerUnknown: if the caller has no such container.
        :raises PayloadTooLarge: for a body over the payload limit.
        :raises QuotaExceeded: over the number or bytes of functions.
        """
        if wanted.group or wanted.ha_endpoint_id:
            raise InvalidRequest(
                "A function cannot be registered for a group or bound to a high-assurance endpoint.",
                hint="Leave out group and ha_endpoint_id; `farcall functions share` shares the function afterwards.",
            )
        if wanted.container and wanted.container_uuid:
            raise InvalidRequest("container and container_uuid are the same field.", hint="Leave container_uuid out.")
        environment = self._environment(identity, wanted.container or wanted.container_uuid, wanted.environment)
        body = self._body(wanted.function_name, wanted.function_code, serialized=wanted.serialized)
        function = Function(
            function_id=new_id(),
            owner_id=identity.identity_id,
            name=wanted.function_name,
            body=body,
            body_hash=hashlib.sha256(body).hexdigest(),
            description=wanted.description,
            public=wanted.public,
            metadata=_metadata(
                wanted.meta or {},
                memoize=wanted.memoize,
                signature=wanted.signature,
                environment=environment,
                target=_target(wanted.qos),
            ),
            created_at=self._now(),
        )
        done = self._entry(identity, "function.register", function.function_id, name=function.name)
        self._storage.check()
        self._stores.functions.audited(done, quota=self._quota(function)).add_function(function)
        return function

    def update(self, identity: Identity, function_id: str, wanted: UpdateFunction) -> Function:
        """Change a function of the caller. Other code or metadata make a new version; a repeated update changes
        nothing.

        :raises FunctionUnknown, Forbidden: if the caller has no such function.
        :raises InvalidRequest: for two environments, and for a baseline as a target.
        :raises PayloadTooLarge: for a body over the payload limit.
        :raises QuotaExceeded: over the number or bytes of versions.
        """
        newest = self._access.function(identity, function_id, Right.MANAGE)
        is_made_private = newest.public and wanted.public is False
        cancels = wanted.waiting_tasks == "cancel" or (wanted.waiting_tasks is None and is_made_private)
        with self._withdrawing(identity, newest, cancels=cancels):
            return self._update(identity, function_id, wanted)

    def _update(self, identity: Identity, function_id: str, wanted: UpdateFunction) -> Function:
        for _ in range(_ATTEMPTS):
            newest = self._access.function(identity, function_id, Right.MANAGE)
            updated = self._updated(identity, newest, wanted)
            if (updated.body_hash, updated.metadata) == (newest.body_hash, newest.metadata):
                done = self._entry(identity, "function.update", function_id, owner_id=newest.owner_id)
                self._stores.functions.audited(done).update_function(updated)
                return updated
            self._storage.check()
            check_quota("versions of this function", newest.version, self._settings.max_versions)
            added = dataclasses.replace(updated, version=newest.version + 1, created_at=self._now())
            done = self._entry(
                identity,
                "function.update",
                function_id,
                owner_id=newest.owner_id,
                version=added.version,
            )
            with contextlib.suppress(Conflict):  # Another version was added at the same moment.
                self._stores.functions.audited(done, quota=self._quota(added)).add_function(added)
                return added
        raise Conflict(f"Function {function_id} is being changed by others.", hint="Try again.")

    def get(self, identity: Identity, reference: str) -> Function:
        """A function that the caller may see, by its id or ``<id>@<version>``."""
        return self._access.function(identity, reference, Right.SEE)

    def find(self, identity: Identity, reference: str) -> tuple[Function, str]:
        """A function that the caller may see, by id, ``<id>@<version>`` or an alias of the caller, without its body;
        and the reference for submits.

        :raises FunctionUnknown: if nothing has that name.
        """
        if not is_uuid(reference.partition("@")[0]):
            alias = self._stores.functions.get_alias(identity.identity_id, reference)
            if alias is None:
                raise _unknown_alias(reference)
            reference = alias.function_id if alias.version is None else f"{alias.function_id}@{alias.version}"
        return self._access.functions(identity, [reference], Right.SEE)[reference], reference

    def versions(self, identity: Identity, function_id: str, *, limit: int) -> Sequence[Function]:
        """The versions of a function that the caller may see, newest first, without their bodies; as many as fit an
        answer."""
        self._access.functions(identity, [function_id], Right.SEE)
        found = self._stores.functions.list_versions(function_id, limit=limit)
        return self._fitting(found, shown=lambda each: each.metadata)

    def put_alias(self, identity: Identity, wanted: PutAlias) -> FunctionAlias:
        """Name a function that the caller may see, or a version of it; replaces an alias of that name.

        :raises FunctionUnknown: for a function or version that does not exist.
        :raises QuotaExceeded: over the number of aliases.
        """
        alias = FunctionAlias(identity.identity_id, wanted.name, wanted.function_id, wanted.version)
        reference = wanted.function_id if wanted.version is None else f"{wanted.function_id}@{wanted.version}"
        self._access.functions(identity, [reference], Right.SEE)
        about: dict[str, Any] = {"function_id": alias.function_id, "version": alias.version}
        done = self._entry(identity, "alias.put", alias.name, **about)
        self._storage.check()
        quota = Quota(Quotable.ALIAS, alias.owner_id, self._settings.max_functions, but=alias.name)
        self._stores.functions.audited(done, quota=quota).put_alias(alias)
        return alias

    def aliases(self, identity: Identity) -> Sequence[FunctionAlias]:
        """The caller's aliases, by name."""
        return self._stores.functions.list_aliases(identity.identity_id)

    def delete_alias(self, identity: Identity, name: str) -> None:
        """Delete an alias; its function stays.

        :raises FunctionUnknown: if the caller has no such alias.
        """
        if self._stores.functions.get_alias(identity.identity_id, name) is None:
            raise _unknown_alias(name)
        done = self._entry(identity, "alias.delete", name)
        self._stores.functions.audited(done).delete_alias(identity.identity_id, name)

    def search(self, identity: Identity, *, search: str, limit: int) -> Sequence[Function]:
        """The caller's own functions, newest first, without their bodies; as many as fit an answer."""
        found = self._stores.functions.list_functions(identity.identity_id, search=search, limit=limit)
        return self._fitting(found, shown=lambda f: (f.name, f.description, f.metadata))

    def delete(self, identity: Identity, function_id: str, *, waiting_tasks: WaitingTasks = "cancel") -> None:
        """Delete a function of the caller. Open tasks of others with it are cancelled, unless they are kept."""
        function = self._access.function(identity, function_id, Right.OWN)
        done = self._entry(identity, "function.delete", function_id, owner_id=function.owner_id)
        with self._withdrawing(identity, function, cancels=waiting_tasks == "cancel"):
            self._stores.functions.audited(done).delete_function(function_id)

    @contextlib.contextmanager
    def _withdrawing(self, identity: Identity, function: Function, *, cancels: bool) -> Iterator[None]:
        """A change that takes the right to run a function away from others, if ``cancels``."""
        withdrawal = self._withdrawals.begin(identity, function, cancels_tasks=True) if cancels else None
        yield
        if withdrawal is not None:
            self._withdrawals.carry_out(withdrawal)

    def _updated(self, identity: Identity, newest: Function, wanted: UpdateFunction) -> Function:
        name = wanted.function_name or newest.name
        body = newest.body
        if wanted.function_code is not None:
            body = self._body(name, wanted.function_code, serialized=wanted.serialized)
        memoize = newest.metadata.get(MEMOIZE) is True if wanted.memoize is None else wanted.memoize
        environment = self._environment(identity, wanted.container, wanted.environment)
        if environment is None and wanted.container != "":
            environment = environment_of(newest)
        target = target_of(newest) if wanted.qos is None else _target(wanted.qos)
        metadata = newest.metadata if wanted.meta is None else wanted.meta
        metadata = {key: value for key, value in metadata.items() if key != MEMOIZE}
        body_hash = hashlib.sha256(body).hexdigest()
        signature = wanted.signature
        if signature is None and (name, body_hash) == (newest.name, newest.body_hash):
            signature = newest.metadata.get(SIGNATURE)
        return dataclasses.replace(
            newest,
            name=name,
            body=body,
            body_hash=body_hash,
            description=newest.description if wanted.description is None else wanted.description,
            public=newest.public if wanted.public is None else wanted.public,
            metadata=_metadata(metadata, memoize=memoize, signature=signature, environment=environment, target=target),
        )

    def _environment(
        self, identity: Identity, container: str | None, given: EnvironmentShape | None
    ) -> Environment | None:
        """The environment that a request names: a copy of the caller's container, or the one that it defines."""
        if container and given is not None:
            raise InvalidRequest("container and environment: a function has one environment.", hint="Leave one out.")
        if given is not None:
            return given.environment()
        return self._containers.environment(identity, container)[1] if container else None

    def _body(self, name: str, code: str, *, serialized: bool) -> bytes:
        text = code if serialized else _packed_source(name, code)
        body = text.encode()
        # An answer has the whole function, as text inside JSON.
        for size, most, kind in (
            (len(body), self._settings.max_payload_bytes, "bytes"),
            (sent_bytes(text), self._settings.max_response_bytes, "bytes as JSON in an answer"),
        ):
            if size > most:
                raise PayloadTooLarge(
                    f"The function has {size} {kind}; {most} are allowed.",
                    hint="Read large data inside the function instead of capturing it.",
                )
        return body

    def _quota(self, version: Function) -> Quota:
        """The quota for adding this version of a function."""
        settings = self._settings
        return Quota(
            Quotable.FUNCTION,
            version.owner_id,
            settings.max_functions,
            more_bytes=len(version.body),
            most_bytes=settings.max_function_bytes,
        )


def environment_of(function: Function) -> Environment | None:
    """The environment that a version of a function was registered with; None if it has none."""
    found = function.metadata.get(ENVIRONMENT)
    return None if found is None else msgspec.convert(found, Environment)


def target_of(function: Function) -> QoS | None:
    """The latency target that a version of a function was registered with; None if it has none."""
    found = function.metadata.get(TARGET)
    return None if found is None else msgspec.convert(found, QoS)


def _metadata(
    given: Mapping[str, Any],
    *,
    memoize: bool,
    signature: str | None,
    environment: Environment | None,
    target: QoS | None,
) -> Mapping[str, Any]:
    """The metadata of a version: what was given, and what else the service keeps with it."""
    own = {
        MEMOIZE: memoize,
        SIGNATURE: signature,
        ENVIRONMENT: None if environment is None else environment.to_json(),
        TARGET: target.to_json() if target is not None and target.has_target else None,
    }
    kept = {key: value for key, value in given.items() if key not in (SIGNATURE, ENVIRONMENT, TARGET)}
    return kept | {key: value for key, value in own.items() if value}


def _target(given: QosShape | None) -> QoS | None:
    """:raises InvalidRequest: for a baseline, which is measured by some calls."""
    if given is not None and given.is_baseline:
        raise InvalidRequest("is_baseline is for calls, not for functions.", hint="Leave it out.")
    return None if given is None else given.qos()


def _unknown_alias(name: str) -> FunctionUnknown:
    return FunctionUnknown(f"You have no alias {name}.", hint="`farcall functions aliases` lists yours.")


def _packed_source(name: str, source: str) -> str:
    """Source text as the packed buffer that Globus Compute makes of it: strategy ``st``, then ``name:source``."""
    buffer = f"st\n{name}:{source}"
    return f"{len(buffer)}\n{buffer}"
