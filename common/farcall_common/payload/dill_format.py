"""dill: the format of Globus Compute. It is read, and written on request."""

from __future__ import annotations

import builtins
import io
import threading
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

from farcall_common.payload.pickler import reduced_lock
from farcall_common.payload.pickling import cell_contents, global_names, is_foreign


def _dill() -> ModuleType:
    """dill, imported when it is first needed: the import takes 100 ms."""
    import dill
    import dill.detect
    import dill.source

    module: ModuleType = dill
    return module


def dill_dumps(value: object) -> bytes:
    """dill's pickle of a value; of a function's globals, those that it refers to.

    :raises Exception: any error of pickling.
    """
    dill = _dill()

    class Pickler(dill.Pickler):  # type: ignore[misc, name-defined]  # dill has no types, and is imported late
        def reducer_override(self, obj: Any) -> Any:
            return reduced_lock(obj)  # dill's own reentrant locks arrive locked

    file = io.BytesIO()
    with _dumping:
        original, dill.detect.globalvars = dill.detect.globalvars, _global_variables
        try:
            Pickler(file, dill.settings["protocol"], recurse=True).dump(value)
        finally:
            dill.detect.globalvars = original
    return file.getvalue()


_dumping = threading.RLock()
"""Protects the function of dill that is replaced."""


def _global_variables(function: Any, recurse: bool = True, builtin: bool = False) -> dict[str, Any]:
    """What dill's function of this place returns, in a time that grows with the number of functions: dill's own visits
    each path from one function to another."""
    start = getattr(function, "__func__", function)
    if type(start) is not FunctionType:
        return {}
    names: dict[str, None] = {}
    values: dict[str, Any] = vars(builtins).copy() if builtin else {}
    todo, seen = [start], {id(start)}
    while todo:
        each = todo.pop()
        found = global_names(each.__code__)
        names.update(dict.fromkeys(sorted(found)))
        # Names of the first function are what it says; those of functions that it closes over come from their modules.
        values = {name: each.__globals__[name] for name in found if name in each.__globals__} | values
        if recurse:
            cells = map(cell_contents, each.__closure__ or ())
            for needed in [*map(each.__globals__.get, found), *cells]:
                needed = getattr(needed, "__func__", needed)
                if type(needed) is FunctionType and id(needed) not in seen:
                    seen.add(id(needed))
                    todo.append(needed)
    return {name: values[name] for name in names if name in values}


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
