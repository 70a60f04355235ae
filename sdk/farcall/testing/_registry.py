"""Functions and containers of the fake cloud."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farcall.testing._targets import TARGET, kept_target
from farcall_common.environments import Environment
from farcall_common.errors import (
    Conflict,
    ContainerUnknown,
    EndpointIncompatible,
    FunctionUnknown,
    InvalidRequest,
    did_you_mean,
)

Json = dict[str, Any]


class Registry:
    """Registered objects, and their routes."""

    def __init__(self) -> None:
        #: Versions of each function, the oldest first.
        self._functions: dict[str, list[Json]] = {}
        self._aliases: dict[str, Json] = {}
        self._containers: dict[str, Json] = {}

    @property
    def routes(self) -> Sequence[tuple[str, str, Callable[..., Any]]]:
        """Method, pattern of the path, and handler."""
        return (
            ("POST", "/v[23]/functions", self._register_function),
            ("GET", "/v3/functions", self._list_functions),
            ("GET", "/v2/functions/([^/]+)", self._get_function),
            ("DELETE", "/v2/functions/([^/]+)", self._delete_function),
            ("PUT", "/v3/functions/([^/]+)", self._update_function),
            ("GET", "/v3/functions/([^/]+)", self._find_function),
            ("GET", "/v3/functions/([^/]+)/versions", self._list_versions),
            ("POST", "/v3/aliases", self._put_alias),
            ("GET", "/v3/aliases", self._list_aliases),
            ("DELETE", "/v3/aliases/([^/]+)", self._delete_alias),
            ("POST", "/v[23]/containers", self._register_container),
            ("GET", "/v3/containers", self._list_containers),
            ("GET", "/v3/containers/([^/]+)", self._find_container),
            ("DELETE", "/v3/containers/([^/]+)", self._delete_container),
            ("GET", "/v2/containers/build/([^/]+)", self._get_build_status),
            ("GET", "/v2/containers/([^/]+)/([^/]+)", self._get_container),
        )

    def function(self, reference: str) -> Json:
        """A function by id, its newest version, or by ``<id>@<version>``."""
        function_id, _, version = reference.partition("@")
        versions = self._functions.get(function_id, [])
        number = int(version) if version else len(versions)
        if not 1 <= number <= len(versions):
            raise FunctionUnknown(f"there is no function {reference}")
        return versions[number - 1]

    def name_of(self, function_id: str) -> str | None:
        """The name of a function, None if it does not exist."""
        versions = self._functions.get(function_id)
        return str(versions[-1]["function_name"]) if versions else None

    def check_environments(self, body: Json) -> None:
        """The endpoint runs calls in this process, and so none in an environment."""
        if given := self._environment(body):
            wanted = [given]
        else:
            metadata = [self.function(reference)["metadata"] for reference in body["tasks"]]
            wanted = [Environment.of(each[_ENVIRONMENT]) for each in metadata if _ENVIRONMENT in each]
        for each in wanted:
            raise EndpointIncompatible(
                f"The tasks require container {each.label} ({each.type}), and endpoint fake runs no containers."
            )

    def _environment(self, body: Json) -> Environment | None:
        """The environment that a request names, if it names one."""
        try:
            if given := body.get("environment"):
                return Environment.of(given)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        reference = body.get("container") or body.get("container_uuid")
        return _definition(self._find_container({}, reference)) if reference else None

    def quotas(self) -> Json:
        """Use of each quota."""
        used = {"functions": len(self._functions), "endpoints": 1, "containers": len(self._containers)}
        return {name: {"used": count, "limit": 1000} for name, count in used.items()}

    # -- functions -----------------------------------------------------------------------------------------------------

    def _register_function(self, body: Json) -> Json:
        for field in ("function_name", "function_code"):
            if not isinstance(body.get(field), str) or not body[field]:
                raise InvalidRequest(f"{field} is missing")
        function_id = str(uuid.uuid4())
        shared = {
            "function_uuid": function_id,
            "function_name": body["function_name"],
            "description": body.get("description"),
            "public": body.get("public", False),
        }
        environment = self._environment(body)
        self._functions[function_id] = [shared | _version(1, body["function_code"], _metadata(body, environment))]
        return {"function_uuid": function_id, **_shown(environment)}

    def _update_function(self, body: Json, function_id: str) -> Json:
        newest = self.function(function_id)
        shared = {name: body[name] for name in ("function_name", "description", "public") if body.get(name) is not None}
        environment = self._environment(body)
        if environment is None and body.get("container") != "" and _ENVIRONMENT in newest["metadata"]:
            environment = Environment.of(newest["metadata"][_ENVIRONMENT])
        former = newest["metadata"]
        kept = {"memoize": former.get("memoize", False), "meta": former, "former": former}
        metadata = _metadata(kept | body, environment)
        code = str(body.get("function_code", newest["function_code"]))
        former = newest["metadata"].get("ssh_signature")
        if former and "signature" not in body and (newest | shared)["function_name"] == newest["function_name"]:
            metadata |= {"ssh_signature": former} if code == newest["function_code"] else {}
        versions = self._functions[function_id]
        if (code, metadata) != (newest["function_code"], newest["metadata"]):
            versions.append(newest | _version(len(versions) + 1, code, metadata))
        for version in versions:
            version |= shared
        return {"function_uuid": function_id, "version": len(versions), **_shown(environment)}

    def _list_functions(self, query: Json) -> Json:
        search, limit = query.get("search", "").lower(), int(query.get("limit", 100))
        found = [
            self._entry(function_id)
            for function_id in reversed(self._functions)
            if search in "\n".join(str(self.function(function_id)[key] or "") for key in _SEARCHED).lower()
        ]
        return {"functions": found[:limit]}

    def _get_function(self, query: Json, function_id: str) -> Json:
        shown = ("function_uuid", "function_name", "function_code", "description", "metadata")
        function = self.function(f"{function_id}@{query['version']}" if "version" in query else function_id)
        return {key: function[key] for key in shown}

    def _find_function(self, _: Json, reference: str) -> Json:
        if alias := self._aliases.get(reference):
            version = alias["version"]
            reference = alias["function_uuid"] if version is None else f"{alias['function_uuid']}@{version}"
        return self._entry(reference) | {"reference": reference}

    def _list_versions(self, query: Json, function_id: str) -> Json:
        self.function(function_id)
        shown = ("version", "function_hash", "metadata", "created_at")
        versions = [{key: each[key] for key in shown} for each in reversed(self._functions[function_id])]
        return {"function_uuid": function_id, "versions": versions[: int(query.get("limit", 100))]}

    def _delete_function(self, _: Json, function_id: str) -> Json:
        self.function(function_id)
        del self._functions[function_id]
        self._aliases = {name: each for name, each in self._aliases.items() if each["function_uuid"] != function_id}
        return {"result": 302}

    def _put_alias(self, body: Json) -> Json:
        version = body.get("version")
        self.function(body["function_id"] if version is None else f"{body['function_id']}@{version}")
        alias = {"name": body["name"], "function_uuid": body["function_id"], "version": version}
        self._aliases[body["name"]] = alias
        return alias

    def _list_aliases(self, _: Json) -> Json:
        return {"aliases": [self._aliases[name] for name in sorted(self._aliases)]}

    def _delete_alias(self, _: Json, name: str) -> Json:
        if self._aliases.pop(name, None) is None:
            raise FunctionUnknown(f"there is no alias {name}")
        return {"result": 302}

    def _entry(self, reference: str) -> Json:
        return {key: value for key, value in self.function(reference).items() if key != "function_code"}

    # -- containers ----------------------------------------------------------------------------------------------------

    def _register_container(self, body: Json) -> Json:
        container_id = str(uuid.uuid4())
        known = next((each for each in self._containers.values() if each["name"] == body.get("name")), None)
        container = {
            "container_uuid": container_id,
            "name": body.get("name") or container_id,
            "type": body["type"],
            "location": body.get("location", ""),
            "requirements": body.get("requirements") or [],
            "preload": body.get("preload"),
            "description": body.get("description"),
            "created_at": time.time(),
        }
        definition = _definition(container)
        if known is not None:
            if _definition(known).key != definition.key:
                raise Conflict(f"there is a container named {known['name']} already")
            return {"container_id": known["container_uuid"]}
        self._containers[container_id] = container
        return {"container_id": container_id}

    def _list_containers(self, query: Json) -> Json:
        return {"containers": list(reversed(self._containers.values()))[: int(query.get("limit", 100))]}

    def _find_container(self, _: Json, reference: str) -> Json:
        for container in self._containers.values():
            if reference in (container["container_uuid"], container["name"]):
                return container
        names = [each["name"] for each in self._containers.values()]
        raise ContainerUnknown(f"there is no container {reference}", hint=did_you_mean(reference, names))

    def _get_container(self, _: Json, container_id: str, technology: str) -> Json:
        found = self._find_container({}, container_id)
        if found["type"] != technology:
            raise ContainerUnknown(f"there is no container {container_id} of type {technology}")
        return {"container": found}

    def _get_build_status(self, _: Json, container_id: str) -> Json:
        return {"container_id": self._find_container({}, container_id)["container_uuid"], "status": "provided"}

    def _delete_container(self, _: Json, reference: str) -> Json:
        del self._containers[self._find_container({}, reference)["container_uuid"]]
        return {"result": 302}


_SEARCHED = ("function_name", "description")
#: Key in a function's metadata.
_ENVIRONMENT = "task_environment"


def _definition(container: Mapping[str, Any]) -> Environment:
    """The environment that a container is."""
    name = "" if container["name"] == container["container_uuid"] else container["name"]
    fields = {field: container[field] for field in ("type", "location", "requirements", "preload")}
    try:
        return Environment.of({**fields, "name": name})
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def _shown(environment: Environment | None) -> Json:
    return {"environment": environment.label} if environment else {}


def _metadata(body: Mapping[str, Any], environment: Environment | None) -> Json:
    own = ("memoize", "ssh_signature", _ENVIRONMENT, TARGET)
    kept = {key: value for key, value in (body.get("meta") or {}).items() if key not in own}
    kept |= {"memoize": True} if body.get("memoize") else {}
    kept |= {_ENVIRONMENT: environment.to_json()} if environment else {}
    kept |= kept_target(body)
    return kept | ({"ssh_signature": body["signature"]} if body.get("signature") else {})


def _version(number: int, code: str, metadata: Json) -> Json:
    return {
        "function_code": code,
        "function_hash": hashlib.sha256(code.encode()).hexdigest(),
        "metadata": metadata,
        "version": number,
        "created_at": time.time(),
    }
