"""The page of the REST interface, generated from the OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_PAGE: Final = "reference/rest.md"
_HEAD: Final = """# REST API

The REST API follows [openapi.json](../openapi.json), which is generated from the handlers. Routes of Globus Compute
have the same shapes here; the others are Farcall's. Every request carries `Authorization: Bearer TOKEN`.
Every error answers in the shape [`ErrorAnswer`](#erroranswer); [Error codes](../errors.md) explains its `code`.
"""

Json = Mapping[str, Any]


def on_files(files: Files, /, *, config: MkDocsConfig) -> Files:
    """Add the page."""
    document = json.loads(Path(config.docs_dir, "openapi.json").read_text(encoding="utf-8"))
    files.append(File.generated(config, _PAGE, content="\n".join(_page(document)) + "\n"))
    return files


def _page(document: Json) -> Iterator[str]:
    yield _HEAD
    yield "## Routes\n"
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield from _route(f"{method.upper()} {path}", operation)
    yield "## Shapes\n"
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield from _shape(name, schema)


def _route(title: str, operation: Json) -> Iterator[str]:
    yield f"### `{title}`\n"
    yield f"{operation.get('summary', '')}.\n"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body:
        yield f"Takes {_type(body)}.\n"
    answer = operation["responses"].get("200", {}).get("content", {}).get("application/json", {}).get("schema")
    if answer:
        yield f"Answers {_type(answer)}.\n"
    parameters = operation.get("parameters", ())
    if parameters:
        yield from _table(
            (each["name"], f"{_type(each['schema'])}, in the {each['in']}", each.get("description", ""))
            for each in parameters
        )


def _shape(name: str, schema: Json) -> Iterator[str]:
    yield f"### {name}\n"
    if schema.get("description"):
        yield f"{' '.join(schema['description'].split())}\n"
    if "enum" in schema:
        yield f"One of {', '.join(f'`{value}`' for value in schema['enum'])}.\n"
    required = schema.get("required", ())
    properties: Json = schema.get("properties", {})
    if properties:
        yield from _table(
            (key, _type(value) + ("" if key in required else ", optional"), value.get("description", ""))
            for key, value in properties.items()
        )


def _table(rows: Iterator[tuple[str, str, str]]) -> Iterator[str]:
    yield "| name | type | meaning |\n|---|---|---|"
    for name, kind, meaning in rows:
        yield f"| `{name}` | {kind} | {' '.join(str(meaning).split())} |"
    yield ""


def _type(schema: Json) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    alternatives = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if alternatives:
        return " or ".join(_type(each) for each in alternatives)
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if schema.get("type") == "object":
        values = schema.get("additionalProperties")
        return f"object of {_type(values)}" if isinstance(values, dict) and values else "object"
    return str(schema.get("type", "any"))
