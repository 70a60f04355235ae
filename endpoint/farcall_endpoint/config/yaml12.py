"""YAML loader and dumper with the numbers of YAML 1.2: a walltime of 10:00:00 is text, not 36,000, and 010 is ten."""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

_INT: Final = ("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789"))
_FLOAT: Final = (
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


class Loader(yaml.SafeLoader):
    """Reads plain data."""


class Dumper(yaml.SafeDumper):
    """Writes plain data so that readers of either version of YAML read the same."""


def _write_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


def _read_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    return int(loader.construct_scalar(node))


def _read_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    return float(loader.construct_scalar(node))


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":int", ":float", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind in (Loader, Dumper):
    for _resolver in (_INT, _FLOAT):
        _kind.add_implicit_resolver(*_resolver)
Loader.add_constructor(_INT[0], _read_int)
Loader.add_constructor(_FLOAT[0], _read_float)
Dumper.add_representer(str, _write_text)
