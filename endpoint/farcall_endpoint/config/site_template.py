"""Site templates: whole ``config.yaml`` files for schedulers and kinds of machines, with a few settings changed.

Templates are filled as text, so that their comments and all other lines stay as they are.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.resources
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import yaml

from farcall_common.errors import ConfigurationError
from farcall_endpoint.config.reader import parse_config
from farcall_endpoint.config.yaml12 import Dumper, Loader

_FOR_EDITORS: Final = "# yaml-language-server:"
"""Begins the line that names the schema, which lies next to the templates in the documentation only."""
_OF_A_SITE: Final = frozenset(
    {"partition", "account", "project", "queue", "qos", "address", "select_options", "requirements", "image"}
    | {"namespace", "service_account_name", "user_id", "group_id", "persistent_volumes", "available_accelerators"}
    | {"scheduler_options", "worker_init"}
    | {"container_uri", "locations", "binds", "cache_dir", "index_url"}
)
"""Fields whose values in a template are examples: they differ from site to site."""
_LINE: Final = re.compile(r"(?P<indent> *)(?P<key>[a-z_]+):(?P<space> *)(?P<value>.*?)(?P<comment> +#.*)?")


@dataclasses.dataclass(frozen=True)
class SiteTemplate:
    """A template: its name, what it is for, and its text."""

    name: str
    description: str
    text: str

    def fill(self, settings: Mapping[str, str]) -> str:
        """The text with these settings: names of fields (``partition``, or ``provider.walltime`` where there are
        several), and values as in YAML.

        :raises ConfigurationError: for a field that the template does not have, and for a value that is not valid.
        """
        lines = self.text.splitlines()
        fields = dict(_fields(lines))
        for name, value in settings.items():
            path = self._find(name, [path for path, number in fields.items() if _is_scalar(lines[number])])
            lines[fields[path]] = _changed(lines[fields[path]], value)
        text = "\n".join([*lines, ""])
        parse_config(text, source=f"the template {self.name} with these settings")
        return text

    def to_review(self, settings: Mapping[str, str]) -> list[str]:
        """Fields with values of a site that were not set."""
        keys = [path.rpartition(".")[2] for path, _ in _fields(self.text.splitlines())]
        done = {name.rpartition(".")[2] for name in settings}
        return [key for key in keys if key in _OF_A_SITE and key not in done]

    def _find(self, name: str, paths: list[str]) -> str:
        found = [path for path in paths if path == name or path.endswith(f".{name}")]
        if len(found) == 1:
            return found[0]
        if found:
            raise ConfigurationError(
                f"The template {self.name} has {name} more than once.", hint=f"Write one of: {', '.join(found)}."
            )
        keys = [path.rpartition(".")[2] for path in paths]
        raise ConfigurationError(
            f"The template {self.name} has no field {name!r} to set.",
            hint=f"It has: {', '.join(dict.fromkeys(keys))}. Others can be added to config.yaml afterwards.",
        )


def list_templates() -> list[SiteTemplate]:
    """All templates, by name."""
    folder = importlib.resources.files("farcall_endpoint.config") / "sites"
    found = []
    for file in folder.iterdir():
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith(_FOR_EDITORS)]
        name = file.name.removesuffix(".yaml")
        found.append(SiteTemplate(name, lines[0].removeprefix("# "), "\n".join([*lines, ""])))
    return sorted(found, key=lambda template: template.name)


def find_template(name: str) -> SiteTemplate:
    """The template with a name.

    :raises ConfigurationError: if there is none.
    """
    by_name = {template.name: template for template in list_templates()}
    if name not in by_name:
        close = difflib.get_close_matches(name, by_name, n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise ConfigurationError(f"There is no template {name!r}.", hint=f"{hint}There are: {', '.join(by_name)}.")
    return by_name[name]


def _fields(lines: list[str]) -> Iterator[tuple[str, int]]:
    """The path of each field, such as ``engine.provider.partition``, and the number of its line."""
    parents: list[tuple[int, str]] = []
    block_indent: int | None = None  # of a field whose value is the block of lines below it
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if block_indent is not None and (not line.strip() or indent > block_indent):
            continue
        block_indent = None
        if (found := _LINE.fullmatch(line)) is None:
            continue
        while parents and parents[-1][0] >= indent:
            parents.pop()
        parents.append((indent, found["key"]))
        if found["value"] == "|":
            block_indent = indent
        yield ".".join(key for _, key in parents), number


def _is_scalar(line: str) -> bool:
    found = _LINE.fullmatch(line)
    return found is not None and found["value"] not in ("", "|")


def _changed(line: str, value: str) -> str:
    """The line with another value, of the same kind if the former one is text."""
    found = _LINE.fullmatch(line)
    assert found is not None
    new: Any = value
    if not isinstance(_scalar(found["value"]), str):
        new = _scalar(value)
    text = yaml.dump({found["key"]: new}, Dumper=Dumper, allow_unicode=True, width=2**20).rstrip()
    return f"{found['indent']}{text}{found['comment'] or ''}"


def _scalar(text: str) -> Any:
    """The value of YAML text; the text itself if it is not YAML."""
    try:
        return yaml.load(text, Loader=Loader)  # noqa: S506 - ours, which makes plain values only
    except yaml.YAMLError:
        return text
