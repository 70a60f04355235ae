"""Imports of tasks: a worker tells its manager, so that a template has these modules before the next worker starts.

Modules that a function imports when it runs are in ``sys.modules`` afterwards, so they are found there: lazy imports,
too. Whether a template may import them is not decided here: a task can forge all of this.
"""

from __future__ import annotations

import sys
from typing import Final

MOST_REPORTS: Final = 20
_MOST_NAMES: Final = 1000
_MOST_LENGTH: Final = 200


_loaded: Final[set[str]] = set()


def remember() -> None:
    """Let all reporters of later forks know what is loaded now: to read all names in each fork would copy much of the
    memory that it shares."""
    _loaded.update(sys.modules)


class ImportReporter:
    """The modules that are new since the worker began. Cheap while there are none."""

    def __init__(self) -> None:
        self._known = _loaded or set(sys.modules)
        self._count = len(sys.modules)
        self._left = MOST_REPORTS

    def new(self) -> tuple[str, ...]:
        """The names of modules of this Python's own directories that were imported since the last call."""
        if len(sys.modules) == self._count or not self._left:
            return ()
        self._left -= 1
        names = [name for name in list(sys.modules) if name not in self._known and _is_own(name)]
        self._known.update(sys.modules)
        self._count = len(sys.modules)
        return tuple(names[:_MOST_NAMES])


def _is_own(name: object) -> bool:
    if type(name) is not str or len(name) > _MOST_LENGTH:
        return False
    spec = getattr(sys.modules.get(name), "__spec__", None)
    origin = getattr(spec, "origin", None)
    if type(origin) is not str:
        return False
    prefixes = (sys.prefix, sys.base_prefix)
    return origin == "built-in" or any(origin.startswith(f"{prefix}/") for prefix in prefixes)
