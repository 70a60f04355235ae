"""dill, imported when it is first needed: it costs every process that imports it 100 ms."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

from farcall_common.payload.foreign import is_foreign


def _dill() -> ModuleType:
    import dill
    import dill.source

    module: ModuleType = dill
    return module


def dumps(value: object) -> bytes:
    """dill's pickle of a value; of a function's globals, those that it refers to.

    :raises Exception: what pickling it raises.
    """
    pickled: bytes = _dill().dumps(value, recurse=True)
    return pickled


def loads(pickled: bytes) -> object:
    """The value of dill's pickle.

    :raises ForeignCode: if there is byte code of another Python version in it; none of it is made then.
    :raises Exception: what unpickling raises.
    """
    dill = _dill()

    class Unpickler(dill.Unpickler):  # type: ignore[misc, name-defined]  # dill has no types, and is imported late
        def find_class(self, module: str, name: str) -> Any:
            found = super().find_class(module, name)
            return _checked(found) if (module, name) == ("dill._dill", "_create_code") else found

    value: object = Unpickler(io.BytesIO(pickled)).load()
    return value


class ForeignCode(ValueError):  # not an error of ours: the strategy says it in the user's words
    """Byte code that this Python version cannot run."""


def _checked(create_code: Callable[..., CodeType]) -> Callable[..., CodeType]:
    """dill's maker of code objects, looking at the instructions first: the first bytes behind the numbers."""

    def create(*parts: Any) -> CodeType:
        fields = parts if isinstance(parts[0], int) else parts[1:]
        instructions = next((part for part in fields if isinstance(part, bytes)), b"")
        if is_foreign(instructions):
            raise ForeignCode("the instructions are of another version")
        return create_code(*parts)

    return create


def get_source(function: Any) -> str:
    """The source text of a function, also of one typed into an interpreter.

    :raises OSError: if there is none.
    """
    source: str = _dill().source.getsource(function, lstrip=True)
    return source
