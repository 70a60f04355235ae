"""Functions, containers and endpoints: registering them, and looking them up."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from farcall._ids import as_id
from farcall._unsupported import refuse
from farcall_common.errors import Unsupported

if TYPE_CHECKING:
    from farcall._api import Api
    from farcall_common.payload import Serializer

Json = dict[str, Any]


class SourceCode:
    """Registers functions as text."""

    _api: Api

    def register_source_code(
        self,
        source: str,
        function_name: str,
        *,
        description: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        public: bool = False,
    ) -> str:
        """Register source text that defines ``function_name``, and return the id of that function.

        The text is run by the worker, whatever its Python version, and may hold imports and other functions.

        :raises SerializationError: if no function can have that name.
        """
        from farcall._calls import source_registration

        return self._api.register_function(
            source_registration(source, function_name, description=description, metadata=metadata, public=public)
        )


class Catalogue(SourceCode):
    """The half of a :class:`Client` that knows functions, containers and endpoints."""

    #: What turns functions and arguments into bytes.
    fx_serializer: Serializer

    # -- functions -----------------------------------------------------------------------------------------------------

    def register_function(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        public: bool = False,
        group: str | None = None,
        ha_endpoint_id: str | None = None,
        memoize: bool = False,
    ) -> str:
        """Register a function and return its id. ``description`` is the docstring unless given.

        :param memoize: answer equal calls from memory unless they say otherwise (see :attr:`Executor.memoize`).
        :param group: only None, as ``ha_endpoint_id``: functions are shared with everybody or with nobody.
        :raises SerializationError: if the function cannot be sent.
        :raises Unsupported: for sharing that could not be enforced.
        """
        refuse("group", group, hint="A function is its owner's alone, or public.")
        refuse("ha_endpoint_id", ha_endpoint_id, hint="Let the endpoint allow this function only.")
        return self._register(
            function,
            name=name,
            description=description,
            metadata=metadata,
            public=public,
            memoize=memoize,
            serializer=self.fx_serializer,
        )

    def update_function(
        self,
        function_id: str | uuid.UUID,
        function: Callable[..., Any] | None = None,
        *,
        name: str | None = None,
        description: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        public: bool | None = None,
        memoize: bool | None = None,
    ) -> int:
        """Change a function of yours, and return the number of its newest version.

        Another ``function`` or ``metadata`` make a new version, which calls by the id run from then on; the old ones
        stay, and are called by ``<id>@<version>``. Name, description and sharing are those of all versions. What is
        None stays as it is.

        :raises SerializationError: if the function cannot be sent.
        """
        from farcall._calls import registration

        body: Json = {"meta": None if metadata is None else dict(metadata)}
        if function is not None:
            whole = registration(function, metadata=metadata, serializer=self.fx_serializer)
            body = {key: whole[key] for key in ("function_code", "meta")}
        body |= {"function_name": name, "description": description, "public": public, "memoize": memoize}
        given = {key: value for key, value in body.items() if value is not None}
        return int(self._api.update_function(as_id(function_id), given)["version"])

    def get_function(self, function_id: str | uuid.UUID, *, version: int | None = None) -> Json:
        """``function_uuid, function_name, function_code, description, metadata`` of a function, or a version of it."""
        return self._api.get_function(str(function_id), version=version)

    def get_functions(self, *, search: str = "", limit: int = 100) -> list[Json]:
        """Your functions, newest first; with ``search``, those that have it in their name or description.

        ``version`` is the number of the newest version, and so how many there are.
        """
        return self._api.list_functions(search=search, limit=limit)

    def find_function(self, function: str | uuid.UUID) -> Json:
        """What an id, ``<id>@<version>`` or an alias of yours means: ``function_uuid, version, reference`` (what calls
        are submitted by), ``function_name``, ``metadata`` and so on."""
        return self._api.find_function(str(function))

    def get_function_versions(self, function_id: str | uuid.UUID, *, limit: int = 100) -> list[Json]:
        """Versions of a function, newest first: ``version, function_hash, metadata, created_at`` (epoch seconds)."""
        return self._api.list_versions(str(function_id), limit=limit)

    def delete_function(self, function_id: str | uuid.UUID) -> None:
        """Forget a function with its versions and aliases. Tasks whose endpoint has it keep running."""
        self._api.delete_function(str(function_id))

    def set_alias(self, name: str, function_id: str | uuid.UUID, *, version: int | None = None) -> None:
        """Give a function a name of yours, to be called by; without ``version``, whichever is the newest.

        The name may have named something else before.
        """
        self._api.put_alias({"name": name, "function_id": as_id(function_id), "version": version})

    def get_aliases(self) -> list[Json]:
        """Your aliases: ``name, function_uuid, version`` (None for the newest)."""
        return self._api.list_aliases()

    def delete_alias(self, name: str) -> None:
        """Take a name away. The function stays."""
        self._api.delete_alias(name)

    def _register(self, function: Callable[..., Any], *, serializer: Serializer, **terms: Any) -> str:
        from farcall._calls import registration

        return self._api.register_function(registration(function, serializer=serializer, **terms))

    # -- containers ----------------------------------------------------------------------------------------------------

    def register_container(self, location: str, container_type: str, name: str = "", description: str = "") -> str:
        """Register an environment and return its id: ``location`` is what ``container_type`` (docker, apptainer, ...)
        calls the image. Images are made and kept elsewhere.

        :param name: what to call it in :meth:`Client.run` and elsewhere; else its id.
        """
        body = {"name": name, "type": container_type, "location": location, "description": description or None}
        return self._api.register_container(body)

    def get_container(self, container_uuid: str | uuid.UUID, container_type: str | None = None) -> Json:
        """``container_uuid, name, type, location, description, created_at`` of a container of yours, by id or name;
        with ``container_type``, only if it is of that."""
        if container_type is None:
            return self._api.find_container(str(container_uuid))
        return self._api.get_container(as_id(container_uuid), container_type)

    def get_container_build_status(self, container_id: str | uuid.UUID) -> str:
        """Always "provided": no images are built here.

        :raises ContainerUnknown: if you have no such container.
        """
        return self._api.get_build_status(as_id(container_id))

    def get_containers(self, *, limit: int = 100) -> list[Json]:
        """Your containers, newest first."""
        return self._api.list_containers(limit=limit)

    def delete_container(self, container: str | uuid.UUID) -> None:
        """Forget a container of yours, by id or name. Its image stays where it is."""
        self._api.delete_container(str(container))

    # -- endpoints -----------------------------------------------------------------------------------------------------

    def get_endpoints(self, *, role: str = "any") -> list[Json]:
        """``uuid, name, display_name, owner`` of endpoints: ``role`` "any" for all you may use, "owner" for yours."""
        return self._api.list_endpoints(role=role)

    def register_endpoint(
        self,
        name: str,
        endpoint_id: str | uuid.UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        multi_user: bool | None = None,
        display_name: str | None = None,
        allowed_functions: Sequence[str | uuid.UUID] | None = None,
        *,
        public: bool | None = None,
        subscription_id: str | uuid.UUID | None = None,
        auth_policy: str | uuid.UUID | None = None,
        high_assurance: bool | None = None,
        admins: Sequence[str | uuid.UUID] | None = None,
    ) -> Json:
        """Register an endpoint, or change the one with ``endpoint_id``: its ``endpoint_id`` and how to reach it.

        What is None stays as it is. `farcall-endpoint start` registers its own endpoint by itself.

        :param public: let everybody use it.
        :param allowed_functions: ids of the only functions that it runs.
        :param auth_policy: only None, as ``high_assurance`` and ``admins``: a protection that is not enforced is none.
        :raises Unsupported: for those.
        """
        for asked, value in (("auth_policy", auth_policy), ("high_assurance", high_assurance), ("admins", admins)):
            refuse(asked, value, hint="An endpoint is its owner's alone, or public.")
        body = {
            "endpoint_name": name,
            "metadata": metadata,
            "multi_user": multi_user,
            "display_name": display_name,
            "allowed_functions": None if allowed_functions is None else [as_id(each) for each in allowed_functions],
            "public": public,
            "subscription_uuid": None if subscription_id is None else as_id(subscription_id),
        }
        given = {key: value for key, value in body.items() if value is not None}
        return self._api.put_endpoint(None if endpoint_id is None else as_id(endpoint_id), given)

    def get_endpoint(self, endpoint_id: str | uuid.UUID) -> Json:
        """What is registered of an endpoint."""
        return self._api.get_endpoint(str(endpoint_id))

    #: What ``globus_compute_sdk`` calls it.
    get_endpoint_metadata = get_endpoint

    def get_endpoint_status(self, endpoint_id: str | uuid.UUID) -> Json:
        """``status`` ("online", "offline") and ``details``: numbers of managers, workers and tasks."""
        return self._api.get_endpoint_status(str(endpoint_id))

    def get_allowed_functions(self, endpoint_id: str | uuid.UUID) -> Json:
        """``restricted``, and if so, ``functions``: the only ones that the endpoint runs."""
        return self._api.get_allowed_functions(str(endpoint_id))

    def delete_endpoint(self, endpoint_id: str | uuid.UUID) -> None:
        """Forget an endpoint of yours."""
        self._api.delete_endpoint(str(endpoint_id))

    def stop_endpoint(self, endpoint_id: str | uuid.UUID) -> None:
        """Not from here: an endpoint is stopped where it runs.

        :raises Unsupported: always.
        """
        raise Unsupported(
            f"endpoint {endpoint_id} cannot be stopped from here",
            hint="`farcall-endpoint stop` on its machine does that.",
        )
