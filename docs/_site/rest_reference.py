"""The routes and shapes of the REST reference, generated from the OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

_PAGE: Final = "reference/rest.md"
#: The groups of routes, those that most programs need first.
_GROUPS: Final = {
    "tasks": "Tasks",
    "functions": "Functions",
    "endpoints": "Endpoints",
    "account": "Account and usage",
    "sharing": "Sharing",
    "tokens": "Tokens and service accounts",
    "actions": "Actions of Globus Flows",
    "blobs": "Large values",
    "connections": "Connections",
    "containers": "Containers",
    "service": "Service",
}

Json = Mapping[str, Any]


def on_page_markdown(markdown: str, /, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Add the routes and shapes to their page."""
    if page.file.src_uri != _PAGE:
        return markdown
    document = json.loads(Path(config.docs_dir, "openapi.json").read_text(encoding="utf-8"))
    return "\n".join([markdown, *_page(document)]) + "\n"


def _page(document: Json) -> Iterator[str]:
    routes = [
        (operation["tags"][0], f"{method.upper()} {path}", operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    for group in sorted({group for group, _, _ in routes}, key=list(_GROUPS).index):
        yield f"## {_GROUPS[group]}\n"
        for tag, title, operation in routes:
            if tag == group:
                yield from _route(title, operation)
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
            (each["name"], f"{_type(each['schema'])}, in the {each['in']}", each["description"]) for each in parameters
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
            (key, _type(value) + ("" if key in required else ", optional"), value["description"])
            for key, value in properties.items()
        )


def _table(rows: Iterator[tuple[str, str, str]]) -> Iterator[str]:
    yield "| name | type | meaning |\n|---|---|---|"
    for name, kind, meaning in rows:
        yield f"| `{name}` | {kind} | {' '.join(meaning.split())} |"
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
