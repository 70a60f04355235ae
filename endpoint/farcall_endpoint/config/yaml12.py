"""YAML loader and dumper with the numbers of YAML 1.2: a walltime of 10:00:00 is text, not 36,000, and 010 is ten.

The loader limits the depth of documents and the length of numbers."""

from __future__ import annotations

import math
import re
from typing import Any, Final

import yaml

_INT: Final = ("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789"))
_FLOAT: Final = (
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


_MAX_DEPTH: Final = 50
_MAX_DIGITS: Final = 400


class Loader(yaml.SafeLoader):
    """Reads plain data."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Read a part of a document.

        :raises yaml.YAMLError: for a part that is in too many others.
        """
        if self._depth > _MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, "nested too deeply", self.get_mark())
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


class Dumper(yaml.SafeDumper):
    """Writes plain data so that readers of either version of YAML read the same."""


def _write_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


def _read_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    return int(_digits(loader, node))


def _read_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    value = float(_digits(loader, node))
    if math.isinf(value):
        raise _too_large(node)
    return value


def _digits(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    digits = str(loader.construct_scalar(node))
    if len(digits) > _MAX_DIGITS:
        raise _too_large(node)
    return digits


def _too_large(node: yaml.ScalarNode) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, "the number is too large", node.start_mark)


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
