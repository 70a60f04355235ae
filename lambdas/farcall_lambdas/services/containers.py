"""Containers: registration, and finding them by id or name. No image is built or fetched here."""

from __future__ import annotations

from collections.abc import Sequence

from farcall_common.environments import Environment
from farcall_common.errors import Conflict, ContainerUnknown, InvalidRequest, did_you_mean
from farcall_common.store.model import Container, Quota, Quotable
from farcall_common.wire.ids import is_uuid, new_id
from farcall_lambdas.identity import Identity
from farcall_lambdas.models.containers import RegisterContainer
from farcall_lambdas.services.base import Service


class ContainerService(Service):
    """Containers of the caller; those of others do not exist."""

    def register(self, identity: Identity, wanted: RegisterContainer) -> Container:
        """Register a container. A repeated registration returns the existing one.

        :raises Conflict: for the name of a different container of the caller.
        :raises QuotaExceeded: over the number of containers.
        """
        owner_id, container_id, definition = identity.identity_id, new_id(), wanted.environment()
        known = self._stores.functions.find_container(owner_id, wanted.name) if wanted.name else None
        if known is not None:
            if (known.technology, known.image, known.requirements, known.preload) != (
                definition.type,
                definition.location,
                definition.requirements,
                definition.preload,
            ):
                raise Conflict(
                    f"You have a different container named {known.name} already.",
                    hint="Choose another name, or delete that one first.",
                )
            return known
        container = Container(
            container_id=container_id,
            owner_id=owner_id,
            name=wanted.name or container_id,
            technology=definition.type,
            image=definition.location,
            description=wanted.description,
            created_at=self._now(),
            requirements=definition.requirements,
            preload=definition.preload,
        )
        about = {"name": container.name, "image": container.image or " ".join(container.requirements)}
        done = self._entry(identity, "container.register", container.container_id, **about)
        self._storage.check()
        quota = Quota(Quotable.CONTAINER, owner_id, self._settings.max_containers)
        self._stores.functions.audited(done, quota=quota).add_container(container)
        return container

    def get(self, identity: Identity, reference: str, *, technology: str | None = None) -> Container:
        """A container of the caller by id or name; with ``technology``, only one of that.

        :raises ContainerUnknown: if there is none.
        """
        if is_uuid(reference):
            found = self._stores.functions.get_container(reference)
        else:
            found = self._stores.functions.find_container(identity.identity_id, reference)
        if found is None or not identity.owns(found.owner_id) or technology not in (None, found.technology):
            kind = f" of type {technology}" if technology else ""
            names = [each.name for each in self._stores.functions.list_containers(identity.identity_id)]
            raise ContainerUnknown(f"You have no container {reference}{kind}.", hint=did_you_mean(reference, names))
        return found

    def environment(self, identity: Identity, reference: str) -> tuple[str, Environment]:
        """Id and definition of a container of the caller, by id or name.

        :raises ContainerUnknown: if there is none.
        :raises InvalidRequest: if it cannot be an environment.
        """
        container = self.get(identity, reference)
        try:
            return container.container_id, container.environment()
        except ValueError as error:
            raise InvalidRequest(
                f"Container {container.name} cannot be used: {error}.",
                hint="Delete it, and register it as it should be.",
            ) from error

    def newest(self, identity: Identity, *, limit: int) -> Sequence[Container]:
        """The caller's containers, newest first; as many as fit an answer."""
        found = self._stores.functions.list_containers(identity.identity_id, limit=limit)
        return self._fitting(
            found, shown=lambda each: (each.name, each.image, each.description, each.requirements, each.preload)
        )

    def delete(self, identity: Identity, reference: str) -> None:
        """Delete a container of the caller. Tasks that were submitted with it keep it.

        :raises ContainerUnknown: if there is none.
        """
        container = self.get(identity, reference)
        done = self._entry(identity, "container.delete", container.container_id, owner_id=container.owner_id)
        self._stores.functions.audited(done).delete_container(container.container_id)
