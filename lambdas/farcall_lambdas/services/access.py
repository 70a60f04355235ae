"""Authorization: which caller may use which object.

A function or an endpoint may be used by its owner, by everyone when it is public, and by an identity with a grant.
A refusal is 403: ids are random, and that an object exists is not confidential. Tasks are their owner's alone: for
other callers they do not exist (404).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from farcall_common.errors import EndpointUnknown, Forbidden, FunctionUnknown
from farcall_common.store.model import Endpoint, Function, Task
from farcall_common.store.ports import Records
from farcall_lambdas.identity import Identity

_OTHER_TOKEN: Final = "Use a token without this limit."  # noqa: S105 - a hint


class Access:
    """Reads objects that a caller may use."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def endpoint(self, identity: Identity, endpoint_id: str) -> Endpoint:
        """An endpoint that the caller may use.

        :raises EndpointUnknown: if there is none.
        :raises Forbidden: if the caller may not use it.
        """
        return self._usable(identity, endpoint_id, self._records.endpoints.get_endpoint(endpoint_id))

    def submission(
        self, identity: Identity, endpoint_id: str, references: Sequence[str], task_ids: Sequence[str]
    ) -> tuple[Endpoint, Mapping[str, Function], Mapping[str, Task]]:
        """Reads for a submit: an :meth:`endpoint`, :meth:`functions`, and those of the tasks that exist already, of any
        owner; the same errors."""
        endpoint, found, tasks = self._records.tasks.read_for_submit(endpoint_id, _newest(references), task_ids)
        endpoint = self._usable(identity, endpoint_id, endpoint)
        return endpoint, self._runnable(identity, references, found, with_bodies=False), tasks

    def own_endpoint(self, identity: Identity, endpoint_id: str) -> Endpoint:
        """An endpoint that belongs to the caller; the same errors."""
        endpoint = self.endpoint(identity, endpoint_id)
        if not identity.owns(endpoint.owner_id):
            raise Forbidden(f"Endpoint {endpoint_id} belongs to someone else.", hint="Only its owner may do this.").of(
                endpoint_id, owner_id=endpoint.owner_id
            )
        return endpoint

    def functions(
        self, identity: Identity, references: Sequence[str], *, with_bodies: bool = False
    ) -> Mapping[str, Function]:
        """Functions that the caller may run, by reference: an id, which names the newest version, or
        ``<id>@<version>``. Without their bodies, which no decision needs.

        :raises FunctionUnknown: if one does not exist.
        :raises Forbidden: if the caller may not run one.
        """
        newest = _newest(references)
        found = self._records.functions.get_functions(newest, with_bodies=with_bodies) if newest else {}
        return self._runnable(identity, references, found, with_bodies=with_bodies)

    def function(self, identity: Identity, reference: str) -> Function:
        """One function that the caller may run, whole; the same errors."""
        return self.functions(identity, [reference], with_bodies=True)[reference]

    def own_function(self, identity: Identity, function_id: str) -> Function:
        """A function that belongs to the caller; the same errors."""
        function = self.function(identity, function_id)
        if not identity.owns(function.owner_id):
            raise Forbidden(f"Function {function_id} belongs to someone else.", hint="Only its owner may do this.").of(
                function_id, owner_id=function.owner_id
            )
        return function

    def _usable(self, identity: Identity, endpoint_id: str, endpoint: Endpoint | None) -> Endpoint:
        if endpoint is None:
            raise EndpointUnknown(f"There is no endpoint {endpoint_id}.")
        if not identity.permits_endpoint(endpoint_id):
            raise Forbidden(f"The token is not for endpoint {endpoint_id}.", hint=_OTHER_TOKEN).of(
                identity.token_id, owner_id=identity.identity_id
            )
        if not self._may_use(identity, endpoint_id, owner_id=endpoint.owner_id, public=endpoint.public):
            raise Forbidden(f"You may not use endpoint {endpoint_id}.").of(endpoint_id, owner_id=endpoint.owner_id)
        return endpoint

    def _runnable(
        self, identity: Identity, references: Sequence[str], newest: Mapping[str, Function], *, with_bodies: bool
    ) -> Mapping[str, Function]:
        found = dict(newest)
        for reference in references:
            function_id, _, version = reference.partition("@")
            if version and (
                one := self._records.functions.get_version(function_id, int(version), with_body=with_bodies)
            ):
                found[reference] = one
            function = found.get(reference)
            if function is None:
                raise FunctionUnknown(f"There is no function {reference}.")
            if not identity.permits_function(function_id):
                raise Forbidden(f"The token is not for function {function_id}.", hint=_OTHER_TOKEN).of(
                    identity.token_id, owner_id=identity.identity_id
                )
            if not self._may_use(identity, function_id, owner_id=function.owner_id, public=function.public):
                raise Forbidden(f"You may not run function {function_id}.").of(function_id, owner_id=function.owner_id)
        return found

    def _may_use(self, identity: Identity, object_id: str, *, owner_id: str, public: bool) -> bool:
        if public or identity.owns(owner_id):
            return True
        return any(self._records.endpoints.has_grant(each, object_id) for each in sorted(identity.identity_set))


def _newest(references: Sequence[str]) -> Sequence[str]:
    """Those that name the newest version of a function."""
    return [reference for reference in references if "@" not in reference]
