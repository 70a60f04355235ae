"""Reads ``config.yaml``. What is wrong is told with its line, its column, the field, and what to write instead."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec
import yaml
from msgspec import inspect

from farcall_common.errors import ConfigurationError
from farcall_endpoint.config.schema import Config
from farcall_endpoint.config.section import FieldProblem
from farcall_endpoint.config.wording import expected, fields_of, given, kinds_with, where_is, without_none
from farcall_endpoint.config.yaml12 import Loader

_PATH: Final = re.compile(r" - at (?:`key` in )?`\$(?P<path>[^`]*)`$")
_STEP: Final = re.compile(r"\.(?P<field>[^.\[]+)|\[(?P<index>\d+|\.\.\.)\]")
_UNKNOWN: Final = re.compile(r"^Object contains unknown field `(?P<field>.*?)`")
_MISSING: Final = re.compile(r"^Object missing required field `(?P<field>.*?)`")

_OTHER_WORDS: Final = {
    "job_status_kwargs": "write its max_idletime under engine, without job_status_kwargs",
    "max_retries_on_system_failure": "tasks say so themselves, by max_attempts; remove it",
    "max_workers": "write max_workers_per_node",
    "prefetch_capacity": "write prefetch",
    "idle_release": "write max_idletime",
    "run_in_sandbox": "write sandbox",
    "heartbeat_s": "write heartbeat_period",
    "type: GlobusComputeEngine": "write FarcallEngine, or leave type out",
}
"""What users of Globus Compute and Parsl write, and what it is here."""


def read_config(path: Path) -> Config:
    """Read and check a file.

    :raises ConfigurationError: naming what is wrong, where it is, and what to write.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
    return parse_config(text, source=str(path))


def parse_config(text: str, *, source: str) -> Config:
    """Read and check the text of a file that ``source`` names.

    :raises ConfigurationError: naming what is wrong, where it is, and what to write.
    """
    try:
        loader = Loader(text)
        try:
            node = loader.get_single_node()
            for each in _nodes(node):
                _refuse_strange(each, source)
            data = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        _refuse_yaml(error, text, source)
    if node is None or data is None:
        return Config()
    try:
        return msgspec.convert(data, Config)
    except msgspec.ValidationError as error:
        _refuse(error, node, source)


# -- YAML --------------------------------------------------------------------------------------------------------------


def _refuse_yaml(error: yaml.YAMLError, text: str, source: str) -> NoReturn:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        raise ConfigurationError(f"{source} is not YAML: {error}.") from error
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" in line[: mark.column + 1]:
        column = line.index("\t") + 1
        raise ConfigurationError(
            f"{source}:{mark.line + 1}:{column}: a tab, which YAML does not allow here.", hint="Indent with spaces."
        ) from error
    what = ", ".join(filter(None, (getattr(error, "context", None), getattr(error, "problem", None))))
    raise ConfigurationError(
        f"{_at(source, mark)}: not YAML: {what}.",
        hint="Look at the indentation, at brackets and quotes, and for a space after each colon.",
    ) from error


def _nodes(root: yaml.Node | None) -> Iterator[yaml.Node]:
    """All nodes of a document, each one once although aliases may repeat it."""
    waiting, seen = [root], set[int]()
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, yaml.MappingNode):
            waiting += [part for entry in node.value for part in entry]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


def _refuse_strange(node: yaml.Node, source: str) -> None:
    """What YAML lets pass and nobody can mean."""
    if isinstance(node, yaml.MappingNode):
        _refuse_strange_keys(node, source)
    elif isinstance(node, yaml.ScalarNode) and any("\ud800" <= letter <= "\udfff" for letter in node.value):
        raise ConfigurationError(f"{_at(source, node.start_mark)}: half of a character.", hint="Write it as UTF-8.")


def _refuse_strange_keys(section: yaml.MappingNode, source: str) -> None:
    lines: dict[str, int] = {}
    for key, _ in section.value:
        if not isinstance(key, yaml.ScalarNode) or not key.tag.endswith((":str", ":merge")):
            raise ConfigurationError(
                f"{_at(source, key.start_mark)}: the name of a field must be text.", hint="Put quotes around it."
            )
        if key.value in lines:
            raise ConfigurationError(
                f"{_at(source, key.start_mark)}: {key.value} is here for the second time; the first is in line "
                f"{lines[key.value]}.",
                hint="Keep one of the two.",
            )
        lines[key.value] = key.start_mark.line + 1


@functools.cache
def _schema() -> inspect.Type:
    return inspect.type_info(Config)


# -- fields ------------------------------------------------------------------------------------------------------------


class _Place:
    """A place in the file: its node, its type in the schema, and its name."""

    def __init__(self, node: yaml.Node, kind: inspect.Type, names: tuple[str, ...] = ()) -> None:
        self.node = node
        self.kind = _variant(kind, node)
        self.full_kind = kind
        self.names = names

    @property
    def path(self) -> str:
        return "".join(name if name.startswith("[") else f".{name}" for name in self.names).lstrip(".")

    def child(self, name: str) -> _Place | None:
        """A field; None if it is not written in the file."""
        value = next((value for key, value in _entries(self.node) if key.value == name), None)
        kind = fields_of(self.kind).get(name)
        return None if value is None or kind is None else _Place(value, kind, (*self.names, name))

    def item(self, index: str) -> _Place:
        """An item of a list, or the value with a name that does not fit; the whole if it cannot be said which."""
        for key, value in _entries(self.node):
            if not value.tag.endswith(":str"):
                return _Place(value, inspect.StrType(), (*self.names, key.value))
        kind = next(iter(without_none(self.full_kind)), self.full_kind)
        for option in without_none(self.full_kind):
            if isinstance(option, inspect.VarTupleType | inspect.TupleType):
                kind = option
        if not isinstance(self.node, yaml.SequenceNode) or not index.isdigit():
            return self
        number = int(index)
        if isinstance(kind, inspect.VarTupleType):
            inner = kind.item_type
        elif isinstance(kind, inspect.TupleType):
            inner = kind.item_types[number]
        else:
            return self
        return _Place(self.node.value[number], inner, (*self.names, f"[{number}]"))


def _refuse(error: msgspec.ValidationError, root: yaml.Node, source: str) -> NoReturn:
    message = str(error)
    found = _PATH.search(message)
    place = _Place(root, _schema())
    for step in _STEP.finditer(found["path"] if found else ""):
        below = place.child(step["field"]) if step["field"] else place.item(step["index"])
        if below is None:
            break
        place = below
    problem = error.__cause__
    if unknown := _UNKNOWN.match(message):
        _refuse_unknown(place, unknown["field"], source)
    if missing := _MISSING.match(message):
        _refuse_missing(place, missing["field"], source)
    if isinstance(problem, FieldProblem):
        wrong = place.child(problem.field) or place
        raise ConfigurationError(
            f"{_at(source, wrong.node.start_mark)}: {place.path or 'the file'}: {problem}.",
            hint=_sentence(problem.fix),
        ) from error
    wanted = expected(place.full_kind)
    got = given(place.node)
    name = place.path or "the file"
    advice = _OTHER_WORDS.get(f"{name.rpartition('.')[2]}: {getattr(place.node, 'value', '')}", "")
    raise ConfigurationError(
        f"{_at(source, place.node.start_mark)}: {name} must be {wanted}, not {got}.",
        hint=_sentence(advice or _advice(place)),
    ) from error


def _refuse_unknown(place: _Place, field: str, source: str) -> NoReturn:
    key = next((key for key, _ in _entries(place.node) if key.value == field), place.node)
    names = list(fields_of(place.kind))
    close = difflib.get_close_matches(field, names, n=1, cutoff=0.7)
    sections = where_is(field, _schema())
    owners = kinds_with(field, place.full_kind)
    if field in _OTHER_WORDS:
        fix = _OTHER_WORDS[field]
    elif owners:
        fix = f"only {' and '.join(owners)} knows it" if len(owners) == 1 else f"only {' and '.join(owners)} know it"
    elif 1 <= len(sections) <= 2:
        fix = f"it belongs {' or '.join(f'under {section}' if section else 'at the top' for section in sections)}"
    elif close:
        fix = f"did you mean `{close[0]}`?"
    else:
        fix = f"the fields here are {', '.join(names)}"
    raise ConfigurationError(
        f"{_at(source, key.start_mark)}: unknown field `{field}` in {place.path or 'the file'}.", hint=_sentence(fix)
    )


def _refuse_missing(place: _Place, field: str, source: str) -> NoReturn:
    kind = fields_of(place.kind).get(field) or _tags(place.full_kind)
    raise ConfigurationError(
        f"{_at(source, place.node.start_mark)}: {place.path} lacks `{field}`.",
        hint=f"Write {field}: and {expected(kind)}.",
    )


def _advice(place: _Place) -> str:
    """What to write instead of a value that does not fit."""
    node = place.node
    if isinstance(node, yaml.ScalarNode):
        options = without_none(place.full_kind)
        if any(isinstance(option, inspect.LiteralType) for option in options):
            words = [str(word) for o in options if isinstance(o, inspect.LiteralType) for word in o.values]
            close = difflib.get_close_matches(node.value, words, n=1, cutoff=0.75)
            return f"did you mean {close[0]}?" if close else ""
        if any(isinstance(option, inspect.StrType) for option in options) and not node.tag.endswith((":str", ":null")):
            return f'put quotes around it: "{node.value}"'
        if node.tag.endswith(":null"):
            return "give it a value, or remove the line"
    return ""


def _variant(kind: inspect.Type, node: yaml.Node) -> inspect.Type:
    """Of several kinds of a section the one that its ``type`` names."""
    options = [option for option in without_none(kind) if isinstance(option, inspect.StructType)]
    if len(options) == 1:
        return options[0]
    written = next((value.value for key, value in _entries(node) if key.value == "type"), None)
    return next((option for option in options if option.tag == written), kind)


def _tags(kind: inspect.Type) -> inspect.LiteralType:
    return inspect.LiteralType(
        tuple(str(option.tag) for option in without_none(kind) if isinstance(option, inspect.StructType))
    )


def _entries(node: yaml.Node) -> Iterable[tuple[yaml.ScalarNode, yaml.Node]]:
    return node.value if isinstance(node, yaml.MappingNode) else ()


def _at(source: str, mark: Any) -> str:
    return f"{source}:{mark.line + 1}:{mark.column + 1}"


def _sentence(text: str) -> str:
    if not text:
        return ""
    return text[0].upper() + text[1:] + ("" if text.endswith(("?", '"')) else ".")
