"""Descriptions of the schema for error messages and documentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import yaml
from msgspec import inspect

_MAX_SHOWN: Final = 60


def without_none(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    """The types that a field allows, without None."""
    if isinstance(kind, inspect.Metadata):
        return without_none(kind.type) if not _looks(kind) else (kind,)
    if isinstance(kind, inspect.UnionType):
        return tuple(option for each in kind.types for option in without_none(each))
    return () if isinstance(kind, inspect.NoneType) else (kind,)


def fields_of(kind: inspect.Type) -> dict[str, inspect.Type]:
    """The fields of a section; a union of sections has none until its ``type`` is known, except that."""
    options = [option for option in without_none(kind) if isinstance(option, inspect.StructType)]
    if len(options) == 1:
        fields = {field.encode_name: field.type for field in options[0].fields}
        if options[0].tag_field is not None:
            fields = {options[0].tag_field: inspect.LiteralType((str(options[0].tag),)), **fields}
        return fields
    if options and options[0].tag_field is not None:
        return {options[0].tag_field: inspect.LiteralType(tuple(str(option.tag) for option in options))}
    return {}


def where_is(field: str, root: inspect.Type) -> list[str]:
    """The sections that have a field: ``engine.provider``; the top of the file is an empty name."""
    return sorted({".".join(path) for path, name in _all_fields(root, ()) if name == field})


def kinds_with(field: str, kind: inspect.Type) -> list[str]:
    """Return the kinds of a section that have a field: ``SlurmProvider``."""
    sections = [option for option in without_none(kind) if isinstance(option, inspect.StructType)]
    return [str(each.tag) for each in sections if field in {f.encode_name for f in each.fields}]


def _all_fields(kind: inspect.Type, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    for option in without_none(kind):
        if isinstance(option, inspect.StructType):
            for field in option.fields:
                yield path, field.encode_name
                yield from _all_fields(field.type, (*path, field.encode_name))


def expected(kind: inspect.Type) -> str:
    """The types of a field, as the end of "it must be ..."."""
    options = without_none(kind)
    sections = [option for option in options if isinstance(option, inspect.StructType)]
    if len(sections) > 1:
        return f"a section with a type: {_one_of([str(section.tag) for section in sections])}"
    return " or ".join(dict.fromkeys(_expected(option) for option in options))


def _expected(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata() if _looks(kind):
            return f"like {_looks(kind)}"
        case inspect.IntType():
            return f"a whole number{_range(kind)}"
        case inspect.FloatType():
            return f"a number{_range(kind)}"
        case inspect.StrType():
            return "text"
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType(values=values):
            return _one_of([str(value) for value in values])
        case inspect.VarTupleType(item_type=item):
            return f"a list with items that are each {expected(item)}"
        case inspect.TupleType(item_types=items):
            return f"a list of {len(items)}, each {expected(items[0])}"
        case inspect.DictType(value_type=value):
            return f"names with values, each {expected(value)}"
        case _:
            return "a section with fields"


def found(node: yaml.Node) -> str:
    """The value in the file."""
    if isinstance(node, yaml.MappingNode):
        return "a section with fields"
    if isinstance(node, yaml.SequenceNode):
        return f"a list of {len(node.value)}"
    if node.tag.endswith(":null"):
        return "nothing"
    text = str(node.value)
    shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    return f"'{shown}'" if node.tag.endswith(":str") else shown


def _one_of(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    low = kind.ge if kind.ge is not None else kind.gt
    if low is None:
        return ""
    if kind.gt is not None:
        return f" above {low:,}" + ("" if kind.le is None else f" and up to {kind.le:,}")
    return f" from {low:,}" + (" up" if kind.le is None else f" to {kind.le:,}")


def _looks(kind: inspect.Metadata) -> Any:
    return (kind.extra or {}).get("looks_like")
