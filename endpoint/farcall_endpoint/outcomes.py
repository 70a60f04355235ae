"""The ends of a task that are not its function's doing: one place for their codes, texts and hints."""

from __future__ import annotations

import dataclasses

from farcall_common.errors import ErrorRecord, Fault, NodesUnavailable, ResultTooLarge
from farcall_common.limits import MAX_PAYLOAD_BYTES


def cancelled(*, running: bool) -> ErrorRecord:
    """The caller cancelled the task."""
    when = "while it ran; its processes were ended" if running else "before it ran"
    return ErrorRecord("TASK_CANCELLED", f"The task was cancelled {when}.", fault=Fault.CALLER)


def walltime_exceeded(walltime_s: float, *, stdout_tail: str = "", stderr_tail: str = "") -> ErrorRecord:
    """The task ran into its limit."""
    return ErrorRecord(
        "WALLTIME_EXCEEDED",
        f"The task ran longer than its limit of {walltime_s:g} s and was stopped.",
        hint="Give it a higher walltime_s, or less to do.",
        fault=Fault.USER_CODE,
        stdout_tail=stdout_tail or None,
        stderr_tail=stderr_tail or None,
    )


def walltime_too_long(walltime_s: float, *, block_s: float) -> ErrorRecord:
    """The task wants more time than any block of this endpoint has."""
    return ErrorRecord(
        "LIMIT_INVALID",
        f"The task asks for {walltime_s:g} s, and a block of this endpoint lives {block_s:g} s: it could never end.",
        hint="Give it a lower walltime_s, or ask for an endpoint with longer blocks.",
        fault=Fault.CALLER,
    )


def nodes_unavailable(reason: str) -> ErrorRecord:
    """The endpoint's scheduler gives it no nodes."""
    hint = "The endpoint's owner should look at account, queue and worker_init; it tries again after a while."
    return NodesUnavailable(f"The endpoint gets no nodes to run tasks on: {reason}", hint=hint).record


def limit_exceeded(
    *, memory_bytes: int, memory_limit_bytes: int | None, output_bytes: int, output_limit_bytes: int | None
) -> ErrorRecord | None:
    """The task used more than it may; None if it did not. A limit of None is none."""
    if memory_limit_bytes is not None and memory_bytes > memory_limit_bytes:
        return ErrorRecord(
            "MEMORY_EXCEEDED",
            f"The task and its processes used {memory_bytes / 2**20:.0f} MiB of memory, more than their limit of "
            f"{memory_limit_bytes / 2**20:.0f} MiB.",
            hint="Give it a higher limit, or less to do at a time.",
            fault=Fault.USER_CODE,
        )
    if output_limit_bytes is not None and output_bytes > output_limit_bytes:
        return ErrorRecord(
            "OUTPUT_EXCEEDED",
            f"The task printed {output_bytes} bytes, more than its limit of {output_limit_bytes}.",
            hint="Write to a file what is meant to be kept, and print less.",
            fault=Fault.USER_CODE,
        )
    return None


def limit_invalid(name: str, value: object) -> ErrorRecord:
    """The task asks for a limit that is none."""
    return ErrorRecord(
        "LIMIT_INVALID",
        f"The resource specification gives {name} as {value!r}.",
        hint="It is a whole number above 0.",
        fault=Fault.CALLER,
    )


def working_directory_unavailable(error: OSError) -> ErrorRecord:
    """The task's working directory is gone and cannot be made."""
    return ErrorRecord(
        "WORKING_DIRECTORY_UNAVAILABLE",
        f"The working directory of the task cannot be made: {error}.",
        hint="Ask the endpoint's owner to look at engine.working_dir: its file system may be full or read only.",
        fault=Fault.US,
        retryable=True,
    )


def worker_died(
    reason: str, *, starts: int, reasons: tuple[str, ...] = (), stdout_tail: str = "", stderr_tail: str = ""
) -> ErrorRecord:
    """The task took its worker process down in each of its ``starts``, for these ``reasons``."""
    times = "" if starts == 1 else f", {starts} times in a row"
    return ErrorRecord(
        "WORKER_DIED",
        f"The worker process died while it ran the task{times}: {reason}.",
        hint="Look for os._exit, a crash in compiled code, or more memory used than there is.",
        fault=Fault.USER_CODE,
        stdout_tail=stdout_tail or None,
        stderr_tail=stderr_tail or None,
        reasons=reasons or None,
    )


def lost(reason: str) -> ErrorRecord:
    """Nobody knows whether the task ran, and it may not run twice."""
    return ErrorRecord(
        "TASK_LOST",
        f"The task may have run, and its end was not seen: {reason}.",
        hint="It was submitted with idempotent=False, so it is not started again; check what it did, then resubmit.",
        fault=Fault.US,
    )


def function_missing(function_hash: str) -> ErrorRecord:
    """A task came without its function."""
    return ErrorRecord(
        "FUNCTION_UNKNOWN",
        f"The body of function {function_hash[:12]} did not reach the endpoint intact.",
        hint="Submit the task again; report it if it happens twice.",
        fault=Fault.US,
    )


def containers_unsupported(container_id: str) -> ErrorRecord:
    """A task wants a container, and is never run outside of one instead."""
    return ErrorRecord(
        "CONTAINER_UNSUPPORTED",
        f"This endpoint cannot run containers, and the task asks for container {container_id}.",
        hint="Submit the function without a container, or choose another endpoint.",
        fault=Fault.CALLER,
    )


def payload_unavailable(reason: str) -> ErrorRecord:
    """The arguments could not be fetched from the blob store."""
    return ErrorRecord(
        "PAYLOAD_DOWNLOAD_FAILED",
        f"The arguments could not be downloaded: {reason}.",
        hint="Check that the endpoint reaches the blob store, then submit the task again.",
        fault=Fault.NETWORK,
    )


def result_not_uploaded(reason: str, *, size_bytes: int) -> ErrorRecord:
    """The result could not be put into the blob store."""
    return ErrorRecord(
        "RESULT_UPLOAD_FAILED",
        f"The function returned, but its result of {size_bytes} bytes could not be uploaded: {reason}.",
        hint="Check that the endpoint reaches the blob store, then submit the task again.",
        fault=Fault.NETWORK,
    )


def result_too_large(size_bytes: int) -> ErrorRecord:
    """The function returned more than may travel."""
    return ResultTooLarge(f"The result has {size_bytes} bytes, more than the limit of {MAX_PAYLOAD_BYTES}.").record


def result_not_serializable(record: ErrorRecord) -> ErrorRecord:
    """The function returned something that cannot travel; ``record`` says why."""
    return dataclasses.replace(
        record,
        code="RESULT_NOT_SERIALIZABLE",
        message=f"The function returned, but its result cannot be sent: {record.message}",
        hint="Return plain data, and keep open files, connections and locks inside the function.",
        fault=Fault.USER_CODE,
    )
