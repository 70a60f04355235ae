"""Authorization: what a caller may do with an object.

The owner of an endpoint or a function may do everything with it. Everyone may use it when it is public. Others have the
greatest right that a share gives them: by identity, by a name or a group that the identity provider has verified, or by
a team. A refusal is 403: ids are random, and that an object exists is not confidential. Tasks are their owner's alone:
for other callers they do not exist (404).
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Final

from farcall_common.errors import EndpointUnknown, Forbidden, FunctionUnknown
from farcall_common.store.model import Endpoint, Function, ObjectKind, Right, Task, Withdrawal
from farcall_common.store.ports import Records
from farcall_common.store.rights import recorded_principals
from farcall_lambdas.allowed_users import SOME_GROUPS
from farcall_lambdas.identity import Identity
from farcall_lambdas.recent import Recent

#: How long a recorded person is not recorded again, in seconds: other processes may have recorded a change.
_RECORDED_S: Final = 60.0

_OTHER_TOKEN: Final = "Use a token without this limit."  # noqa: S105 - a hint
_VERBS: Final = {Right.SEE: "see", Right.USE: "use", Right.MANAGE: "manage"}


def principals(identity: Identity) -> frozenset[str]:
    """The texts by which shares name a caller: ``identity …``, ``name …``, ``group …``."""
    verified = {each for each in identity.verified if each.startswith(("name ", "group "))}
    return frozenset(f"identity {each}" for each in identity.identity_set) | verified


class Access:
    """Reads objects to which a caller has a right. ``clock`` gives epoch seconds."""

    def __init__(self, records: Records, *, clock: Callable[[], float]) -> None:
        self._records = records
        self._clock = clock
        self._recorded: Recent[str, frozenset[str]] = Recent(clock, good_s=_RECORDED_S)

    def endpoint(self, identity: Identity, endpoint_id: str, right: Right = Right.USE) -> Endpoint:
        """An endpoint to which the caller has a right.

        :raises EndpointUnknown: if there is none.
        :raises Forbidden: if the caller does not have this right.
        """
        return self._permitted(identity, endpoint_id, self._records.endpoints.get_endpoint(endpoint_id), right)

    def submission(
        self, identity: Identity, endpoint_id: str, references: Sequence[str], task_ids: Sequence[str]
    ) -> tuple[Endpoint, Mapping[str, Function], Mapping[str, Task]]:
        """Reads for a submit: an :meth:`endpoint` and :meth:`functions` that the caller may use, and those of the tasks
        that exist already, of any owner; the same errors."""
        endpoint, found, tasks = self._records.tasks.read_for_submit(endpoint_id, references, task_ids)
        endpoint = self._permitted(identity, endpoint_id, endpoint, Right.USE)
        return endpoint, self._known(identity, references, found, Right.USE), tasks

    def functions(
        self, identity: Identity, references: Sequence[str], right: Right = Right.USE, *, with_bodies: bool = False
    ) -> Mapping[str, Function]:
        """Functions to which the caller has a right, by reference: an id, which names the newest version, or
        ``<id>@<version>``. Without their bodies, which no decision needs.

        :raises FunctionUnknown: if one does not exist.
        :raises Forbidden: if the caller does not have this right to one.
        """
        newest = [reference for reference in references if "@" not in reference]
        found = dict(self._records.functions.get_functions(newest, with_bodies=with_bodies)) if newest else {}
        for reference in references:
            function_id, _, version = reference.partition("@")
            if version and (
                one := self._records.functions.get_version(function_id, int(version), with_body=with_bodies)
            ):
                found[reference] = one
        return self._known(identity, references, found, right)

    def function(self, identity: Identity, reference: str, right: Right = Right.USE) -> Function:
        """One function to which the caller has a right, whole; the same errors."""
        return self.functions(identity, [reference], right, with_bodies=True)[reference]

    def shared_object(self, identity: Identity, kind: ObjectKind, object_id: str, right: Right) -> Endpoint | Function:
        """An object that can be shared, without a function's body; the same errors."""
        if kind is ObjectKind.ENDPOINT:
            return self.endpoint(identity, object_id, right)
        return self.functions(identity, [object_id], right)[object_id]

    def _permitted(self, identity: Identity, endpoint_id: str, endpoint: Endpoint | None, right: Right) -> Endpoint:
        if endpoint is None:
            raise EndpointUnknown(f"There is no endpoint {endpoint_id}.")
        self._require(identity, ObjectKind.ENDPOINT, [endpoint], right)
        return endpoint

    def _known(
        self, identity: Identity, references: Sequence[str], found: Mapping[str, Function], right: Right
    ) -> Mapping[str, Function]:
        """The functions, if all of them exist and the caller has the right to them."""
        for reference in references:
            if reference not in found:
                raise FunctionUnknown(f"There is no function {reference}.")
        self._require(identity, ObjectKind.FUNCTION, found.values(), right)
        return found

    def _require(
        self, identity: Identity, kind: ObjectKind, objects: Iterable[Endpoint | Function], right: Right
    ) -> None:
        """:raises Forbidden: unless the caller has the right to all of these objects. One query for all that belong to
        others and are not public."""
        owners = {}
        for each in objects:
            object_id = each.function_id if isinstance(each, Function) else each.endpoint_id
            permits = identity.permits_function if isinstance(each, Function) else identity.permits_endpoint
            if not permits(object_id):
                raise Forbidden(f"The token is not for {kind} {object_id}.", hint=_OTHER_TOKEN).of(
                    identity.token_id, owner_id=identity.identity_id
                )
            if identity.owns(each.owner_id):
                if identity.identity_id != each.owner_id and not identity.token_id:
                    self.note_person(identity)  # so that it is known which identities are linked
            elif not (each.public and right <= Right.USE):
                owners[object_id] = each.owner_id
        if not owners:
            return
        rights = {} if right is Right.OWN else self._shared_rights(identity, owners)
        for object_id, owner_id in owners.items():
            if rights.get(object_id, 0) >= right:
                continue
            what = f"{kind} {object_id}"
            if right is Right.OWN:
                refused = Forbidden(f"{what.capitalize()} belongs to someone else.", hint="Only its owner may do this.")
            else:
                refused = Forbidden(
                    f"You may not {_VERBS[right]} {what}.",
                    hint=f"Its owner can change that: farcall {kind}s share {object_id} --with {identity.identity_id} "
                    f"--right {right.word}",
                )
            raise refused.of(object_id, owner_id=owner_id)

    def _shared_rights(self, identity: Identity, object_ids: Iterable[str]) -> Mapping[str, Right]:
        return self._records.shares.find_rights(list(object_ids), self.principals_of(identity))

    def principals_of(self, identity: Identity) -> frozenset[str]:
        """The principals of a caller now. A token has the names and groups that its maker had; those of its identity
        count that were last recorded."""
        if identity.token_id:
            return self.recorded_principals(identity.identity_id)
        self.note_person(identity)
        return principals(identity)

    def recorded_principals(self, identity_id: str) -> frozenset[str]:
        """The principals of an identity that were last recorded; groups only for a time."""
        return recorded_principals(self._records, identity_id, now=self._clock())

    def note_person(self, identity: Identity) -> None:
        """Record by which names and groups the caller is known: open tasks and tokens have the rights of these."""
        found = principals(identity)
        if self._recorded.get(identity.identity_id) == found or SOME_GROUPS in identity.verified:
            return
        lost = self._records.shares.put_person(identity.identity_id, found)
        self._recorded.set(identity.identity_id, found)
        self._withdraw(identity, lost)

    def _withdraw(self, identity: Identity, lost: Set[str]) -> None:
        """The caller has left groups: open tasks may have needed them, which the reconciler cancels."""
        at = dt.datetime.fromtimestamp(self._clock(), dt.UTC)
        for share in self._records.shares.list_shares_with(lost) if lost else ():
            self._records.endpoints.put_withdrawal(Withdrawal(share.object_id, identity.identity_id, (), at))
