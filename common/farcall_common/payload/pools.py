"""Process pools inside of tasks: functions and classes that arrived with a task go to ``multiprocessing`` by value.

Its pickler sends them by name, and their module cannot be imported: the main module of a worker is another one.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType
from typing import Any, Final

from farcall_common.payload import arrived_classes
from farcall_common.payload.native import dump_native, load_native
from farcall_common.payload.pickling import MAIN, attribute

SOURCE_MODULE: Final = "__farcall__"
"""The module of functions that arrive as source text. Not the main module: a text may end with
``if __name__ == "__main__"``, which workers must not run."""
_MODULES: Final = MAIN | {SOURCE_MODULE}
_PICKLERS: Final = "multiprocessing.reduction"


def teach_pools() -> None:
    """Let the pickler of ``multiprocessing`` send such code, now or as soon as it is imported."""
    module = sys.modules.get(_PICKLERS)
    if module is not None:
        _teach(module)
    elif _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder:
    """Waits for the import of the pickler: most tasks need none, and it takes 10 ms."""

    def find_spec(self, name: str, path: Any = None, _: object = None) -> ModuleSpec | None:
        """Find the module of the pickler, and change the pickler after its import."""
        if name != _PICKLERS:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_teach(module: Any) -> None:
                execute(module)
                _teach(module)

            spec.loader.exec_module = execute_and_teach  # type: ignore[method-assign]
        return spec


_finder: Final[Any] = _Finder()


def _teach(module: Any) -> None:
    pickler = getattr(module, "ForkingPickler", None)
    if pickler is not None and not hasattr(pickler, "reducer_override"):
        pickler.reducer_override = _reduced


def _reduced(_: object, obj: Any, /) -> Any:
    if type(obj) is not FunctionType and not issubclass(type(obj), type):
        return NotImplemented
    module, name = obj.__module__, obj.__qualname__
    if module not in _MODULES or "<" in name or attribute(sys.modules.get(module), name) is obj:
        return NotImplemented  # by name, or refused as in a program: lambdas and inner functions
    return _loaded, (dump_native(obj),)


def _loaded(buffer: bytes) -> Any:
    teach_pools()
    with arrived_classes.keeping():  # those of the other process are copies, which must not change this one's
        return load_native(buffer)
