"""Reader of ``config.yaml``. Its errors name the line, the column, the field, and the correction."""

from __future__ import annotations

import difflib
import functools
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import inspect

from farcall_common.errors import ConfigurationError
from farcall_endpoint.config import foreign
from farcall_endpoint.config.providers import LocalProviderConfig
from farcall_endpoint.config.schema import Config
from farcall_endpoint.config.section import FieldProblem
from farcall_endpoint.config.wording import expected, fields_of, found, kinds_with, where_is, without_none
from farcall_endpoint.config.yaml12 import Loader

_ALMOST_EQUAL: Final = 0.85
"""A field so like another one of the same section is a spelling mistake, also if another section has it."""


_MAX_BYTES: Final = 256 * 1024
"""Largest file. The reader takes seconds for one of this size."""


def read_config(path: Path) -> Config:
    """Read and check a file.

    :raises ConfigurationError: with all errors, their places, and the corrections.
    """
    return parse_config(read_text(path), source=str(path))


def parse_config(text: str, *, source: str) -> Config:
    """Read and check the text of a file that ``source`` names.

    :raises ConfigurationError: with all errors, their places, and the corrections.
    """
    return check_config(read_node(text, source=source), source=source)


def read_text(path: Path) -> str:
    """The text of a file.

    :raises ConfigurationError: if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ConfigurationError(
                f"{path} is too large for a configuration: it has more than {_MAX_BYTES // 1024} KiB.",
                hint="Check that it is the right file.",
            )
        return content.decode().replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from error


def read_node(text: str, *, source: str) -> yaml.Node | None:
    """The document of a file, with its merges (``<<``) resolved; None if it is empty.

    :raises ConfigurationError: if it is not YAML that can be a configuration.
    """
    try:
        loader = Loader(text)
        try:
            node = loader.get_single_node()
            nodes = list(_nodes(node))
            if problems := [problem for each in nodes for problem in _node_problems(each)]:
                _refuse(problems, source)
            for each in nodes:
                if isinstance(each, yaml.MappingNode):
                    loader.flatten_mapping(each)
            if node is not None:
                loader.construct_document(node)  # some mistakes show only here
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        _refuse_yaml(error, text, source)
    return node


def check_config(node: yaml.Node | None, *, source: str) -> Config:
    """The configuration that a document means.

    :raises ConfigurationError: with all errors, their places, and the corrections.
    """
    data = None if node is None else Loader("").construct_document(node)
    if node is None or data is None:
        return Config()
    try:
        return msgspec.convert(data, Config)
    except msgspec.ValidationError as error:
        _refuse(list(_problems(place_of(node), error)), source)


def check_binds(config: Config, path: Path) -> None:
    """Make sure that the directories exist that containers are to see, where this machine is the node.

    :param path: the file that the configuration was read from.
    :raises ConfigurationError: with all that do not, and their places.
    """
    if not isinstance(config.engine.provider, LocalProviderConfig):
        return
    sources = [bind.partition(":")[0] for bind in config.engine.environments.binds]
    missing = [number for number, source in enumerate(sources) if not Path(source).exists()]
    if not missing:
        return
    node = read_node(read_text(path), source=str(path))
    for name in ("engine", "environments", "binds"):
        node = next(value for key, value in _entries(node) if key.value == name)
    assert isinstance(node, yaml.SequenceNode), "it was read before"
    problems = [
        _Problem(
            node.value[number].start_mark,
            f"engine.environments.binds: {sources[number]} does not exist on this machine, or cannot be reached.",
            "Correct the path, or remove the line.",
        )
        for number in missing
    ]
    _refuse(problems, str(path))


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


def _node_problems(node: yaml.Node) -> Iterator[_Problem]:
    """What YAML allows and a configuration cannot mean."""
    if isinstance(node, yaml.MappingNode):
        yield from _key_problems(node)
    elif isinstance(node, yaml.ScalarNode) and any("\ud800" <= letter <= "\udfff" for letter in node.value):
        yield _Problem(node.start_mark, "invalid character (a lone surrogate).", "Write it as UTF-8.")


def _key_problems(section: yaml.MappingNode) -> Iterator[_Problem]:
    lines: dict[str, int] = {}
    for key, _ in section.value:
        if not isinstance(key, yaml.ScalarNode) or not key.tag.endswith((":str", ":merge")):
            yield _Problem(key.start_mark, "the name of a field must be text.", "Put quotes around it.")
        elif key.value in lines:
            first = f"the first is in line {lines[key.value]}"
            yield _Problem(key.start_mark, f"duplicate field {key.value}; {first}.", "Remove one of the two.")
        else:
            lines[key.value] = key.start_mark.line + 1


@functools.cache
def _schema() -> inspect.Type:
    return inspect.type_info(Config)


# -- fields ------------------------------------------------------------------------------------------------------------


class _Problem(NamedTuple):
    """A mistake in a file: its place, what is wrong, and the correction."""

    mark: Any
    text: str
    hint: str


def _refuse(problems: list[_Problem], source: str) -> NoReturn:
    """Raise the problems of a file, in its order."""
    problems.sort(key=lambda problem: (problem.mark.line, problem.mark.column))
    if len(problems) == 1:
        [only] = problems
        raise ConfigurationError(f"{_at(source, only.mark)}: {only.text}", hint=only.hint)
    lines = [f"{_at(source, mark)}: {text}" + (f" ({hint})" if hint else "") for mark, text, hint in problems]
    raise ConfigurationError("\n".join([f"{source} has {len(problems)} mistakes:", *lines]))


class Place:
    """A place in the file: its node, its type as written in the schema, and its name."""

    def __init__(
        self, node: yaml.Node, hint: Any, names: tuple[str, ...] = (), *, kind: inspect.Type | None = None
    ) -> None:
        self.node = node
        self.hint = hint
        self.full_kind = kind or inspect.type_info(hint)
        self.kind = _variant(self.full_kind, node)
        self.names = names

    @property
    def path(self) -> str:
        return "".join(name if name.startswith("[") else f".{name}" for name in self.names).lstrip(".")

    def entries(self) -> Iterable[tuple[yaml.ScalarNode, yaml.Node]]:
        """The names and values of a section; nothing for any other node."""
        return _entries(self.node)

    def error(self) -> msgspec.ValidationError | None:
        """Why the value does not fit its type; None if it does."""
        try:
            msgspec.convert(Loader("").construct_document(self.node), self.hint)
        except msgspec.ValidationError as error:
            return error
        return None

    def parts(self) -> Iterator[Place]:
        """The fields and items that the schema knows."""
        if isinstance(self.kind, inspect.StructType):
            hints = _hints(self.kind.cls)
            kinds = fields_of(self.kind)
            for key, value in self.entries():
                if key.value in hints:
                    yield Place(value, hints[key.value], (*self.names, key.value), kind=kinds[key.value])
        for option in _options(self.hint):
            inner = get_args(option)
            if get_origin(option) is dict:
                for key, value in self.entries():
                    yield Place(value, inner[1], (*self.names, key.value))
            elif get_origin(option) is tuple and isinstance(self.node, yaml.SequenceNode):
                for number, value in enumerate(self.node.value):
                    hint = inner[0] if inner[-1] is Ellipsis else inner[min(number, len(inner) - 1)]
                    yield Place(value, hint, (*self.names, f"[{number}]"))


def place_of(node: yaml.Node) -> Place:
    """The place of a whole file."""
    return Place(node, Config, kind=_schema())


def _problems(place: Place, error: msgspec.ValidationError) -> Iterator[_Problem]:
    """Yield the problems of a place: those of its parts, or its own if all parts are valid."""
    below = list(_problems_below(place))
    yield from below
    if not below:
        yield _own_problem(place, error)


def _problems_below(place: Place) -> Iterator[_Problem]:
    entries = {key.value: (key, value) for key, value in place.entries()}
    known = fields_of(place.kind) if isinstance(place.kind, inspect.StructType) else None
    if known is None and isinstance(place.node, yaml.MappingNode) and (tags := _tags(place.full_kind)).values:
        if "type" not in entries:
            yield _missing(place, "type")
        else:
            yield _wrong_value(Place(entries["type"][1], str, (*place.names, "type"), kind=tags))
        return
    unknown = [key for name, (key, _) in entries.items() if known is not None and name not in known]
    for key in unknown:
        yield _unknown(place, key)
    for part in place.parts():
        if error := part.error():
            yield from _problems(part, error)
    if isinstance(place.kind, inspect.StructType) and isinstance(place.node, yaml.MappingNode) and not unknown:
        for field in place.kind.fields:  # with an unknown field, that one may be misspelled
            if field.required and field.encode_name not in entries:
                yield _missing(place, field.encode_name)


def _own_problem(place: Place, error: msgspec.ValidationError) -> _Problem:
    problem = error.__cause__
    if isinstance(problem, FieldProblem):
        wrong = next((part for part in place.parts() if part.names[-1] == problem.field), place)
        items = wrong.node.value if isinstance(wrong.node, yaml.SequenceNode) else []
        at = wrong.node if problem.item is None or problem.item >= len(items) else items[problem.item]
        return _Problem(at.start_mark, f"{place.path or 'the file'}: {problem}.", _sentence(problem.fix))
    return _wrong_value(place)


def _wrong_value(place: Place) -> _Problem:
    name = place.path or "the file"
    known = foreign.VALUES.get(f"{name.rpartition('.')[2]}: {getattr(place.node, 'value', '')}", "")
    return _Problem(
        place.node.start_mark,
        f"{name} must be {expected(place.full_kind)}, not {found(place.node)}.",
        _sentence(known or _advice(place)),
    )


@functools.cache
def _hints(section: type) -> dict[str, Any]:
    return get_type_hints(section, include_extras=True)


def _options(hint: Any) -> list[Any]:
    """The alternatives of an annotation."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _options(get_args(hint)[0])
    if origin in (Union, types.UnionType):
        return [option for each in get_args(hint) for option in _options(each)]
    return [hint]


def _unknown(place: Place, key: yaml.ScalarNode) -> _Problem:
    field = key.value
    names = list(fields_of(place.kind))
    close = difflib.get_close_matches(field, names, n=1, cutoff=0.7)
    sections = where_is(field, _schema())
    owners = kinds_with(field, place.full_kind)
    if fix := foreign.advice(field):
        pass
    elif owners:
        fix = f"only {' and '.join(owners)} knows it" if len(owners) == 1 else f"only {' and '.join(owners)} know it"
    elif close and difflib.SequenceMatcher(None, field, close[0]).ratio() > _ALMOST_EQUAL:
        fix = f"did you mean `{close[0]}`?"
    elif 1 <= len(sections) <= 2:
        fix = f"it belongs {' or '.join(f'under {section}' if section else 'at the top' for section in sections)}"
    elif close:
        fix = f"did you mean `{close[0]}`?"
    else:
        fix = f"the fields here are {', '.join(names)}"
    return _Problem(key.start_mark, f"unknown field `{field}` in {place.path or 'the file'}.", _sentence(fix))


def _missing(place: Place, field: str) -> _Problem:
    kind = fields_of(place.kind).get(field) or _tags(place.full_kind)
    return _Problem(place.node.start_mark, f"{place.path} lacks `{field}`.", f"Write {field}: and {expected(kind)}.")


def _advice(place: Place) -> str:
    """The correction of a value that does not fit."""
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
    """Return the kind of a section that its ``type`` names."""
    options = [option for option in without_none(kind) if isinstance(option, inspect.StructType)]
    if len(options) == 1:
        return options[0]
    written = next((value.value for key, value in _entries(node) if key.value == "type"), None)
    return next((option for option in options if option.tag == written), kind)


def _tags(kind: inspect.Type) -> inspect.LiteralType:
    return inspect.LiteralType(
        tuple(str(option.tag) for option in without_none(kind) if isinstance(option, inspect.StructType))
    )


def _entries(node: yaml.Node | None) -> Iterable[tuple[yaml.ScalarNode, yaml.Node]]:
    return node.value if isinstance(node, yaml.MappingNode) else ()


def _at(source: str, mark: Any) -> str:
    return f"{source}:{mark.line + 1}:{mark.column + 1}"


def _sentence(text: str) -> str:
    if not text:
        return ""
    return text[0].upper() + text[1:] + ("" if text.endswith(("?", '"')) else ".")
