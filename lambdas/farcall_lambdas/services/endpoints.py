"""Endpoints: registration, changes, deletion, status."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from aws_lambda_powertools import Logger

from farcall_common import environments
from farcall_common.errors import Forbidden, InvalidRequest, NotFound, Unavailable, Unsupported
from farcall_common.qos_report import QosReport
from farcall_common.store import Stores
from farcall_common.store.model import Endpoint, EndpointKey, EnvironmentState, Quota, Quotable, Right, Task
from farcall_common.wire.ids import new_id
from farcall_common.wire.states import EndpointState, Reporter
from farcall_lambdas.identity import Identity
from farcall_lambdas.issued_credentials import IssuedCredentials
from farcall_lambdas.logs import SERVICE
from farcall_lambdas.models.endpoints import (
    RUNTIME,
    CancelEndpointTasks,
    EndpointRuntime,
    RegisterEndpoint,
    UpdateEndpoint,
)
from farcall_lambdas.models.fields import MAX_METADATA_BYTES
from farcall_lambdas.services.base import Context, Service, submitters_of
from farcall_lambdas.services.cancel import Cancellation, CancelService
from farcall_lambdas.services.deletion import end_tasks
from farcall_lambdas.services.withdrawal import WithdrawalService, narrows

logger = Logger(service=SERVICE, child=True)

#: Tasks that one request cancels by submitter or function.
_CANCELLED_AT_ONCE: Final = 1000


#: Batches of open tasks that the request which deletes their endpoint ends.
_BATCHES_AT_ONCE: Final = 5


def renamed(state: EnvironmentState, label: str) -> EnvironmentState:
    """The state of an environment with the caller's name for it: another submitter may have named it first."""
    if not state.label or state.label == label:
        return state
    text, problem = (environments.renamed(each, state.label, label) for each in (state.text, state.problem))
    return dataclasses.replace(state, label=label, text=text, problem=problem)


class EndpointService(Service):
    """Endpoints of the caller, and those of others that the caller may use."""

    def __init__(
        self,
        context: Context,
        withdrawals: WithdrawalService,
        cancel: CancelService,
        credentials: IssuedCredentials | None = None,
    ) -> None:
        super().__init__(context)
        self._withdrawals = withdrawals
        self._cancel = cancel
        self._credentials = credentials

    def register(self, identity: Identity, wanted: RegisterEndpoint) -> Endpoint:
        """Store a new endpoint of the caller.

        :raises QuotaExceeded: over the number of endpoints.
        """
        _refuse_unenforceable(wanted)
        endpoint = Endpoint(
            endpoint_id=new_id(),
            owner_id=identity.identity_id,
            name=wanted.endpoint_name,
            created_at=self._now(),
        )
        endpoint = dataclasses.replace(endpoint, **self._changes(identity, wanted, endpoint))
        done = self._entry(identity, "endpoint.register", endpoint.endpoint_id, name=endpoint.name)
        self._storage.check()
        quota = Quota(Quotable.ENDPOINT, identity.identity_id, self._settings.max_endpoints)
        self._stores.endpoints.audited(done, quota=quota).put_endpoint(endpoint)
        return endpoint

    def update(self, identity: Identity, endpoint_id: str, wanted: UpdateEndpoint) -> Endpoint:
        """Change the fields that were sent, of an endpoint of the caller. Open tasks without rights are cancelled,
        unless ``waiting_tasks`` says otherwise. With another kind of list of functions, the agent connects again: its
        forwarder reads the list then."""
        _refuse_unenforceable(wanted)
        endpoint = self._access.endpoint(identity, endpoint_id, Right.MANAGE)
        changes = self._changes(identity, wanted, endpoint)
        done = self._entry(
            identity,
            "endpoint.update",
            endpoint_id,
            owner_id=endpoint.owner_id,
            changed=sorted(wanted.model_fields_set),
        )
        after = dataclasses.replace(endpoint, **changes)
        cancels = wanted.waiting_tasks == "cancel" or (wanted.waiting_tasks is None and narrows(endpoint, changes))
        ends = (endpoint.allowed_functions is None) != (after.allowed_functions is None)
        withdrawal = None
        if cancels or ends:
            withdrawal = self._withdrawals.begin(identity, endpoint, cancels_tasks=cancels, ends_sessions=ends)
        self._stores.endpoints.audited(done).change_endpoint(endpoint_id, changes)
        if withdrawal is not None:
            self._withdrawals.carry_out(withdrawal)
        return after

    def open_tasks(
        self,
        identity: Identity,
        endpoint_id: str,
        *,
        submitter: str | None = None,
        function_id: str | None = None,
        after: str | None = None,
        limit: int,
    ) -> Sequence[Task]:
        """Open tasks of any submitter at an endpoint of the caller, by id, after ``after``; without their bytes."""
        self._access.endpoint(identity, endpoint_id, Right.MANAGE)
        return self._stores.tasks.find_open_tasks(
            endpoint_id=endpoint_id, owner_id=submitter, function_id=function_id, after=after or "", limit=limit
        )

    def cancel_tasks(
        self, identity: Identity, endpoint_id: str, wanted: CancelEndpointTasks
    ) -> tuple[Mapping[str, Cancellation], str | None]:
        """Cancel tasks at an endpoint of the caller: by their ids, or some open ones by submitter and function. Returns
        the outcomes, and the id after which more open tasks may be.

        :raises InvalidRequest: with ids and something else, or with nothing.
        """
        self._access.endpoint(identity, endpoint_id, Right.MANAGE)
        by_kind = wanted.submitter is not None or wanted.function_id is not None
        if by_kind == (wanted.task_ids is not None):
            raise InvalidRequest(
                "Which tasks to cancel is not clear.", hint="Send task_ids, or else submitter, function_id or both."
            )
        if wanted.task_ids is not None:
            return self._cancel.cancel_at_endpoint(identity, endpoint_id, wanted.task_ids), None
        tasks = self.open_tasks(
            identity,
            endpoint_id,
            submitter=wanted.submitter,
            function_id=wanted.function_id,
            after=wanted.after,
            limit=_CANCELLED_AT_ONCE,
        )
        ids = [task.task_id for task in tasks]
        following = ids[-1] if len(ids) == _CANCELLED_AT_ONCE else None
        return self._cancel.cancel_at_endpoint(identity, endpoint_id, ids), following

    def get(self, identity: Identity, endpoint_id: str) -> Endpoint:
        """An endpoint that the caller may see."""
        return self._access.endpoint(identity, endpoint_id, Right.SEE)

    def search(self, identity: Identity, *, role: str) -> Sequence[Endpoint]:
        """``role`` is "owner" (the caller's) or "any" (those that the caller may see, too). Newest first; as many
        as fit an answer."""
        shared = None
        if role == "any":
            shared = {
                each.share.object_id for each in self._stores.shares.find_objects(self._access.principals_of(identity))
            }
        found = self._stores.endpoints.list_endpoints(identity.identity_id, shared=shared)
        return self._fitting(found, shown=lambda each: (each.name, each.display_name))

    def delete(self, identity: Identity, endpoint_id: str) -> None:
        """Delete an endpoint of the caller, disconnect its agent (its machine or its key may be compromised), and end
        its open tasks: some thousands at once, the others by the reconciler."""
        endpoint = self._access.endpoint(identity, endpoint_id, Right.OWN)
        done = self._entry(identity, "endpoint.delete", endpoint_id, owner_id=endpoint.owner_id)
        keys = [each.public_key for each in self._stores.endpoints.list_endpoint_keys(endpoint_id)]
        self._stores.endpoints.audited(done).delete_endpoint(endpoint_id)
        end_sessions(self._stores, endpoint_id, keys)
        try:
            for _ in range(_BATCHES_AT_ONCE):
                if end_tasks(self._stores, endpoint_id, reporter=Reporter.API, at=self._now()).is_all:
                    break
        except Unavailable:
            logger.warning("a store is unavailable; the reconciler will end the tasks", endpoint_id=endpoint_id)

    def keys(self, identity: Identity, endpoint_id: str) -> Sequence[EndpointKey]:
        """The keys of an endpoint of the caller, the oldest first."""
        self._access.endpoint(identity, endpoint_id, Right.MANAGE)
        return self._stores.endpoints.list_endpoint_keys(endpoint_id)

    def revoke_key(self, identity: Identity, endpoint_id: str, public_key: str) -> None:
        """Revoke a key of an endpoint of the caller, and end the session of the agent that has it. An agent with
        another key of the endpoint connects again.

        :raises NotFound: if the endpoint has no such key.
        """
        endpoint = self._access.endpoint(identity, endpoint_id, Right.OWN)
        known = [each.public_key for each in self._stores.endpoints.list_endpoint_keys(endpoint_id)]
        if public_key not in known:
            raise NotFound(
                f"Endpoint {endpoint_id} has no such key.", hint=f"GET /v3/endpoints/{endpoint_id}/keys lists its keys."
            )
        done = self._entry(
            identity, "endpoint.key.revoke", endpoint_id, owner_id=endpoint.owner_id, public_key=public_key
        )
        self._stores.endpoints.audited(done).revoke_endpoint_key(endpoint_id, public_key, at=self._now())
        end_sessions(self._stores, endpoint_id, [public_key])

    def make_credential(self, identity: Identity, endpoint_id: str) -> str:
        """A new credential of an endpoint of the caller, which can connect the endpoint and do nothing else. It
        replaces the former one; the session of an agent with that one continues until its ticket expires.

        :raises Unsupported: if this API makes none.
        """
        endpoint = self._access.endpoint(identity, endpoint_id, Right.OWN)
        if self._credentials is None:
            raise Unsupported("This API makes no credentials of endpoints.", hint="Use the token of the owner.")
        owner = dataclasses.replace(identity, identity_id=endpoint.owner_id)
        credential_id = new_id()
        credential = self._credentials.issue(owner, endpoint_id=endpoint_id, credential_id=credential_id)
        done = self._entry(identity, "endpoint.credential", endpoint_id, owner_id=endpoint.owner_id)
        self._stores.endpoints.audited(done).change_endpoint(endpoint_id, {"credential_id": credential_id})
        return credential

    def revoke_credential(self, identity: Identity, endpoint_id: str) -> None:
        """Revoke the credential of an endpoint of the caller, and end the session of its agent: its host may be
        compromised."""
        endpoint = self._access.endpoint(identity, endpoint_id, Right.OWN)
        done = self._entry(identity, "endpoint.credential.revoke", endpoint_id, owner_id=endpoint.owner_id)
        keys = [each.public_key for each in self._stores.endpoints.list_endpoint_keys(endpoint_id)]
        self._stores.endpoints.audited(done).change_endpoint(endpoint_id, {"credential_id": ""})
        end_sessions(self._stores, endpoint_id, keys)

    def state(self, endpoint: Endpoint) -> EndpointState:
        """Online while heartbeats arrive: a forwarder that died cannot report its endpoints as offline."""
        if not endpoint.online or endpoint.silent_s is None:
            return EndpointState.OFFLINE
        fresh = endpoint.silent_s < self._settings.online_window_s
        return EndpointState.ONLINE if fresh else EndpointState.OFFLINE

    def report_age_s(self, endpoint: Endpoint) -> float | None:
        """Seconds since the last report of an endpoint's agent; None if there was none."""
        return endpoint.status.age_s(now=self._now().timestamp())

    def problem(self, identity: Identity, endpoint: Endpoint) -> str | None:
        """The problem that an endpoint reported; None if there is none, or if the caller may not use the endpoint: it
        quotes the scheduler."""
        if not endpoint.status.problem or not self._permits(identity, endpoint.endpoint_id, Right.USE):
            return None
        return endpoint.status.problem

    def environments(self, identity: Identity, endpoint: Endpoint) -> Sequence[tuple[EnvironmentState, bool]]:
        """The environments that an endpoint reported, each with whether the caller may read its name and what is said
        of it: who manages the endpoint may, others of their own containers, with the names of these. None for a caller
        who may not use it."""
        states = endpoint.status.environments
        if not states:
            return ()
        rights = [right for right in (Right.USE, Right.MANAGE) if self._permits(identity, endpoint.endpoint_id, right)]
        if not rights:
            return ()
        if Right.MANAGE in rights:
            return [(state, True) for state in states]
        own: dict[str, str] = {}
        for container in self._stores.functions.list_containers(identity.identity_id):
            with contextlib.suppress(ValueError):
                environment = container.environment()
                own[environment.key] = environment.label
        return [(renamed(state, own[state.key]) if state.key in own else state, state.key in own) for state in states]

    def qos(self, identity: Identity, endpoint_id: str) -> tuple[Endpoint, QosReport]:
        """How an endpoint that the caller may use holds latency targets, as it last reported: to others than its owner
        only those of their own tasks."""
        endpoint = self._access.endpoint(identity, endpoint_id, Right.USE)
        report = self._stores.endpoints.get_qos_report(endpoint_id) or QosReport()
        if not identity.owns(endpoint.owner_id):
            report = report.of(submitters_of(identity, endpoint))
        return endpoint, report

    def _permits(self, identity: Identity, endpoint_id: str, right: Right) -> bool:
        try:
            self._access.endpoint(identity, endpoint_id, right)
        except Forbidden:
            return False
        return True

    def workers(self, endpoint_id: str) -> Mapping[str, str]:
        """Workers of an endpoint as reported when it last connected, with Globus Compute's keys."""
        endpoint = self._stores.endpoints.get_endpoint(endpoint_id)
        runtime = EndpointRuntime.read(endpoint.metadata) if endpoint is not None else None
        if runtime is None or not runtime.python_version:
            return {}
        workers = {"endpoint_id": endpoint_id, "python_version": runtime.python_version}
        packages = runtime.packages
        others = {
            "dill_version": packages.get("dill"),
            "os": runtime.platform,
            "globus_compute_sdk_version": (ours := packages.get("farcall-endpoint")) and f"farcall-endpoint {ours}",
        }
        return workers | {name: str(value) for name, value in others.items() if value}

    def _changes(
        self, identity: Identity, wanted: RegisterEndpoint | UpdateEndpoint, endpoint: Endpoint
    ) -> dict[str, Any]:
        changes = _changes(wanted, endpoint)
        if wanted.allowed_functions:
            self._check_fixed(identity, endpoint.owner_id, wanted.allowed_functions)
        return changes

    def _check_fixed(self, identity: Identity, owner_id: str, references: Sequence[str]) -> None:
        """Functions that an endpoint allows must not change: another user, also a manager of the endpoint, can
        change a function at any time, also between its review and this request.

        :raises InvalidRequest: for a function without a version that another user owns or manages.
        """
        bare = [reference for reference in references if "@" not in reference]
        found = self._stores.functions.get_functions(bare, with_bodies=False) if bare else {}
        owners = identity.identity_set if identity.owns(owner_id) else {owner_id}
        for function_id, function in found.items():
            if function.owner_id not in owners:
                reason = "does not belong to the endpoint's owner: its own owner can change it"
            elif any(each.right >= Right.MANAGE for each in self._stores.shares.list_shares(function_id)):
                reason = "has managers, who can add versions"
            else:
                continue
            raise InvalidRequest(
                f"Function {function_id} {reason}.",
                hint=f"Allow a version that you have read: {function_id}@VERSION.",
            )


def end_sessions(stores: Stores, endpoint_id: str, keys: Sequence[str]) -> None:
    """Refuse these former keys of an endpoint from now on, and end the session of its agent."""
    try:
        stores.queue.dismiss(keys)
        stores.queue.evict(endpoint_id)
    except Unavailable:
        logger.warning("queue unavailable; an agent may stay until its ticket expires", endpoint_id=endpoint_id)


def _refuse_unenforceable(wanted: RegisterEndpoint | UpdateEndpoint) -> None:
    """A requested protection that is not enforced would be worse than none."""
    for name in ("authentication_policy", "high_assurance", "admins"):
        if getattr(wanted, name):
            raise InvalidRequest(f"{name} is not supported by this service.", hint=f"Leave {name} out.")


def _changes(wanted: RegisterEndpoint | UpdateEndpoint, endpoint: Endpoint) -> dict[str, Any]:
    """The fields that were sent. An explicit null clears a text or the allow-list, and is ignored elsewhere."""
    sent = wanted.model_fields_set
    if RUNTIME in (wanted.metadata or {}):
        raise InvalidRequest(
            f"metadata has the field {RUNTIME}, which the endpoint's agent reports.", hint=f"Leave {RUNTIME} out."
        )
    changes: dict[str, Any] = {
        name: getattr(wanted, name) for name in ("display_name", "description", "allowed_functions") if name in sent
    }
    if wanted.endpoint_name is not None:
        changes["name"] = wanted.endpoint_name
    changes |= {name: value for name in ("public", "multi_user") if (value := getattr(wanted, name)) is not None}
    if not wanted.metadata and "subscription_uuid" not in sent:
        return changes
    metadata = {**endpoint.metadata, **(wanted.metadata or {})}
    if wanted.metadata and len(json.dumps(metadata)) > 2 * MAX_METADATA_BYTES:  # half of it is the agent's
        raise InvalidRequest(f"The metadata of an endpoint has more than {MAX_METADATA_BYTES} bytes.")
    if "subscription_uuid" in sent:
        metadata["subscription_uuid"] = wanted.subscription_uuid
    return {**changes, "metadata": metadata}
