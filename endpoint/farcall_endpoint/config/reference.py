"""Reference documentation of the schema: a JSON schema for editors and two pages of tables. All are committed.

Run ``python -m farcall_endpoint.config.reference docs/endpoint`` after a change of the schema.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import inspect

from farcall_endpoint.config.schema import Config
from farcall_endpoint.config.wording import expected, without_none


def json_schema() -> str:
    """The JSON schema; the same code always gives the same text."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "config.yaml of a Farcall endpoint"}
    return json.dumps(schema | msgspec.json.schema(Config), indent=1, sort_keys=True) + "\n"


def page() -> str:
    """All fields in tables, except those of providers."""
    return "\n".join(_page())


def provider_page() -> str:
    """The fields of providers and launchers in tables."""
    return "\n".join(_provider_page())


_MADE: Final = "Made by `python -m farcall_endpoint.config.reference docs/endpoint`; edit the schema instead."
FILES: Final = {"config.schema.json": json_schema, "configuration.md": page, "providers.md": provider_page}


def _page() -> Iterator[str]:
    yield "# Fields of config.yaml"
    yield ""
    yield _MADE
    yield "[Providers](providers.md) has the fields of `engine.provider`."
    yield "[Endpoint administration](administrator.md) explains the fields, [sites/](sites/) has complete files."
    root = _root()
    yield from _section(root, "The file")
    yield from _section(_field(root, "data"), "`data`")
    yield from _section(_field(root, "qos"), "`qos`")
    engine = _field(root, "engine")
    yield from _section(engine, "`engine`")
    yield from _section(_field(engine, "address"), "`engine.address`")
    files = _field(root, "files")
    yield from _section(files, "`files`")
    [storages] = without_none(_field_type(files, "storages"))
    assert isinstance(storages, inspect.VarTupleType)
    yield from _section(_options(storages.item_type)[0], "`files.storages`, each of them")
    yield from _section(_field(files, "globus"), "`files.globus`")
    yield from _section(_field(engine, "limits"), "`engine.limits`")
    yield from _section(_field(engine, "environments"), "`engine.environments`")
    yield ""


def _root() -> inspect.StructType:
    root = inspect.type_info(Config)
    assert isinstance(root, inspect.StructType)
    return root


def _provider_page() -> Iterator[str]:
    yield "# Providers in config.yaml"
    yield ""
    yield _MADE
    yield "[Configuration](configuration.md) has the other fields, [Blocks and scaling](scaling.md) explains these."
    providers = _options(_field_type(_field(_root(), "engine"), "provider"))
    yield from ("", "## `engine.provider`", "", "Every provider has:", "", *_table(_shared(providers)))
    batch = [each for each in providers if any(field.name == "launcher" for field in each.fields)]
    yield from ("", "Every provider for batch schedulers has:", "")
    yield from _table(_shared(batch), without=_shared(providers))
    for provider in providers:
        shared = _shared(batch) if provider in batch else _shared(providers)
        yield from _section(provider, f"`type: {provider.tag}`", level=3, without=shared)
    yield from (
        "",
        "## `engine.provider.launcher`",
        "",
        "The command that starts the manager on the nodes of a block.",
        "",
    )
    yield from ("| type | what it does | fields |", "|---|---|---|")
    for launcher in _options(_field_type(batch[0], "launcher")):
        fields = "; ".join(f"`{field.encode_name}`: {_description(field)}" for field in launcher.fields)
        yield f"| {launcher.tag} | {launcher.cls.__doc__} | {fields} |"
    yield ""


def _section(
    kind: inspect.StructType, title: str, *, level: int = 2, without: list[inspect.Field] | None = None
) -> Iterator[str]:
    yield from ("", f"{'#' * level} {title}", "", str(kind.cls.__doc__), "")
    yield from _table(list(kind.fields), without=without)


def _table(fields: list[inspect.Field], *, without: list[inspect.Field] | None = None) -> Iterator[str]:
    known = without or []
    rows = [field for field in fields if field not in known]
    if not rows:
        yield "No fields but those above."
        return
    yield from ("| field | value | default | meaning |", "|---|---|---|---|")
    for field in rows:
        is_section = _options(field.type) == list(without_none(field.type)) != []
        value = "a section" if is_section else expected(field.type)
        yield f"| `{field.encode_name}` | {_cell(value)} | {_cell(_default(field))} | {_cell(_description(field))} |"


def _shared(kinds: list[inspect.StructType]) -> list[inspect.Field]:
    return [field for field in kinds[0].fields if all(field in each.fields for each in kinds)]


def _options(kind: inspect.Type) -> list[inspect.StructType]:
    return [option for option in without_none(kind) if isinstance(option, inspect.StructType)]


def _field_type(kind: inspect.StructType, name: str) -> inspect.Type:
    return next(field.type for field in kind.fields if field.name == name)


def _field(kind: inspect.StructType, name: str) -> inspect.StructType:
    return _options(_field_type(kind, name))[0]


def _description(field: inspect.Field) -> str:
    kind = field.type
    found = kind.extra_json_schema if isinstance(kind, inspect.Metadata) else None
    return str((found or {}).get("description", ""))


def _default(field: inspect.Field) -> str:
    if field.required:
        return "needed"
    value: Any = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    if isinstance(value, msgspec.Struct):
        return f"`type: {value.__struct_config__.tag}`" if value.__struct_config__.tag else "-"
    return "-" if value in (None, "", (), {}) else f"`{json.dumps(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for _name, _make in FILES.items():
        (Path(sys.argv[1]) / _name).write_text(_make(), encoding="utf-8")
