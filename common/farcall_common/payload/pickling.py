"""Pickling tools: where code comes from, pickle by reference, byte code of other Python versions, and dill.

Code of the standard library, of installed packages and of extension modules travels *by reference*: the worker imports
it. Everything else may exist only on this machine and travels *by value*: ``__main__``, notebooks, scripts, and modules
in the directory of a script or on ``PYTHONPATH``. A reader that has the same source uses its own: see ``by_value``.
Modules that travel as source text (see ``include``) are by reference too: the worker imports what it received.
"""

from __future__ import annotations

import dis
import functools
import io
import opcode
import os
import pickle
import sys
import sysconfig
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

PROTOCOL = 5
"""Fixed, so that a newer Python on the client keeps writing pickles that an older worker can read."""

#: The minor version, which byte code is bound to.
THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

#: The attribute of a top-level module whose source travels with functions.
INCLUDED_MARK = "__farcall_included__"

_OWN_PACKAGE = __name__.partition(".")[0]
_SITE_DIRECTORIES = frozenset({"site-packages", "dist-packages"})
_BEFORE_RESUME = frozenset(
    {"CACHE", "COPY_FREE_VARS", "EXTENDED_ARG", "MAKE_CELL", "NOP", "POP_TOP", "RETURN_GENERATOR"}
)


# -- origin of code ----------------------------------------------------------------------------------------------------


def travels_by_value(module_name: str) -> bool:
    """Whether code of this module must be sent, because workers cannot be expected to import it.

    Modules given to ``cloudpickle.register_pickle_by_value`` travel by value too.
    """
    if module_name in ("__main__", "__mp_main__"):
        return True
    if module_name.partition(".")[0] == _OWN_PACKAGE:  # every worker has it, from wherever it is imported here
        return False
    if hasattr(sys.modules.get(module_name.partition(".")[0]), INCLUDED_MARK):
        return False
    module = sys.modules.get(module_name)
    if module is None or is_registered_by_user(module_name):
        return True
    place = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    if place is None:  # built in or frozen, unless it was created at run time and has no spec
        return getattr(module, "__spec__", None) is None
    if place.endswith(tuple(EXTENSION_SUFFIXES)):  # machine code cannot be sent
        return False
    return not is_installed(module_name, place)


def is_registered_by_user(module_name: str) -> bool:
    """Whether ``cloudpickle.register_pickle_by_value`` was called for a module or a package around it."""
    cloudpickle = sys.modules.get("cloudpickle")  # not imported: nothing is registered
    if cloudpickle is None:
        return False
    registered: set[str] = cloudpickle.list_registry_pickle_by_value()
    return any(module_name == name or module_name.startswith(f"{name}.") for name in registered)


@functools.cache
def is_installed(module_name: str, place: str) -> bool:
    """Whether a module belongs to the standard library or to an installed package, ``pip install -e`` included."""
    path = Path(os.path.realpath(place))
    if is_part_of_an_installation(path):
        return True
    top_level, *below = module_name.split(".")
    up = len(below) + (path.name == "__init__.py")
    return path.parents[min(up, len(path.parents) - 1)] in _editable_roots() or top_level in _editable_names()


def is_part_of_an_installation(path: Path) -> bool:
    """Whether a resolved path is in the standard library or in ``site-packages``."""
    return not _SITE_DIRECTORIES.isdisjoint(path.parts) or any(
        path.is_relative_to(directory) for directory in _standard_library()
    )


@functools.cache
def _standard_library() -> frozenset[Path]:
    return frozenset(Path(os.path.realpath(sysconfig.get_path(name))) for name in ("stdlib", "platstdlib"))


@functools.cache
def _editable_roots() -> frozenset[Path]:
    """Source folders of ``pip install -e``, from ``.pth`` files."""
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
    """Packages of ``pip install -e`` that setuptools maps with a finder module instead of a folder."""
    finders = [module for name, module in sys.modules.copy().items() if name.startswith("__editable___")]
    return frozenset(name for finder in finders for name in getattr(finder, "MAPPING", ()))


# -- decorated functions ----------------------------------------------------------------------------------------------


def is_decorated(value: object) -> bool:
    """Whether it is a function with options, as the SDK's decorator makes them."""
    return getattr(type(value), "farcall_decorated", None) is True


def plain_function(value: Any) -> Any:
    """The function itself: the other side needs no decorator, and may not have it."""
    return value.__wrapped__ if is_decorated(value) else value


# -- pickle by reference -----------------------------------------------------------------------------------------------


class ReferencePickler(pickle.Pickler):
    """Refuses classes and functions that must travel by value, so that the next strategy sends them so.

    Plain pickle writes a class of ``__main__`` as its name, and the worker's ``__main__`` is another one.
    """

    def reducer_override(self, obj: object, /) -> Any:
        if isinstance(obj, (type, FunctionType)) or is_decorated(obj):
            module: object = obj.__module__  # a class can set it to anything
            if isinstance(module, str) and travels_by_value(module):
                name = obj.__qualname__  # type: ignore[attr-defined]
                raise pickle.PicklingError(f"{module}.{name} cannot be imported on another machine")
        return NotImplemented


def dumps_by_reference(value: object) -> bytes:
    """Pickle a value whose classes and functions a worker can import.

    :raises pickle.PicklingError: if a class or function must travel by value, or cannot be pickled.
    :raises Exception: any error of the value's reduce methods.
    """
    file = io.BytesIO()
    ReferencePickler(file, PROTOCOL).dump(value)
    return file.getvalue()


# -- byte code of other Python versions --------------------------------------------------------------------------------


def is_foreign(code: bytes) -> bool:
    """Whether instructions are certainly of another Python version. A code object of such instructions can overwrite
    memory, so they are checked before it is created.

    For byte code without its version. The check may miss some: every code object starts with RESUME, whose number
    changes between versions, has only operations of this version, and after each operation as many caches as this
    version has.
    """
    operations = code[::2]
    started = False
    position = 0
    while position < len(operations):
        name = dis.opname[operations[position]]
        behind = position + 1 + _caches_behind(name)
        if name.startswith("<") or behind > len(operations) or any(operations[position + 1 : behind]):
            return True
        if not started and name not in _BEFORE_RESUME:
            if name != "RESUME":
                return True
            started = True
        position = behind
    return not started


def _caches_behind(name: str) -> int:
    """Number of cache entries after an operation. The table changed from numbers to names in Python 3.13."""
    table: Any = getattr(opcode, "_inline_cache_entries", {})
    return int(table.get(name, 0) if isinstance(table, dict) else table[opcode.opmap.get(name, 0)])


# -- dill --------------------------------------------------------------------------------------------------------------


def _dill() -> ModuleType:
    """dill, imported when it is first needed: the import takes 100 ms."""
    import dill
    import dill.source

    module: ModuleType = dill
    return module


def dill_dumps(value: object) -> bytes:
    """dill's pickle of a value; of a function's globals, those that it refers to.

    :raises Exception: any error of pickling.
    """
    pickled: bytes = _dill().dumps(value, recurse=True)
    return pickled


def dill_loads(pickled: bytes) -> object:
    """The value of dill's pickle.

    :raises ForeignCode: if it has byte code of another Python version; no code object is created then.
    :raises Exception: any error of unpickling.
    """
    dill = _dill()

    class Unpickler(dill.Unpickler):  # type: ignore[misc, name-defined]  # dill has no types, and is imported late
        def find_class(self, module: str, name: str) -> Any:
            found = super().find_class(module, name)
            return _checked(found) if (module, name) == ("dill._dill", "_create_code") else found

    value: object = Unpickler(io.BytesIO(pickled)).load()
    return value


class ForeignCode(ValueError):  # not in our tree: the strategy explains it to the user
    """Byte code that this Python version cannot run."""


def _checked(create_code: Callable[..., CodeType]) -> Callable[..., CodeType]:
    """dill's constructor of code objects, with a check of the instructions: the first bytes after the numbers."""

    def create(*parts: Any) -> CodeType:
        fields = parts if isinstance(parts[0], int) else parts[1:]
        instructions = next((part for part in fields if isinstance(part, bytes)), b"")
        if is_foreign(instructions):
            raise ForeignCode("the instructions belong to another Python version")
        return create_code(*parts)

    return create


def dill_source(function: Any) -> str:
    """The source text of a function, also of one typed into an interpreter.

    :raises OSError: if it is unknown.
    """
    source: str = _dill().source.getsource(function, lstrip=True)
    return source
