"""Retries of raised exceptions: the names of exception classes, and whether an exception belongs to one of them.

The option ``retry_on`` of a task has names, because the classes are in the worker's environment and perhaps not in the
submitter's. A name is ``module.Class``. The module of a class that a script or notebook defines is ``__main__``; in a
worker it may be another one, so such a name stands for a class of that name in any module.
"""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Final

MAX_RETRIES: Final = 100
MAX_DELAY_S: Final = 300.0
"""Most seconds before a retry."""
MAX_NAMES: Final = 10
MAX_NAME_CHARACTERS: Final = 200
NAME_PATTERN: Final = r"^[A-Za-z_][A-Za-z0-9_]*(\.([A-Za-z_][A-Za-z0-9_]*|<locals>))+$"
"""In ASCII: a name counts in the memory of the queue, and is shown."""
WALLTIME_NAME: Final = "builtins.TimeoutError"
"""A task that names this class is retried after its walltime, too."""
EARLIER_RUN_S: Final = "earlier_run_s"
"""In the details of a result: seconds that the runs before the last one took, which count as usage."""

_ANY_MODULE: Final = "__main__."
_is_name: Final = re.compile(NAME_PATTERN).fullmatch
_BUILTINS: Final = "builtins."


def exception_names(given: object) -> tuple[str, ...]:
    """The names of exception classes that are given as classes or names, alone or several. A name without a module is
    that of a built-in exception.

    :raises ValueError: for anything else, and for more than MAX_NAMES.
    """
    several = given if isinstance(given, Iterable) and not isinstance(given, str | type) else (given,)
    names = tuple(dict.fromkeys(map(_name, several)))
    if len(names) > MAX_NAMES:
        raise ValueError(f"retry_on: {len(names)} exceptions, and at most {MAX_NAMES} are allowed")
    return names


def is_retried(error: BaseException, names: Sequence[str]) -> bool:
    """Whether an exception belongs to a class with one of these names, or to a subclass. Without names every
    :class:`Exception` is retried, so that ``sys.exit`` and Ctrl-C are not.

    A class is also known by another name that an imported module has for it. Never raises, whatever the class does.
    """
    if not names:
        return isinstance(error, Exception)
    try:
        return any(_is_named(cls, name) for cls in type(error).__mro__ for name in names)
    except BaseException:  # noqa: BLE001 - names of user classes, and attributes of modules, may be computed
        return False


def class_name(cls: type) -> str:
    """The name of a class, as ``retry_on`` has it; empty if that is not one, such as that of a generic class."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    return name if is_class_name(name) else ""


def is_class_name(name: str) -> bool:
    """Whether a text can be the name of a class."""
    return len(name) <= MAX_NAME_CHARACTERS and _is_name(name) is not None


def error_name(text: str) -> str:
    """The text if it can be the name of a class, with or without a module, or the code of an error; else empty."""
    return text if is_class_name(_BUILTINS + text) else ""


def _is_named(cls: type, name: str) -> bool:
    if name.startswith(_ANY_MODULE):
        return cls.__qualname__ == name.removeprefix(_ANY_MODULE)
    if name == f"{cls.__module__}.{cls.__qualname__}":
        return True
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), attribute, None) is cls


def _name(given: object) -> str:
    if isinstance(given, type) and issubclass(given, BaseException):
        name = class_name(given)
    elif isinstance(given, str):
        name = given if "." in given else _of_builtin(given)
    else:
        raise ValueError(f"retry_on: expected exception classes or their names, got {given!r:.200}")
    if not is_class_name(name):
        raise ValueError(
            f"retry_on: {given!r:.200} is not the name of an exception class, such as OSError or module.Error"
        )
    return name


def _of_builtin(name: str) -> str:
    found = getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, BaseException):
        return class_name(found)
    import difflib  # here, because few programs need it

    known = [each for each, cls in vars(builtins).items() if isinstance(cls, type) and issubclass(cls, BaseException)]
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]}?" if close else f"write module.{name}, or __main__.{name} for one of a script"
    raise ValueError(f"retry_on: there is no built-in exception {name!r:.200}: {meant}")
