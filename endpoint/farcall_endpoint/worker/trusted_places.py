"""Trusted places: the directories from which a template imports modules."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Collection
from importlib.machinery import PathFinder
from pathlib import Path


class TrustedPlaces:
    """Directories whose modules may be imported in a template: Python's own, and further ones.

    :param places: the further ones.
    :param private: exceptions, where tasks write.
    """

    def __init__(self, places: Collection[str], private: Collection[str]) -> None:
        prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix} - {"/"}
        own = {*prefixes, str(Path(os.__file__).parent), *places}
        self._places = [Path(each).resolve() for each in own]
        user_base = getattr(sys.modules.get("site"), "USER_BASE", None)  # in a home, also if that is in a prefix
        self._private = [Path(each).resolve() for each in (*private, *([user_base] if user_base else []))]

    def holds(self, path: str) -> bool:
        """Whether a file or directory is in them. A link is where it leads to: there others may write."""
        found = Path(path)
        if not found.is_absolute():
            return False
        around = (found := found.resolve(), *found.parents)
        return any(each in around for each in self._places) and not any(each in around for each in self._private)

    def import_module(self, module: str) -> str:
        """Import a module and its packages; why that is refused, or empty."""
        path: list[str] | None = None
        parts = module.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            if name not in sys.modules:
                if name not in sys.builtin_module_names:
                    spec = PathFinder.find_spec(name, path)
                    if spec is None:
                        return "it is not among the environment's own modules"
                    origin = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
                    if not self.holds(origin):
                        return f"{origin} is not in the environment's own directories"
                importlib.import_module(name)
            path = list(getattr(sys.modules[name], "__path__", ())) or None
            if path is None and count < len(parts):
                return f"{name} is not a package"
        return ""
