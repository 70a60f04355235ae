"""Endpoints: registration, changes, deletion, status."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from aws_lambda_powertools import Logger

from farcall_common.errors import InvalidRequest, NotFound, Unavailable
from farcall_common.store import Stores
from farcall_common.store.model import Endpoint, EndpointKey, Quota, Quotable
from farcall_common.wire.ids import new_id
from farcall_common.wire.states import EndpointState, Reporter
from farcall_lambdas.identity import Identity
from farcall_lambdas.logs import SERVICE
from farcall_lambdas.models.endpoints import RUNTIME, EndpointRuntime, RegisterEndpoint, UpdateEndpoint
from farcall_lambdas.models.fields import MAX_METADATA_BYTES
from farcall_lambdas.services.base import Service
from farcall_lambdas.services.deletion import end_tasks

logger = Logger(service=SERVICE, child=True)


#: Batches of open tasks that the request which deletes their endpoint ends.
_BATCHES_AT_ONCE: Final = 5


class EndpointService(Service):
    """Endpoints of the caller, and those of others that the caller may use."""

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
        """Change the fields that were sent, of an endpoint of the caller."""
        _refuse_unenforceable(wanted)
        endpoint = self._access.own_endpoint(identity, endpoint_id)
        changes = self._changes(identity, wanted, endpoint)
        done = self._entry(
            identity,
            "endpoint.update",
            endpoint_id,
            owner_id=endpoint.owner_id,
            changed=sorted(wanted.model_fields_set),
        )
        self._stores.endpoints.audited(done).change_endpoint(endpoint_id, changes)
        return dataclasses.replace(endpoint, **changes)

    def get(self, identity: Identity, endpoint_id: str) -> Endpoint:
        """An endpoint that the caller may use."""
        return self._access.endpoint(identity, endpoint_id)

    def search(self, identity: Identity, *, role: str) -> Sequence[Endpoint]:
        """``role`` is "owner" (the caller's) or "any" (those that the caller may use). Newest first; as many as fit an
        answer."""
        found = self._stores.endpoints.list_endpoints(identity.identity_id, role=role)
        return self._fitting(found, shown=lambda each: (each.name, each.display_name))

    def delete(self, identity: Identity, endpoint_id: str) -> None:
        """Delete an endpoint of the caller, disconnect its agent (its machine or its key may be compromised), and end
        its open tasks: some thousands at once, the others by the reconciler."""
        endpoint = self._access.own_endpoint(identity, endpoint_id)
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
        self._access.own_endpoint(identity, endpoint_id)
        return self._stores.endpoints.list_endpoint_keys(endpoint_id)

    def revoke_key(self, identity: Identity, endpoint_id: str, public_key: str) -> None:
        """Revoke a key of an endpoint of the caller, and end the session of the agent that has it. An agent with
        another key of the endpoint connects again.

        :raises NotFound: if the endpoint has no such key.
        """
        endpoint = self._access.own_endpoint(identity, endpoint_id)
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

    def state(self, endpoint: Endpoint) -> EndpointState:
        """Online while heartbeats arrive: a forwarder that died cannot report its endpoints as offline."""
        if not endpoint.online or endpoint.silent_s is None:
            return EndpointState.OFFLINE
        fresh = endpoint.silent_s < self._settings.online_window_s
        return EndpointState.ONLINE if fresh else EndpointState.OFFLINE

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
            self._check_fixed(identity, wanted.allowed_functions)
        return changes

    def _check_fixed(self, identity: Identity, references: Sequence[str]) -> None:
        """Allowed functions must not change: another owner can change a function at any time, also between its review
        and this request.

        :raises InvalidRequest: for another user's function without a version.
        """
        bare = [reference for reference in references if "@" not in reference]
        found = self._stores.functions.get_functions(bare, with_bodies=False) if bare else {}
        for function_id, function in found.items():
            if not identity.owns(function.owner_id):
                raise InvalidRequest(
                    f"Function {function_id} belongs to another user, who can change it.",
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
