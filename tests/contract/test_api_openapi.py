"""The OpenAPI document."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farcall_lambdas.app import rest_resolver
from farcall_lambdas.openapi import document
from farcall_lambdas.settings import ApiSettings
from farcall_lambdas.version import API_VERSION

ROOT = Path(__file__).parents[2]


def test_the_committed_document_matches_the_code() -> None:
    committed = (ROOT / "docs" / "openapi.json").read_text()

    assert committed == document(), "run: make openapi"


def test_the_same_code_gives_the_same_document() -> None:
    assert document() == document()


def test_every_route_is_documented() -> None:
    resolver = rest_resolver(ApiSettings())
    routes = {
        (route.method.lower(), route.openapi_path) for route in [*resolver._static_routes, *resolver._dynamic_routes]
    }

    described = {(method, path) for path, methods in _document()["paths"].items() for method in methods}

    assert described == routes
    assert len(routes) == 89


def test_every_reference_resolves_and_every_schema_is_used() -> None:
    schemas = _document()["components"]["schemas"]

    used = {reference.removeprefix("#/components/schemas/") for reference in _references(_document())}

    assert used == schemas.keys()


def test_every_field_and_parameter_has_a_meaning() -> None:
    spec = _document()
    fields = {
        f"{name}.{field}": described.get("description", "")
        for name, schema in spec["components"]["schemas"].items()
        for field, described in schema.get("properties", {}).items()
    }
    parameters = {
        f"{method.upper()} {path} {parameter['name']}": parameter.get("description", "")
        for path, operations in spec["paths"].items()
        for method, operation in operations.items()
        for parameter in operation.get("parameters", ())
    }
    described = fields | parameters
    assert len(described) > 500
    assert [name for name, text in described.items() if not text.endswith(".")] == [], "see field_meanings.py"
    assert fields["Submit.walltime_s"].startswith("Seconds after which an attempt")


def test_every_operation_documents_its_errors_and_has_a_unique_name() -> None:
    operations = [operation for path in _document()["paths"].values() for operation in path.values()]

    names = [operation["operationId"] for operation in operations]

    assert len(set(names)) == len(names)
    for operation in operations:
        assert operation["responses"].keys() >= {"401", "429", "500", "503"}
        assert len(operation["responses"].keys() & {"200", "202"}) == 1
        assert ("413" in operation["responses"]) == ("requestBody" in operation)
        assert operation["summary"]
    assert "ErrorAnswer" in _document()["components"]["schemas"]


def test_a_bearer_token_is_required() -> None:
    spec = _document()

    assert spec["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert spec["security"] == [{"bearer": []}]


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "lambdas" / "pyproject.toml").read_text())["project"]

    assert project["version"] == API_VERSION == _document()["info"]["version"]


def _document() -> Any:
    return json.loads(document())


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "$ref":
                yield item
            else:
                yield from _references(item)
    elif isinstance(value, list):
        for item in value:
            yield from _references(item)


def test_descriptions_do_not_name_code() -> None:
    """Docstrings become descriptions: what is markup for Python readers would show up in the document."""
    assert not re.search(r":(raises|param|class|meth)", document())
