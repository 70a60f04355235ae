"""Migration of a Globus Compute configuration: reads its ``config.yaml`` or template, and says what was left out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

import yaml
from msgspec import inspect

from farcall_common.errors import ConfigurationError
from farcall_endpoint.config.foreign import ADDRESSES, REASONS, RENAMED
from farcall_endpoint.config.reader import Place, check_config, place_of, read_node, read_text
from farcall_endpoint.config.schema import Config
from farcall_endpoint.config.wording import fields_of

_PLACEHOLDER: Final = re.compile(r"\{\{(?P<inside>[^{}]*)\}\}")
_DEFAULT: Final = re.compile(r"\|[ \t]{0,9}default\((?P<value>[^()]*)\)")
_MPI_ENGINE: Final = "GlobusMPIEngine"
_ENGINES: Final = frozenset({"GlobusComputeEngine", _MPI_ENGINE, "ProcessPoolEngine", "ThreadPoolEngine"})
_MPI_LAUNCHER: Final = "mpiexec"
"""Launcher of an MPI engine that names none."""
_MOST_SHOWN: Final = 20
"""Lines in a message."""
_UNKNOWN: Final = "Farcall has no such field"


class Note(NamedTuple):
    """A line of the file that was left out or changed: its number, its field, and what happened and why."""

    line: int
    field: str
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.field}: {self.text}"


def read_globus(path: Path) -> tuple[Config, list[Note]]:
    """The configuration that corresponds to a file of Globus Compute, and what was left out or changed.

    :raises ConfigurationError: with all lines that have no equivalent and cannot be left out.
    """
    source = str(path)
    text, notes = _fill_template(read_text(path), source)
    node = read_node(text, source=source)
    if node is not None:
        migration = _Migration(notes)
        migration.convert(node)
    return check_config(node, source=source), sorted(notes)


def _fill_template(text: str, source: str) -> tuple[str, list[Note]]:
    """The text of a template for one user: placeholders have their defaults, or else their names as values."""
    for start, end in reversed(_enclosed(text, "{#", "#}")):
        text = text[:start] + "\n" * text.count("\n", start, end) + text[end:]
    if statements := _enclosed(text, "{%", "%}"):
        lines = ", ".join(str(_line(text, start)) for start, _ in statements[:_MOST_SHOWN])
        raise ConfigurationError(
            f"{source} has statements of a template, which depend on the user's options (line {lines}).",
            hint="Write the file as it is for one user, without {% ... %}.",
        )
    notes = []

    def fill(found: re.Match[str]) -> str:
        name, bar, filters = found["inside"].removeprefix("-").removesuffix("-").partition("|")
        name = name.strip()
        given = _DEFAULT.search(bar + filters)
        value = name if given is None else given["value"].strip()
        if given is not None and value[:1] == value[-1:] and value[:1] in ("'", '"'):
            value = value[1:-1]
        what = "its default is used" if given else f"it has no value here: replace {name} in the new file"
        notes.append(Note(_line(text, found.start()), found[0], what))
        return value

    return _PLACEHOLDER.sub(fill, text), notes


def _enclosed(text: str, begin: str, end: str) -> list[tuple[int, int]]:
    """The parts of a text between two marks, with these: where each begins and ends."""
    parts = []
    at = 0
    while (start := text.find(begin, at)) >= 0 and (found := text.find(end, start + len(begin))) >= 0:
        at = found + len(end)
        parts.append((start, at))
    return parts


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


class _Migration:
    def __init__(self, notes: list[Note]) -> None:
        self._notes = notes

    def convert(self, root: yaml.Node) -> None:
        """Change a document, so that it has only fields of Farcall."""
        if isinstance(root, yaml.MappingNode):
            self._drop(root, "", "heartbeat_threshold", "the agent notices a lost connection by itself")
            for key, _ in root.value:
                if key.value == "allowed_functions":
                    self._note(key, key.value, "kept; replace its ids by those of the functions that you register here")
            engine = _get(root, "engine")
            if isinstance(engine, yaml.MappingNode):
                self._convert_engine(engine)
        self._drop_unknown(place_of(root))

    def _convert_engine(self, engine: yaml.MappingNode) -> None:
        kind = _text(_get(engine, "type"))
        if kind in _ENGINES:
            mpi = self._convert_mpi(engine) if kind == _MPI_ENGINE else ""
            self._drop(engine, "engine", "type", f"there is one engine{mpi}")
        for former, name in RENAMED.items():
            for key, _ in engine.value:
                if key.value == former:
                    key.value = name
                    self._note(key, f"engine.{former}", f"written as {name}")
        for former in ("strategy", "job_status_kwargs"):
            section = _get(engine, former)
            idle = _get(section, "max_idletime") if isinstance(section, yaml.MappingNode) else None
            if idle is not None:
                _set(engine, "max_idletime", idle)
            self._drop(engine, "engine", former, f"{REASONS['strategy']}{'' if idle is None else ' and is kept'}")
        self._convert_address(engine)

    def _convert_mpi(self, engine: yaml.MappingNode) -> str:
        """Name the launcher of MPI tasks for the nodes. Returns how, as the end of a sentence."""
        launcher = _get(engine, "mpi_launcher")
        line = f"export FARCALL_MPI_LAUNCHER={_text(launcher) or _MPI_LAUNCHER}"
        provider = _get(engine, "provider")
        if not isinstance(provider, yaml.MappingNode) or _text(_get(provider, "type")) == "LocalProvider":
            return f"; run {line} before farcall-endpoint start"
        lines = [_text(_get(provider, "worker_init")).rstrip(), line]
        _set(provider, "worker_init", _new_text("\n".join(filter(None, lines)), provider))
        return f"; worker_init has {line}"

    def _convert_address(self, engine: yaml.MappingNode) -> None:
        address = _get(engine, "address")
        if not isinstance(address, yaml.MappingNode):
            return
        kind, interface = _text(_get(address, "type")), _get(address, "ifname")
        if kind == "address_by_interface" and interface is not None:
            address.value = [(_new_text("interface", address), interface)]
        elif kind in ADDRESSES:
            self._drop(engine, "engine", "address", ADDRESSES[kind])

    def _drop_unknown(self, place: Place) -> None:
        """Leave out the fields that no section of this kind has, and those without a value."""
        known = fields_of(place.kind) if isinstance(place.kind, inspect.StructType) else {}
        if isinstance(place.node, yaml.MappingNode) and known:
            for key, value in list(place.node.value):
                if key.value not in known:
                    reason = REASONS.get(key.value, _UNKNOWN)
                    if key.value == "worker_init":
                        reason = "tasks run in the environment in which farcall-endpoint was started"
                    self._drop(place.node, place.path, key.value, reason)
                elif isinstance(value, yaml.ScalarNode) and value.tag.endswith(":null"):
                    _remove(place.node, key.value)
        for part in place.parts():
            self._drop_unknown(part)

    def _drop(self, section: yaml.MappingNode, path: str, field: str, reason: str) -> None:
        for key, value in section.value:
            if key.value == field and not (isinstance(value, yaml.ScalarNode) and value.tag.endswith(":null")):
                self._note(key, f"{path}.{field}".lstrip("."), f"left out: {reason}")
        _remove(section, field)

    def _note(self, key: yaml.Node, field: str, text: str) -> None:
        self._notes.append(Note(key.start_mark.line + 1, field, text))


def _get(section: yaml.MappingNode, field: str) -> yaml.Node | None:
    return next((value for key, value in section.value if key.value == field), None)


def _set(section: yaml.MappingNode, field: str, value: yaml.Node) -> None:
    _remove(section, field)
    section.value.append((_new_text(field, section), value))


def _remove(section: yaml.MappingNode, field: str) -> None:
    section.value = [entry for entry in section.value if entry[0].value != field]


def _text(node: yaml.Node | None) -> str:
    return node.value if isinstance(node, yaml.ScalarNode) and not node.tag.endswith(":null") else ""


def _new_text(value: str, near: yaml.Node) -> yaml.ScalarNode:
    return yaml.ScalarNode("tag:yaml.org,2002:str", value, start_mark=near.start_mark, end_mark=near.end_mark)
