"""Pickling tools: where code comes from, and byte code of other Python versions.

Code of the standard library, of installed packages and of extension modules travels *by reference*: the worker imports
it. Everything else may exist only on this machine and travels *by value*: ``__main__``, notebooks, scripts, and modules
in the directory of a script or on ``PYTHONPATH``. A reader that has the same source uses its own: see ``by_value``.
Modules that travel as source text (see ``include``) are by reference too: the worker imports what it received.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import opcode
import os
import pathlib
import re
import sys
import sysconfig
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import CellType, CodeType
from typing import Any

PROTOCOL = 5
"""Fixed, so that a newer Python on the client keeps writing pickles that an older worker can read."""

if sys.version_info < (3, 13):
    # Python 3.13 writes paths as of this module, which no other version but 3.14 has.
    sys.modules.setdefault("pathlib._local", pathlib)

#: The minor version, which byte code is bound to.
THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

#: The attribute of a top-level module whose source travels with functions.
INCLUDED_MARK = "__farcall_included__"

#: The names of the main module of a program, and of its copy in a process of ``multiprocessing``.
MAIN = frozenset({"__main__", "__mp_main__"})

_OWN_PACKAGE = __name__.partition(".")[0]
_SITE_DIRECTORIES = frozenset({"site-packages", "dist-packages"})
_LOOKUPS = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_READ_TEXTS = frozenset({"eval", "exec", "globals", "query"})
_NAME_BEHIND_AT = re.compile(r"@([^\W\d]\w*)")
_BEFORE_RESUME = frozenset(
    {"CACHE", "COPY_FREE_VARS", "EXTENDED_ARG", "MAKE_CELL", "NOP", "POP_TOP", "RETURN_GENERATOR"}
)


# -- origin of code ----------------------------------------------------------------------------------------------------


def travels_by_value(module_name: str) -> bool:
    """Whether code of this module must be sent, because workers cannot be expected to import it.

    Modules given to ``cloudpickle.register_pickle_by_value`` travel by value too.
    """
    if module_name in MAIN:
        return True
    if module_name.partition(".")[0] == _OWN_PACKAGE:  # every worker has it, from wherever it is imported here
        return False
    if INCLUDED_MARK in _names_in(sys.modules.get(module_name.partition(".")[0])):
        return False
    module = sys.modules.get(module_name)
    if module is None or is_registered_by_user(module_name):
        return True
    place = place_of(module)
    if place is None:  # built in or frozen, unless it was created at run time and has no spec
        return _names_in(module).get("__spec__") is None
    if place.endswith(tuple(EXTENSION_SUFFIXES)):  # machine code cannot be sent
        return False
    return not is_installed(module_name, place)


def place_of(module: object) -> str | None:
    """The file of a module, or the first folder of a package without one; None if it has neither.

    Read from the names in the module: a module may have a ``__getattr__`` that answers everything.
    """
    names = _names_in(module)
    file, folders = names.get("__file__"), names.get("__path__")
    if isinstance(file, str):
        return file
    return next(map(str, folders), None) if isinstance(folders, Iterable) else None


def _names_in(module: object) -> Mapping[str, Any]:
    return getattr(module, "__dict__", {})


def attribute(module: object, qualified_name: str) -> object:
    """The object with a dotted name in a module; None if there is none, or if looking it up fails."""
    found = module
    for name in qualified_name.split("."):
        try:
            found = getattr(found, name, None)
        except Exception:  # noqa: BLE001 - modules that import their parts late may raise anything
            return None
    return found


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


_OF_WRAPPERS = frozenset(
    {
        *functools.WRAPPER_ASSIGNMENTS,
        *("__wrapped__", "_clear_cache", "cache_parameters", "dispatch", "register", "registry"),
    }
)
"""Attributes that :mod:`functools` gives functions with a cache, and those of ``singledispatch``."""


def own_attributes(wrapper: Any) -> dict[str, Any]:
    """The attributes that a program gave such a function, and not the function inside of it."""
    inner = getattr(wrapper.__wrapped__, "__dict__", {})
    return {
        name: value
        for name, value in vars(wrapper).items()
        if name not in _OF_WRAPPERS and not (name in inner and inner[name] is value)
    }


# -- parts of functions ------------------------------------------------------------------------------------------------


def is_importable(value: Any, is_local: Callable[[str], bool] = travels_by_value) -> bool:
    """Whether the other side finds the same function or class under its module and name.

    :param is_local: whether code of a module travels by value.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(name, str)) or is_local(module):
        return False
    return attribute(sys.modules.get(module), name) is value


EMPTY = object()
"""Placeholder of a variable without a value."""


def cell_contents(cell: CellType) -> object:
    """Read a variable of an enclosing function; :data:`EMPTY` if it has no value."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


_global_names: weakref.WeakKeyDictionary[CodeType, frozenset[str]] = weakref.WeakKeyDictionary()


def global_names(code: CodeType) -> frozenset[str]:
    """The names of modules' variables that a function uses, those of the functions inside it too. With them the names
    in constant texts that it evaluates."""
    found = _global_names.get(code)
    if found is None:
        found = _global_names[code] = frozenset(names_in_code(code).union(*map(_names_in_texts, codes_in(code))))
    return found


def names_in_code(code: CodeType) -> set[str]:
    """Find names as :func:`global_names` does, without those in texts."""
    return {step.argval for each in codes_in(code) for step in dis.get_instructions(each) if step.opname in _LOOKUPS}


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of the functions and classes inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def _names_in_texts(code: CodeType) -> set[str]:
    """The names in what ``eval``, ``exec`` and ``globals`` get as constants, and behind @ for pandas' ``query``."""
    used = {*code.co_names}
    if used.isdisjoint(_READ_TEXTS):
        return set()
    texts = [constant for constant in code.co_consts if isinstance(constant, str)]
    names = {name for text in texts for name in _NAME_BEHIND_AT.findall(text)}
    for text in _texts_read(code):
        with contextlib.suppress(SyntaxError, ValueError), warnings.catch_warnings(action="ignore"):
            names |= names_in_code(compile(text, "<text>", "exec", dont_inherit=True))
    return names


def _texts_read(code: CodeType) -> Iterator[str]:
    """The texts next to ``eval``, ``exec`` and ``globals``: what they get, or what is looked up in their result."""
    before: object = None
    is_next = False
    for step in dis.get_instructions(code):
        if step.opname in _LOOKUPS:
            is_next = step.argval in _READ_TEXTS
            if is_next and isinstance(before, str):
                yield before
        elif step.opname == "LOAD_CONST":
            if is_next and isinstance(step.argval, str):
                yield step.argval
            is_next = False
            before = step.argval
        elif step.opname.startswith("LOAD_FAST") or step.opname in ("LOAD_DEREF", "STORE_FAST", "POP_TOP"):
            is_next = False
        if step.opname not in ("LOAD_CONST", "PUSH_NULL"):
            before = None


USES_MAIN = "uses the main module, __main__, which is another one on a worker: pass what it needs as an argument"
"""Error of functions for which :func:`uses_main_module` is true."""


def uses_main_module(code: CodeType) -> bool:
    """Whether a function looks up the main module of its program, which is another one on a worker."""
    for each in codes_in(code):
        used = {*each.co_names, *each.co_varnames, *each.co_freevars, *each.co_cellvars}
        looks_up = {"sys", "modules"} <= used or "import_module" in used
        if "__main__" in used or (looks_up and "__main__" in each.co_consts):
            return True
    return False


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
