"""Functions and arguments as they are written on a command line."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from farcall_common.errors import InvalidRequest

FunctionName = Annotated[str, typer.Argument(metavar="FILE.py:FUNCTION", help="Also PACKAGE.MODULE:FUNCTION.")]

#: The name that a script is imported under: one that no installed package has.
_MODULE_PREFIX: Final = "farcall_script_"


def load_function(name: str) -> Callable[..., Any]:
    """The function that ``FILE.py:FUNCTION`` or ``PACKAGE.MODULE:FUNCTION`` names.

    :raises InvalidRequest: if there is no such file, module or function, or if importing it fails.
    """
    place, _, function_name = name.rpartition(":")
    if not place:
        raise InvalidRequest(f"{name!r} names no function", hint="Write it as FILE.py:FUNCTION.")
    path = Path(place)
    if place.endswith(".py") and not path.is_file():
        raise InvalidRequest(f"there is no file {place}")
    try:
        module = _import_file(path) if path.is_file() else importlib.import_module(place)
    except Exception as error:
        raise InvalidRequest(f"{place} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, function_name, None)
    if not callable(found):
        raise InvalidRequest(f"there is no function {function_name!r} in {place}")
    function: Callable[..., Any] = found
    return function


def _import_file(path: Path) -> Any:
    sys.path.insert(0, str(path.parent.resolve()))  # as `python FILE.py` does, for the modules beside it
    spec = importlib.util.spec_from_file_location(_MODULE_PREFIX + path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def parse_argument(text: str) -> Any:
    """A JSON value, or the text itself if it is none."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def parse_kwargs(text: str) -> dict[str, Any]:
    """:raises InvalidRequest: if the text is not a JSON object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise InvalidRequest(f"--kwargs is not a JSON object: {error}", hint="""Like --kwargs '{"n": 3}'.""") from error
