"""Fake functions and containers, in memory."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Collection, Mapping, Sequence

from farcall_common.errors import Conflict, FunctionUnknown
from farcall_common.store.model import SIGNATURE, Container, Function, FunctionAlias, FunctionBody
from tests.support.stores.reach import moment
from tests.support.stores.tokens import FakeTokens


class FakeFunctions(FakeTokens):
    """:class:`~farcall_common.store.ports.Functions` in memory; a part of FakeDatabase."""

    def __init__(self) -> None:
        super().__init__()
        self._functions: dict[str, dict[int, Function]] = {}
        self._aliases: dict[tuple[str, str], FunctionAlias] = {}
        self._containers: dict[str, Container] = {}

    # functions

    def add_function(self, function: Function) -> None:
        with self._call():
            versions = self._functions.setdefault(function.function_id, {})
            if versions and _newest(versions).owner_id != function.owner_id:
                raise Conflict(f"function {function.function_id} belongs to someone else")
            if function.version in versions:
                raise Conflict(f"function {function.function_id} has a version {function.version} already")
            versions[function.version] = dataclasses.replace(
                function, created_at=function.created_at or dt.datetime.now(dt.UTC)
            )
            _rename(versions, function)

    def update_function(self, function: Function) -> None:
        with self._call():
            _rename(self._functions.get(function.function_id, {}), function)

    def get_functions(self, function_ids: Sequence[str], *, with_bodies: bool = True) -> Mapping[str, Function]:
        with self._call():
            found = {id_: _newest(self._functions[id_]) for id_ in function_ids if id_ in self._functions}
        if with_bodies:
            return found
        return {id_: dataclasses.replace(function, body=b"") for id_, function in found.items()}

    def get_version(self, function_id: str, version: int, *, with_body: bool = True) -> Function | None:
        with self._call():
            found = self._functions.get(function_id, {}).get(version)
        return found if with_body or found is None else dataclasses.replace(found, body=b"")

    def get_bodies(self, wanted: Collection[tuple[str, str]]) -> Mapping[str, Mapping[str, FunctionBody]]:
        with self._call():
            versions = [each for id_, _ in wanted for each in self._functions.get(id_, {}).values()]
        found: dict[str, dict[str, FunctionBody]] = {}
        for each in sorted(versions, key=lambda version: version.version):
            if _key(each) in wanted:
                body = FunctionBody(each.name, each.body, each.metadata.get(SIGNATURE, ""))
                found.setdefault(each.function_id, {})[each.body_hash] = body
        return found

    def list_versions(self, function_id: str, *, limit: int = 100) -> Sequence[Function]:
        with self._call():
            versions = self._functions.get(function_id, {})
        return [dataclasses.replace(versions[each], body=b"") for each in sorted(versions, reverse=True)[:limit]]

    def list_functions(self, owner_id: str, *, search: str = "", limit: int = 100) -> Sequence[Function]:
        with self._call():
            found = [
                function
                for function in map(_newest, self._functions.values())
                if function.owner_id == owner_id
                and search.lower() in f"{function.name}\n{function.description or ''}".lower()
            ]
        newest = sorted(found, key=lambda f: (moment(f.created_at), f.function_id), reverse=True)[:limit]
        return [dataclasses.replace(function, body=b"") for function in newest]

    def count_functions(self, owner_id: str, *, limit: int) -> int:
        return min(limit, len(self._versions_of(owner_id)))

    def _versions_of(self, owner_id: str) -> Sequence[Function]:
        with self._call():
            versions = [each for of_function in self._functions.values() for each in of_function.values()]
        return [each for each in versions if each.owner_id == owner_id]

    def delete_function(self, function_id: str) -> bool:
        with self._call():
            self._aliases = {key: each for key, each in self._aliases.items() if each.function_id != function_id}
            return self._functions.pop(function_id, None) is not None

    def put_alias(self, alias: FunctionAlias) -> None:
        with self._call():
            if alias.function_id not in self._functions:
                raise FunctionUnknown(f"there is no function {alias.function_id}")
            self._aliases[alias.owner_id, alias.name] = alias

    def get_alias(self, owner_id: str, name: str) -> FunctionAlias | None:
        with self._call():
            return self._aliases.get((owner_id, name))

    def list_aliases(self, owner_id: str) -> Sequence[FunctionAlias]:
        with self._call():
            return sorted((each for each in self._aliases.values() if each.owner_id == owner_id), key=lambda a: a.name)

    def delete_alias(self, owner_id: str, name: str) -> bool:
        with self._call():
            return self._aliases.pop((owner_id, name), None) is not None

    # containers

    def add_container(self, container: Container) -> None:
        if self.find_container(container.owner_id, container.name) is not None:
            raise Conflict(f"there is a container {container.name} already")
        with self._call():
            at = container.created_at or dt.datetime.now(dt.UTC)
            self._containers[container.container_id] = dataclasses.replace(container, created_at=at)

    def get_container(self, container_id: str) -> Container | None:
        with self._call():
            return self._containers.get(container_id)

    def find_container(self, owner_id: str, name: str) -> Container | None:
        return next((each for each in self.list_containers(owner_id) if each.name == name), None)

    def list_containers(self, owner_id: str, *, limit: int = 100) -> Sequence[Container]:
        with self._call():
            found = [each for each in self._containers.values() if each.owner_id == owner_id]
        return sorted(found, key=lambda c: (moment(c.created_at), c.container_id), reverse=True)[:limit]

    def count_containers(self, owner_id: str, *, limit: int) -> int:
        return len(self.list_containers(owner_id, limit=limit))

    def delete_container(self, container_id: str) -> bool:
        with self._call():
            return self._containers.pop(container_id, None) is not None


def _rename(versions: dict[int, Function], function: Function) -> None:
    for number, version in versions.items():
        versions[number] = dataclasses.replace(
            version, name=function.name, description=function.description, public=function.public
        )


def _newest(versions: Mapping[int, Function]) -> Function:
    newest = versions[max(versions)]
    return dataclasses.replace(newest, created_at=versions[min(versions)].created_at)


def _key(function: Function) -> tuple[str, str]:
    return function.function_id, function.body_hash
