"""Answers of the API: each field has an entry that says who wrote it and what the client does with it."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any, Final

from tests.support.answer_fields import Use, Writer, entries

_SCHEMA: Final = json.loads(Path("docs/openapi.json").read_text())
_MODELS: Final[dict[str, Any]] = _SCHEMA["components"]["schemas"]


def _referenced(value: Any, found: set[str]) -> set[str]:
    """The models that a part of the document refers to, directly or by other models."""
    if isinstance(value, dict):
        name = str(value.get("$ref", "")).rpartition("/")[2]
        if name and name not in found:
            found.add(name)
            _referenced(_MODELS[name], found)
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _referenced(each, found)
    return found


def _answers() -> set[str]:
    operations = (each for path in _SCHEMA["paths"].values() for each in path.values() if isinstance(each, dict))
    return _referenced([each.get("responses") for each in operations], set())


def test_every_field_of_an_answer_has_one_entry() -> None:
    in_schema = {(model, field) for model in _answers() for field in _MODELS[model].get("properties", {})}
    counts = collections.Counter((model, field) for model, field, _ in entries())
    whole = {model for model, field in counts if field == "*"}
    in_table = {each for each in counts if each[1] != "*"} | {each for each in in_schema if each[0] in whole}
    assert in_schema - in_table == set(), "add who writes the field and what the client does with it"
    assert in_table - in_schema == set(), "the field does not exist"
    assert [each for each, count in counts.items() if count > 1] == []
    assert [model for model, field in counts if field != "*" and model in whole] == []


def test_values_are_read_of_endpoints_under_their_seal_only() -> None:
    by_use = collections.defaultdict(set)
    for model, field, entry in entries():
        by_use[entry.use].add((model, field, entry.writer))
    values = {"result", "result_ref", "error", "details"}
    assert by_use[Use.VALUE] == {("TaskAnswer", field, Writer.SEAL) for field in values}
    assert {writer for _, _, writer in by_use[Use.KEY]} == {Writer.SIGNED}
