"""Included modules: local modules whose source text travels with every function (ADR 0059).

Their functions and classes are sent by name, as those of installed packages, and so do not depend on the minor version
of Python. The worker makes the modules from their text, for the calls of that function only.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Final

from farcall_common.errors import PayloadTooLarge, SerializationError
from farcall_common.payload import shipped_modules
from farcall_common.payload.functions import Included, Sources, loader_text
from farcall_common.payload.pickling import INCLUDED_MARK, is_installed, is_part_of_an_installation

#: All included modules together: they are sent with every function.
MAX_INCLUDED_BYTES: Final = 1024 * 1024

_MISSING: Final = re.compile(r"No module named '(\w+)")

_NOTHING: Final = Included({}, "")
_included = _NOTHING


def included() -> Included:
    """The modules that travel now: another object when they have changed."""
    return _included


def include(*modules: ModuleType | str) -> None:
    """Read the source text of local modules, and of the local modules that they import, to send them with functions.

    :raises ImportError: if there is no such module.
    :raises SerializationError: if a module is installed, built in, or not pure Python.
    :raises PayloadTooLarge: if all of them take over 1 MiB.
    :raises TypeError, ValueError: if it is not a module, or a part of a package.
    """
    global _included
    names = [_checked_name(module) for module in modules]
    sources = {name: source for name, source in _included.sources.items() if name.partition(".")[0] not in names}
    todo = names.copy()
    while todo:
        name = todo.pop()
        if name in sources or _is_shipped(name):
            continue
        found = _sources_of(name)
        sources |= found
        todo += [need for need in _imported_by(found) if need not in sources and local_file(need) is not None]
    size_bytes = sum(len(text.encode()) for _, text in sources.values())
    if size_bytes > MAX_INCLUDED_BYTES:
        largest = max(sources, key=lambda name: len(sources[name][1]))
        raise PayloadTooLarge(
            f"the included modules take {size_bytes / 2**20:.1f} MiB of source text, "
            f"{len(sources[largest][1]) / 2**20:.1f} MiB of it {largest}; "
            f"the limit is {MAX_INCLUDED_BYTES / 2**20:.1f} MiB",
            hint="Install a package of this size on the endpoint.",
        )
    in_order = {name: sources[name] for name in sorted(sources)}
    digest = hashlib.sha256((loader_text() + repr(in_order)).encode(errors="surrogatepass")).hexdigest()[:32]
    if digest != _included.digest:
        _included = Included(in_order, digest)
        _mark()


def with_modules(buffer: bytes) -> bytes:
    """The buffer of a function, with the included modules if there are any: source text, which every worker reads."""
    if not _included.sources:
        return buffer
    _mark()
    return _included.with_function(buffer)


def hint_for_missing(message: str) -> str:
    """Advice for the error of a task that did not find a module which is a local file here; else empty."""
    found = _MISSING.search(message)
    file = local_file(found[1]) if found else None
    if found is None or file is None:
        return ""
    name = found[1]
    return (
        f"{name} is a file of this machine ({file}). Send it along: call farcall.include({name!r}) before you submit."
    )


def local_file(name: str) -> Path | None:
    """The file of a module of this machine that is not installed, and not included; else None. Imports nothing."""
    if name in sys.stdlib_module_names or name in _included.sources or not name.isidentifier():
        return None
    try:
        spec = importlib.util.find_spec(name)
    except Exception:  # noqa: BLE001 - finders of the user may raise anything
        return None
    place = None if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    if place is None or place.endswith(tuple(EXTENSION_SUFFIXES)) or not Path(place).exists():
        return None
    return None if is_installed(name, place) else Path(place)


def _mark() -> None:
    """Let pickle send their functions and classes by name, also if they were imported after they were included."""
    for name in _included.top_level:
        if (module := sys.modules.get(name)) is not None:
            setattr(module, INCLUDED_MARK, _included.digest)


def _checked_name(module: ModuleType | str) -> str:
    if not isinstance(module, ModuleType | str):
        raise TypeError(f"expected a module or its name, got {type(module).__name__}")
    name = module if isinstance(module, str) else module.__name__
    if name in ("__main__", "__mp_main__"):
        raise ValueError("the program itself cannot be included: what a function uses of it is sent anyway")
    package, dot, rest = name.partition(".")
    if rest == "py":
        raise ValueError(f"{name} is a file: give the name of the module, {package!r}")
    if dot:
        raise ValueError(f"{name} is a part of {package}: include {package!r}, which has all of its modules")
    return name


def _is_shipped(name: str) -> bool:
    """Whether this is a worker that received the module: one that includes itself or others does so there, too."""
    loader = getattr(importlib.import_module(name).__spec__, "loader", None)
    return type(loader).__name__ == shipped_modules.ShippedModules.__name__


def _sources_of(name: str) -> Sources:
    module = importlib.import_module(name)
    file = getattr(module, "__file__", None)
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    if file is None and not folders:
        raise SerializationError(f"{name} is built in", hint="Every Python has it: import it in the function.")
    place = Path(os.path.realpath(file or folders[0]))
    if is_part_of_an_installation(place):
        raise SerializationError(
            f"{name} is an installed package ({place})",
            hint="Install it on the endpoint, in the environment of its workers.",
        )
    if not folders:
        return {name: (False, _text(name, place))}
    found: dict[str, tuple[bool, str]] = {}
    for folder in folders:
        found |= _sources_in(folder, name)
    return found


def _sources_in(folder: Path, package: str) -> dict[str, tuple[bool, str]]:
    """The modules of a package, and of the packages in it."""
    init = folder / "__init__.py"
    found = {package: (True, _text(package, init) if init.exists() else "")}
    for path in sorted(folder.iterdir()):
        stem = path.name.partition(".")[0]
        if path.is_dir():
            if stem == path.name and stem.isidentifier() and stem != "__pycache__":
                inner = _sources_in(path, f"{package}.{stem}")
                found |= inner if len(inner) > 1 or inner[f"{package}.{stem}"][1] else {}
        elif path.name.endswith(tuple(EXTENSION_SUFFIXES)):
            _text(f"{package}.{stem}", path)
        elif path.suffix == ".py" and path.stem.isidentifier() and path != init:
            found[f"{package}.{path.stem}"] = (False, _text(f"{package}.{path.stem}", path))
    return found


def _text(name: str, path: Path) -> str:
    if path.suffix != ".py":
        raise SerializationError(
            f"{name} is not pure Python ({path})", hint="Install it on the endpoint, in the environment of its workers."
        )
    try:
        return importlib.util.decode_source(path.read_bytes())
    except (OSError, SyntaxError, UnicodeDecodeError) as error:  # in an archive, for instance
        raise SerializationError(f"the source text of {name} cannot be read ({path}): {error}") from error


def _imported_by(sources: Sources) -> Iterator[str]:
    """The top-level names that modules import."""
    for _, text in sources.values():
        try:
            tree = ast.parse(text)
        except SyntaxError:  # of another Python version, for instance: an error only where it is imported
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                yield node.module.partition(".")[0]
