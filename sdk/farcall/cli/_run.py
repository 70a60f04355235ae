"""``farcall run`` and ``farcall map``: functions of a file on an endpoint."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from farcall._binding import accepts_of, check_arguments
from farcall._client import Client
from farcall._decorator import Function
from farcall._executor import Executor, interrupted, leave, report_delays
from farcall._future import ComputeFuture
from farcall._task_info import Why
from farcall._task_output import OutputPart
from farcall.cli._arguments import (
    EndpointName,
    FunctionName,
    completes,
    load_function,
    parse_argument,
    parse_kwargs,
    remember_submitted,
    resolve_endpoint,
)
from farcall.cli._connect import above, bar, connected, end_line, waiting, write_part
from farcall.cli._output import AsJson, show_delay, show_error, show_json, show_line, show_output, show_value
from farcall_common.console import check_number
from farcall_common.errors import ErrorRecord, FarcallError, InvalidRequest, TaskCancelled, TaskPending
from farcall_common.exit_codes import FAILED, Terminated, exit_status
from farcall_common.task_options import TaskOptions

if TYPE_CHECKING:
    from farcall._batch import Batch
    from farcall_common.task_options import OwnOptionsDict

_IDS_SHOWN: Final = 10
_FILE_ENDS: Final = (".json", ".jsonl", ".ndjson", ".csv", ".txt")
_ONE_ARRAY: Final = (
    "The only input is an array. For a call for each of its items, write them one by one, like 1 2 3; "
    "with --unpack they are the arguments of one call."
)

Future = ComputeFuture[Any]
Arguments = tuple[list[Any], dict[str, Any]]

Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the result, or show ids and exit.")]
Timeout = Annotated[
    float | None,
    typer.Option(
        callback=check_number, metavar="SECONDS", help="Wait at most this long, then cancel unfinished tasks."
    ),
]
Walltime = Annotated[
    float | None, typer.Option(callback=check_number, metavar="SECONDS", help="Stop a task that runs longer.")
]
Retries = Annotated[
    int | None, typer.Option(metavar="N", help="Run a task whose function raised again, at most N times.")
]
RetryOn = Annotated[
    list[str] | None,
    typer.Option(
        metavar="EXCEPTION",
        help="Retry only this exception, such as OSError or module.Error. May be given several times.",
    ),
]
Container = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|ID",
        help="Run it in a container of yours (see `farcall containers ls`).",
        autocompletion=completes("containers"),
    ),
]
Requirement = Annotated[
    list[str] | None,
    typer.Option(metavar="PACKAGE", help="Run it with a package that the endpoint installs. Repeatable."),
]
Output = Annotated[
    bool, typer.Option("--output", help="Show what the function prints, on standard error, while it runs.")
]


def run(
    context: typer.Context,
    function: FunctionName,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENT", help="JSON values; anything else is text."),
    ] = None,
    kwargs: Annotated[str, typer.Option(metavar="JSON", help="Keyword arguments: a JSON object.")] = "{}",
    endpoint: EndpointName = None,
    wait: Wait = True,
    timeout: Timeout = None,
    walltime: Walltime = None,
    retries: Retries = None,
    retry_on: RetryOn = None,
    container: Container = None,
    requirement: Requirement = None,
    output: Output = False,
    as_json: AsJson = False,
) -> None:
    """Run a Python function on an endpoint and show its result."""
    options = _options(walltime, retries, retry_on, container, requirement)
    called = _with_options(load_function(function), options)
    args, named = [parse_argument(each) for each in arguments or ()], parse_kwargs(kwargs)
    _check(called, [(args, named)])
    with connected(context, doing=None) as client:
        endpoint_id = _endpoint_id(client, _endpoint_name(context, endpoint, called))
        if not wait:
            [task_id] = _submitted(client, endpoint_id, called, [(args, named)], options).task_ids
            show_json({"task_id": task_id}) if as_json else show_value(task_id)
            return
        with _executor(client, endpoint_id, options, as_json=as_json) as (executor, futures):
            if output:
                executor.on_output = functools.partial(_show_output, as_json=as_json)
            future = executor.submit(called, *args, **named)
            futures.append(future)
            remember_submitted([future.task_id], future.task_group_id)
            with waiting(f"task {future.task_id}"):
                concurrent.futures.wait(futures, timeout)
            _end_late(futures, timeout)
            if output:
                executor.shutdown()  # waits for the last output
            end_line()
            value = _result(future)
    if as_json:
        show_json({"task_id": future.task_id, "result": value, "timings": future.timings})
    elif value is not None:
        show_value(value)


def map_(
    context: typer.Context,
    function: FunctionName,
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUTS", help="A file of JSON lines, - for standard input, or the inputs themselves as JSON."
        ),
    ],
    unpack: Annotated[
        bool, typer.Option("--unpack", help="An array is several arguments, an object keyword arguments.")
    ] = False,
    endpoint: EndpointName = None,
    wait: Wait = True,
    timeout: Timeout = None,
    walltime: Walltime = None,
    retries: Retries = None,
    retry_on: RetryOn = None,
    container: Container = None,
    requirement: Requirement = None,
    output: Output = False,
    as_json: AsJson = False,
) -> None:
    """Run a function once for each input, and write each result as a line of JSON, in the order of the inputs.

    The line of a call that failed is null; its error is written to standard error. With --json each line is an object
    with index, task_id and either result or error.
    """
    options = _options(walltime, retries, retry_on, container, requirement)
    called = _with_options(load_function(function), options)
    calls = [_as_call(value, unpack=unpack) for value in _values(inputs)]
    _check(called, calls)
    with connected(context, doing=None) as client:
        endpoint_id = _endpoint_id(client, _endpoint_name(context, endpoint, called))
        if not wait:
            batch = _submitted(client, endpoint_id, called, calls, options)
            if as_json:
                show_json({"task_group_id": batch.task_group_id, "task_ids": batch.task_ids})
            else:
                typer.echo(batch.task_group_id)
            return
        with _executor(client, endpoint_id, options, as_json=as_json) as (executor, futures):
            for index, (args, named) in enumerate(calls):
                if output:
                    executor.on_output = functools.partial(_show_output, as_json=as_json, label=f"[{index}] ")
                futures.append(executor.submit(called, *args, **named))
            if futures:
                remember_submitted([future.task_id for future in futures], futures[0].task_group_id)
            failed = _show_results(futures, timeout, as_json=as_json)
    if failed:
        if len(calls) == 1 and not unpack and isinstance(calls[0][0][0], list) and not as_json:
            typer.echo(_ONE_ARRAY, err=True)
        raise typer.Exit(FAILED)


def _options(
    walltime_s: float | None,
    retries: int | None,
    retry_on: list[str] | None,
    container: str | None,
    requirements: list[str] | None,
) -> OwnOptionsDict:
    """The options that the command line has.

    :raises InvalidRequest: for a value that an option cannot have.
    """
    options: OwnOptionsDict = {}
    if walltime_s is not None:
        options["walltime_s"] = walltime_s
    if retries is not None:
        options["retries"] = retries
    if retry_on:
        options["retry_on"] = retry_on
    if container:
        options["container"] = container
    if requirements:
        options["requirements"] = requirements
    try:
        TaskOptions.of(**options)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    if retry_on and not retries:
        raise InvalidRequest("--retry-on has no effect without --retries", hint="Add --retries N.")
    return options


def _with_options(called: Any, options: OwnOptionsDict) -> Any:
    """The function; with these options instead of its own, if it is decorated."""
    return called.options(**options) if isinstance(called, Function) and options else called


def _endpoint_name(context: typer.Context, name: str | None, called: object) -> str | None:
    """The endpoint of the command line, else that of a decorated function, else that of the environment."""
    source = context.get_parameter_source("endpoint")
    if isinstance(called, Function) and called.endpoint and (source is None or source.name != "COMMANDLINE"):
        return str(called.endpoint)
    return name


def _check(called: Any, calls: Sequence[Arguments]) -> None:
    """:raises InvalidRequest: if the function does not take the arguments of a call."""
    accepts = accepts_of(called)
    if accepts is None:
        return
    for number, (args, named) in enumerate(calls, start=1):
        try:
            check_arguments(called, accepts, args, named)
        except TypeError as error:
            which = f"input {number}: " if len(calls) > 1 else ""
            raise InvalidRequest(f"{which}{error}", hint="`farcall run --help` shows how to write arguments.") from None


def _endpoint_id(client: Client, name: str | None) -> str:
    with waiting("calling the API"):
        return resolve_endpoint(client, name)


@contextlib.contextmanager
def _executor(
    client: Client, endpoint_id: str, options: OwnOptionsDict, *, as_json: bool
) -> Iterator[tuple[Executor, list[Future]]]:
    """An executor, and the list for its futures. After Ctrl-C or a closed pipe, submitted tasks continue, and Ctrl-C
    shows their ids; a second Ctrl-C cancels them."""
    executor, futures = Executor(endpoint_id, client=client, **options), list[Future]()
    report_delays(executor, _ignore_delay if as_json else show_delay)
    try:
        yield executor, futures
    except KeyboardInterrupt as interruption:
        left = [each for each in futures if not each.done()]
        is_ctrl_c = not isinstance(interruption, Terminated)
        show = functools.partial(_show_unfinished, left, as_json=as_json, is_ctrl_c=is_ctrl_c)
        if interrupted(executor, interruption, show):
            _show_cancelled(left, as_json=as_json)
        else:
            leave(executor)
        raise typer.Exit(exit_status(interruption)) from None
    except BrokenPipeError:
        leave(executor)
        raise
    except BaseException:
        executor.shutdown(cancel_futures=True)
        raise
    else:
        executor.shutdown()


def _show_output(part: OutputPart, *, as_json: bool, label: str = "") -> None:
    """Write what a function has printed to standard error: standard output is for results."""
    show = functools.partial(show_output, part, err=True, label=label, as_json=as_json)
    write_part(show, "" if label or as_json else part.text)


def _ignore_delay(why: Why) -> None:
    """With --json, standard error is for objects; that of TASK_PENDING has the reason."""


def _show_unfinished(futures: Sequence[Future], *, as_json: bool, is_ctrl_c: bool) -> None:
    ids = [future.task_id for future in futures]
    if as_json:
        shown = {"code": "INTERRUPTED", "task_group_id": futures[0].task_group_id if futures else None, "task_ids": ids}
        show_line({"error": shown}, err=True)
        return
    if not ids:
        return
    group_id = futures[0].task_group_id
    more = f" and {len(ids) - _IDS_SHOWN} more" if len(ids) > _IDS_SHOWN else ""
    typer.echo(f"\nStill running: {' '.join(ids[:_IDS_SHOWN])}{more}", err=True)
    later = f"`farcall groups wait {group_id}` waits for them, `farcall groups cancel {group_id}` cancels them"
    typer.echo(f"Press Ctrl-C again to cancel them now. Later: {later}." if is_ctrl_c else f"{later}.", err=True)


def _show_cancelled(futures: Sequence[Future], *, as_json: bool) -> None:
    if futures and not as_json:
        typer.echo(
            "The task was cancelled." if len(futures) == 1 else f"{len(futures)} tasks were cancelled.", err=True
        )


def _show_results(futures: Sequence[Future], timeout_s: float | None, *, as_json: bool) -> int:
    """Write results in order as they arrive; returns how many calls failed."""
    give_up_at = None if timeout_s is None else time.monotonic() + timeout_s
    failed, index, done = 0, 0, list[object]()

    def count(future: object) -> None:
        done.append(future)
        update(len(done))

    with bar("waiting", len(futures)) as update:
        for future in futures:
            future.add_done_callback(count)
        while index < len(futures):
            left_s = None if give_up_at is None else max(0.0, give_up_at - time.monotonic())
            concurrent.futures.wait([futures[index]], left_s)
            if not futures[index].done():
                _end_late([each for each in futures[index:] if not each.done()], timeout_s)
            with above():
                while index < len(futures) and futures[index].done():
                    failed += not _show_result(index, futures[index], as_json=as_json)
                    index += 1
    return failed


def _show_result(index: int, future: Future, *, as_json: bool) -> bool:
    """Write the result or the error of a call; returns whether it succeeded."""
    try:
        value = _result(future)
    except FarcallError as error:
        _show_failure(index, future, error, as_json=as_json)
        return False
    show_line({"index": index, "task_id": future.task_id, "result": value} if as_json else value)
    return True


def _show_failure(index: int, future: Future, error: FarcallError, *, as_json: bool) -> None:
    if as_json:
        show_line({"index": index, "task_id": future.task_id, "error": error.record.to_json()})
        return
    show_line(None)
    record = error.record
    shown = ErrorRecord(record.code, f"input {index + 1}: {record.message}", f"farcall tasks show {future.task_id}")
    show_error(FarcallError(shown.message, record=shown), as_json=False)


def _submitted(
    client: Client, endpoint_id: str, called: Any, calls: Sequence[Arguments], options: OwnOptionsDict
) -> Batch:
    """Submit calls of a function without waiting for results."""
    with waiting("submitting"):
        function_id = client.register_function(called)
        if isinstance(called, Function):
            options = {**options, **called.task_options}  # type: ignore[typeddict-item]
        batch = client.create_batch(**options)
        for args, named in calls:
            batch.add(function_id, args, named)
        client.batch_run(endpoint_id, batch)
    remember_submitted(batch.task_ids, batch.task_group_id)
    return batch


def _end_late(futures: Sequence[Future], timeout_s: float | None) -> None:
    """:raises TaskPending: if there are any that are not done; they are cancelled."""
    late = [future for future in futures if not future.done()]
    if not late:
        return
    reason = ""
    with contextlib.suppress(FarcallError):
        reason = f". {late[0].why()}"
    for future in late:
        future.cancel()
    which = f"task {late[0].task_id}" if len(late) == 1 else f"{len(late)} tasks"
    message = f"{which} did not end within {timeout_s:g} s and {_were(late)} cancelled{reason}"
    raise TaskPending(message.removesuffix("."))


def _were(late: Sequence[Future]) -> str:
    return "was" if len(late) == 1 else "were"


def _result(future: Future) -> Any:
    try:
        return future.result()
    except concurrent.futures.CancelledError:
        raise TaskCancelled(f"task {future.task_id} was cancelled") from None


def _values(inputs: Sequence[str]) -> list[Any]:
    """The inputs of a command line.

    :raises InvalidRequest: if a file cannot be read, or a line of it is not JSON.
    """
    place = inputs[0]
    if len(inputs) > 1 or (place != "-" and not Path(place).is_file()):
        values = [parse_argument(each) for each in inputs]
        if len(inputs) == 1 and values == [place] and _is_like_a_file(place):
            raise InvalidRequest(
                f"there is no file {place}", hint=f"Write '\"{place}\"' if this text is the input itself."
            )
        return values
    try:
        if place == "-":
            return list(_json_lines(sys.stdin, "standard input"))
        with Path(place).open(encoding="utf-8") as file:
            return list(_json_lines(file, place))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{place} cannot be read: {error}") from error


def _is_like_a_file(text: str) -> bool:
    return "/" in text or Path(text).suffix.lower() in _FILE_ENDS


def _json_lines(lines: Iterable[str], place: str) -> Iterator[Any]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield msgspec.json.decode(line)
            except msgspec.DecodeError as error:
                raise InvalidRequest(f"line {number} of {place} is not JSON: {error}") from error


def _as_call(value: Any, *, unpack: bool) -> Arguments:
    if unpack and isinstance(value, list):
        return value, {}
    if unpack and isinstance(value, dict):
        return [], value
    return [value], {}
