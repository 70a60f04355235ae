"""Where code comes from, and so how it travels.

Code of the standard library, of installed packages and of extension modules travels *by reference*: the worker imports
it. Everything else may exist only on this machine and travels *by value*: ``__main__``, notebooks, scripts, and modules
in the directory of a script or on ``PYTHONPATH``. A reader that has the same source uses its own: see ``importable``.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_SITE_DIRECTORIES = frozenset({"site-packages", "dist-packages"})


def travels_by_value(module_name: str) -> bool:
    """Whether things of this module must be sent themselves because no worker can be expected to import them.

    Modules given to ``cloudpickle.register_pickle_by_value`` travel by value too.
    """
    if module_name in ("__main__", "__mp_main__"):
        return True
    module = sys.modules.get(module_name)
    if module is None or is_registered_by_user(module_name):
        return True
    place = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    if place is None:  # built in or frozen, unless it was made at run time and has no spec
        return getattr(module, "__spec__", None) is None
    if place.endswith(tuple(EXTENSION_SUFFIXES)):  # machine code cannot travel
        return False
    return not _is_installed(module_name, place)


def is_registered_by_user(module_name: str) -> bool:
    """Whether ``cloudpickle.register_pickle_by_value`` was called for a module or a package around it."""
    cloudpickle = sys.modules.get("cloudpickle")  # not imported: nothing can be registered
    if cloudpickle is None:
        return False
    registered: set[str] = cloudpickle.list_registry_pickle_by_value()
    return any(module_name == name or module_name.startswith(f"{name}.") for name in registered)


@functools.cache
def _is_installed(module_name: str, place: str) -> bool:
    path = Path(os.path.realpath(place))
    if not _SITE_DIRECTORIES.isdisjoint(path.parts):
        return True
    if any(path.is_relative_to(directory) for directory in _standard_library()):
        return True
    top_level, *below = module_name.split(".")
    up = len(below) + (path.name == "__init__.py")
    return path.parents[min(up, len(path.parents) - 1)] in _editable_roots() or top_level in _editable_names()


@functools.cache
def _standard_library() -> frozenset[Path]:
    return frozenset(Path(os.path.realpath(sysconfig.get_path(name))) for name in ("stdlib", "platstdlib"))


@functools.cache
def _editable_roots() -> frozenset[Path]:
    """Source folders of ``pip install -e``: an installer named them in a ``.pth`` file."""
    sites = [Path(entry) for entry in sys.path if Path(entry).name in _SITE_DIRECTORIES]
    lines = [
        (site, line)
        for site in sites
        for pth in site.glob("*.pth")
        for line in pth.read_text(encoding="utf-8", errors="replace").splitlines()
    ]
    return frozenset(
        Path(os.path.realpath(site / line))
        for site, line in lines
        if line.strip() and not line.startswith(("#", "import ", "import\t"))
    )


def _editable_names() -> frozenset[str]:
    """Packages of ``pip install -e`` that setuptools maps with a finder module of its own instead of a folder."""
    finders = [module for name, module in sys.modules.copy().items() if name.startswith("__editable___")]
    return frozenset(name for finder in finders for name in getattr(finder, "MAPPING", ()))
