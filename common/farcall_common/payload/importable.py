"""Importable classes and modules in by-value pickles: when the reader takes its own instead of the copy (ADR 0039).

The writer names each module whose code is in the pickle, with the SHA-256 of its source and the other local modules
that this source imports. A reader that has the same source of all of them uses its own module. A client that reads a
result uses its own classes even if their source differs, as pickle does when it sends classes by name.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import NamedTuple

from farcall_common.payload.origin import is_registered_by_user, travels_by_value

_MAIN = frozenset({"__main__", "__mp_main__"})


class _Source(NamedTuple):
    """The source of a module in memory: its SHA-256, and the modules that it names in imports."""

    digest: str
    imports: frozenset[str]


#: What each module was made from, with modification time and size of its file; None when the file does not say it.
_sources: weakref.WeakKeyDictionary[ModuleType, tuple[tuple[int, int], _Source | None]] = weakref.WeakKeyDictionary()
#: The names of classes that came by value, under which another reader may be able to import them.
_names: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()


def describe_modules(names: Iterable[str]) -> dict[str, list[str]]:
    """The modules of these names, and the local ones that they import: SHA-256 of the source, and names of imports.

    A module whose source is not on disk, or was edited since it was imported, is left out: its code travels by value.
    """
    described: dict[str, list[str]] = {}
    todo = list(names)
    while todo:
        name = todo.pop()
        module = sys.modules.get(name)
        if name in described or name in _MAIN or module is None or is_registered_by_user(name):
            continue
        source = _source_in_memory(module)
        if source is not None:
            needs = sorted(need for need in source.imports if need in sys.modules and travels_by_value(need))
            described[name] = [source.digest, *needs]
            todo += needs
    return described


def importable_name(cls: type) -> str | None:
    """The qualified name under which a class can be imported from its module, where that is so; else None."""
    if (name := _names.get(cls)) is not None:
        return name
    name = cls.__qualname__
    return name if attribute(sys.modules.get(cls.__module__), name) is cls else None


def remember_importable_name(cls: type, name: str) -> None:
    """Keep the name of a class that came by value, for when it is sent on."""
    _names[cls] = name


class ReaderModules:
    """The reader's own modules and classes, for one pickle.

    :param described: what :func:`describe_modules` said where the pickle was written.
    :param own_classes: whether the reader's classes are taken even if their source differs.
    """

    def __init__(self, described: Mapping[str, Sequence[str]], *, own_classes: bool) -> None:
        self._described = described
        self._own_classes = own_classes
        self._same: Collection[str] | None = None

    def module(self, name: str) -> ModuleType | None:
        """The module of this name, if it has the same source as where the pickle was written."""
        if name not in self._described:
            return None
        if self._same is None:
            self._same = _with_same_source(self._described)
        if name not in self._same:
            return None
        module = _imported(name)  # an import may run other code than its source: look at what it left
        return module if module is not None and _has_digest(module, self._described[name][0]) else None

    def class_(self, module_name: str, qualified_name: str) -> type | None:
        """The class of this name, if the reader's own is to be taken."""
        module = _imported(module_name) if self._own_classes else self.module(module_name)
        found = attribute(module, qualified_name)
        return found if isinstance(found, type) else None


def _with_same_source(described: Mapping[str, Sequence[str]]) -> set[str]:
    """The modules whose source is here too, and that of all that they import."""
    same = {name for name, (digest, *_) in described.items() if _is_here(name, digest)}
    while different := {name for name in same if not same.issuperset(described[name][1:])}:
        same -= different
    return same


def _is_here(name: str, digest: str) -> bool:
    module = sys.modules.get(name)
    if module is not None:
        return _has_digest(module, digest)
    spec = _find_spec(name)
    if spec is None or not spec.has_location or not spec.origin:
        return False
    try:
        return _digest(Path(spec.origin).read_bytes()) == digest
    except OSError:
        return False


def _has_digest(module: ModuleType, digest: str) -> bool:
    source = _source_in_memory(module)
    return source is not None and source.digest == digest


def _find_spec(name: str) -> ModuleSpec | None:
    """Where a module would come from, without importing its parents as ``importlib.util.find_spec`` does."""
    parent, _, _ = name.rpartition(".")
    places = None
    if parent:
        above = getattr(sys.modules.get(parent), "__spec__", None) or _find_spec(parent)
        places = None if above is None else above.submodule_search_locations
        if places is None:
            return None
    try:
        return PathFinder.find_spec(name, places)
    except (ImportError, ValueError):
        return None


def _imported(name: str) -> ModuleType | None:
    """The module, or None if it cannot be imported here."""
    if (module := sys.modules.get(name)) is None and name not in _MAIN:
        try:
            module = importlib.import_module(name)
        except (Exception, SystemExit):  # noqa: BLE001 - a module's own code may do anything
            return None
    return module


def attribute(module: object, qualified_name: str) -> object:
    """What a module has under a dotted name, or None."""
    found = module
    for name in qualified_name.split("."):
        found = getattr(found, name, None)
    return found


def _source_in_memory(module: ModuleType) -> _Source | None:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    try:
        status = Path(file).stat()
        stamp = (status.st_mtime_ns, status.st_size)
        known = _sources.get(module)
        if known is not None and known[0] == stamp:
            return known[1]
        text = Path(file).read_bytes()
        if known is not None:  # touched: another text is not what is in memory, and that stays so
            source = known[1] if known[1] is not None and known[1].digest == _digest(text) else None
        else:
            source = _examined(module, text)
    except (OSError, SyntaxError, ValueError):
        return None
    _sources[module] = stamp, source
    return source


def _examined(module: ModuleType, text: bytes) -> _Source | None:
    """The source of a module that is looked at for the first time, unless its functions are from another text."""
    tree = ast.parse(text)
    written = set(_codes(compile(tree, str(module.__file__), "exec", dont_inherit=True)))
    in_memory = {f.__code__ for f in _functions(module) if f.__code__.co_filename == module.__file__}
    if not _decorated_lines(tree).issuperset(code.co_firstlineno for code in in_memory - written):
        return None
    return _Source(_digest(text), frozenset(_imports(tree, module)))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _decorated_lines(tree: ast.Module) -> set[int]:
    """The lines of decorated functions and classes: decorators such as typeguard's compile them again."""
    definitions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    return {
        line
        for node in definitions
        for decorator in node.decorator_list
        for line in range(decorator.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions that a module defines, and those of its classes."""
    todo: list[object] = [*vars(module).values()]
    while todo:
        item = todo.pop()
        if isinstance(item, staticmethod | classmethod):
            item = item.__func__
        if isinstance(item, property):
            todo += [item.fget, item.fset, item.fdel]
        elif isinstance(item, FunctionType) and item.__globals__ is vars(module):
            yield item
        elif isinstance(item, type) and item.__module__ == module.__name__:
            todo += [each for each in vars(item).values() if each is not item]


def _imports(tree: ast.Module, module: ModuleType) -> Iterator[str]:
    package = getattr(module, "__package__", None) or ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, (above, node.module)))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:32]
