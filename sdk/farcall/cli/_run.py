"""``farcall run FILE.py:function``."""

from __future__ import annotations

import concurrent.futures
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from farcall._client import Client
from farcall._executor import Executor
from farcall._future import ComputeFuture
from farcall.cli._output import AsJson, show_json, show_value, stderr
from farcall.cli._resolve import EndpointName, resolve_endpoint
from farcall_common.errors import InvalidRequest, TaskCancelled, TaskPending

__all__ = ["run"]

_SPINNER_AFTER_S: Final = 1.0
#: The name that a script is imported under: one that no installed package has.
_MODULE_PREFIX: Final = "farcall_script_"


def run(
    function: Annotated[str, typer.Argument(metavar="FILE.py:FUNCTION", help="Also PACKAGE.MODULE:FUNCTION.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ARGUMENT", help="JSON values; what is not JSON is text. Write -- before negative numbers."
        ),
    ] = None,
    kwargs: Annotated[str, typer.Option(metavar="JSON", help="Keyword arguments: a JSON object.")] = "{}",
    endpoint: EndpointName = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the result, or show the task's id.")] = True,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="Wait at most so long.")] = None,
    walltime: Annotated[float | None, typer.Option(metavar="SECONDS", help="Stop the task after so long.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a Python function on an endpoint and show what it returns."""
    called = load_function(function)
    args, named = [parse_argument(each) for each in arguments or ()], parse_kwargs(kwargs)
    with Client() as client:
        endpoint_id = resolve_endpoint(client, endpoint)
        if not wait:
            batch = client.create_batch(walltime_s=walltime)
            task_id = batch.add(client.register_function(called), args, named)
            client.batch_run(endpoint_id, batch)
            show_json({"task_id": task_id}) if as_json else show_value(task_id)
            return
        with Executor(endpoint_id, client=client, walltime_s=walltime) as executor:
            future = executor.submit(called, *args, **named)
            value = _wait(future, timeout)
    if as_json:
        show_json({"task_id": future.task_id, "result": value, "timings": future.timings})
    elif value is not None:
        show_value(value)


def _wait(future: ComputeFuture[Any], timeout_s: float | None) -> Any:
    try:
        first_s = _SPINNER_AFTER_S if timeout_s is None else min(timeout_s, _SPINNER_AFTER_S)
        if not concurrent.futures.wait([future], first_s).done:
            with stderr().status(f"task {future.task_id}"):
                concurrent.futures.wait([future], None if timeout_s is None else timeout_s - first_s)
        if not future.done():
            future.cancel()
            raise TaskPending(f"task {future.task_id} did not end within {timeout_s:g} s and was cancelled")
        return future.result()
    except concurrent.futures.CancelledError:
        raise TaskCancelled(f"task {future.task_id} was cancelled") from None


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
