"""Command-line arguments: functions, JSON values, endpoints, and the cache for shell completion."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from farcall._client import Client, connection_of
from farcall_common.credentials import find_home
from farcall_common.errors import ConfigurationError, InvalidRequest, did_you_mean
from farcall_common.files import write_private

_KEPT: Final = 200
#: Bytes of an argument that are not of the locale's encoding.
_UNDECODED: Final = re.compile("[\udc80-\udcff]")
#: Completed without quotes: shells evaluate other texts, and others choose the names of their endpoints.
_WORD: Final = re.compile(r"[\w.@:][\w.@:-]*", re.ASCII)
#: In front of the kinds of what was submitted.
_SUBMITTED: Final = "submitted "
_LAST: Final = re.compile(r"@last(?:~([0-9]{1,4}))?")


def remember(kind: str, values: Iterable[str]) -> None:
    """Keep names for :func:`completes`, the newest first. A failed write is ignored."""
    _add({kind: values})


def _add(values: Mapping[str, Iterable[str]]) -> None:
    known = _read()
    for kind, each in values.items():
        known[kind] = list(dict.fromkeys([*each, *known.get(kind, [])]))[:_KEPT]
    with contextlib.suppress(OSError):
        write_private(_path(), msgspec.json.encode(known))


def remember_submitted(task_ids: Sequence[str], group_id: str) -> None:
    """Keep the ids of what was submitted, for completion and for :func:`last_of`."""
    newest = list(reversed(task_ids))
    _add({"tasks": newest, _SUBMITTED + "tasks": newest, "groups": [group_id], _SUBMITTED + "groups": [group_id]})


def last_of(kind: str, text: str) -> str:
    """The id of the task ("tasks") or group ("groups") that was submitted last from this account, for ``@last``; for
    ``@last~2`` the one two before it. Any other text is returned as it is.

    :raises InvalidRequest: if there is no such one.
    """
    found = _LAST.fullmatch(text)
    if found is None:
        return text
    known, back = _read().get(_SUBMITTED + kind, []), int(found[1] or 0)
    if back >= len(known):
        hint = "`farcall tasks ls` and `farcall groups ls` list yours."
        raise InvalidRequest(f"{text}: {len(known)} {kind} were submitted with this command line", hint=hint)
    return known[back]


def all_last_of(kind: str, texts: Iterable[str]) -> list[str]:
    """The ids of several, as :func:`last_of`."""
    return [last_of(kind, text) for text in texts]


def completes(kind: str) -> Callable[[str], list[str]]:
    """The completion of an argument of this kind: "endpoints", "tasks", "groups"."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in _read().get(kind, []) if value.startswith(incomplete) and _WORD.fullmatch(value)]

    return complete


def _path() -> Path:
    return find_home(os.environ) / "cache" / "completion.json"


def _read() -> dict[str, list[str]]:
    try:
        return msgspec.json.decode(_path().read_bytes(), type=dict[str, list[str]])
    except (OSError, msgspec.DecodeError, ConfigurationError):  # missing, or of another version
        return {}


FunctionName = Annotated[str, typer.Argument(metavar="FILE.py:FUNCTION", help="Also PACKAGE.MODULE:FUNCTION.")]

#: The name that a script is imported under: one that no installed package has.
_MODULE_PREFIX: Final = "farcall_script_"


def load_function(name: str) -> Callable[..., Any]:
    """The function that ``FILE.py:FUNCTION`` or ``PACKAGE.MODULE:FUNCTION`` names.

    :raises InvalidRequest: if the file, module or function does not exist, or importing it fails.
    """
    place, _, function_name = name.rpartition(":")
    if not place:
        raise InvalidRequest(f"{name!r} is not FILE.py:FUNCTION", hint="Write it as FILE.py:FUNCTION.")
    path = Path(place)
    if place.endswith(".py") and not path.is_file():
        raise InvalidRequest(f"there is no file {place}")
    try:
        module = _import_file(path) if path.is_file() else importlib.import_module(place)
    except Exception as error:
        raise InvalidRequest(f"{place} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, function_name, None)
    if not callable(found):
        callables = (name for name, each in vars(module).items() if callable(each))
        raise InvalidRequest(
            f"there is no function {function_name!r} in {place}", hint=did_you_mean(function_name, callables)
        )
    function: Callable[..., Any] = found
    return function


def _import_file(path: Path) -> Any:
    sys.path.insert(0, str(path.parent.resolve()))  # as `python FILE.py` does, for modules in the same directory
    spec = importlib.util.spec_from_file_location(_MODULE_PREFIX + path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def _in_utf_8(text: str) -> str:
    """An argument whose bytes the locale's encoding does not have, as the UTF-8 that it is.

    :raises InvalidRequest: if it is not UTF-8.
    """
    if _UNDECODED.search(text) is None:
        return text
    try:
        return os.fsencode(text).decode()
    except UnicodeError as error:
        raise InvalidRequest(
            f"the argument {text!r} is not UTF-8", hint="Set LC_ALL to a locale with UTF-8."
        ) from error


def parse_argument(text: str) -> Any:
    """A JSON value, or the text itself if it is not JSON.

    :raises InvalidRequest: for bytes that are not UTF-8.
    """
    text = _in_utf_8(text)
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def parse_kwargs(text: str) -> dict[str, Any]:
    """:raises InvalidRequest: if the text is not a JSON object."""
    try:
        return msgspec.json.decode(_in_utf_8(text), type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise InvalidRequest(f"--kwargs is not a JSON object: {error}", hint="""Like --kwargs '{"n": 3}'.""") from error


EndpointName = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        "-e",
        metavar="NAME|ID",
        help="Where to run; default: FARCALL_ENDPOINT, the configured endpoint, or your only one.",
        autocompletion=completes("endpoints"),
    ),
]
EndpointArgument = Annotated[str, typer.Argument(metavar="NAME|ID", autocompletion=completes("endpoints"))]


def resolve_endpoint(client: Client, name: str | None) -> str:
    """The id of an endpoint, as :meth:`Client.find_endpoint`."""
    endpoint_id = client.find_endpoint(name)
    if seen := connection_of(client).names.seen:
        remember("endpoints", seen)
    return endpoint_id
