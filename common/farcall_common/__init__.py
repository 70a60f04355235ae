"""Code that all parts of Farcall share: errors, wire protocol, user payloads, cloud stores."""

import importlib
from collections.abc import Mapping
from typing import Any


def later(package: str, modules: Mapping[str, str], name: str) -> Any:
    """The attribute of a package that is loaded at its first use.

    :param modules: the module of each such attribute.
    :raises AttributeError: if the package has no attribute of this name.
    """
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(importlib.import_module(modules[name]), name)
