"""Error codes of tasks that fail for another reason than an exception of their function: code, fault, message, hint."""

from __future__ import annotations

import dataclasses

from farcall_common.errors import (
    EndpointRequiresSealed,
    ErrorRecord,
    Fault,
    FunctionNotPermitted,
    FunctionNotSigned,
    NodesUnavailable,
    ResultTooLarge,
    SealedCallRefused,
    did_you_mean,
)
from farcall_common.limits import MAX_PAYLOAD_BYTES
from farcall_common.task_options import SPECIFIED

_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A row of the table. A call formats the message with its arguments, and returns the record of one task."""

    code: str
    fault: Fault
    message: str
    hint: str = ""
    retryable: bool = False

    def __call__(self, *values: object, **named: object) -> ErrorRecord:
        """The record of a task that ended this way."""
        return ErrorRecord(self.code, self.message.format(*values, **named), self.hint, self.fault, self.retryable)


cancelled_before_start = Outcome("TASK_CANCELLED", Fault.CALLER, "The task was cancelled before it ran.")
cancelled_before_retry = Outcome(
    "TASK_CANCELLED", Fault.CALLER, "The task was cancelled while it waited to be retried."
)
cancelled_while_running = Outcome(
    "TASK_CANCELLED", Fault.CALLER, "The task was cancelled while it ran; its processes were killed."
)
cancelled_while_storing = Outcome(
    "TASK_CANCELLED", Fault.CALLER, "The task was cancelled after it ran, while its files were stored."
)
containers_unsupported = Outcome(
    "CONTAINER_UNSUPPORTED",
    Fault.CALLER,
    "This endpoint cannot run containers, and the task requests container {}.",
    "Submit the function without a container, or choose another endpoint.",
)
technology_unsupported = Outcome(
    "CONTAINER_UNSUPPORTED",
    Fault.CALLER,
    "This node of the endpoint cannot run {} environments: {}",
    "Submit the function with an environment of another type, choose another endpoint, or ask the endpoint's owner.",
)
location_refused = Outcome(
    "CONTAINER_UNSUPPORTED",
    Fault.CALLER,
    "Tasks of other users than the endpoint's owner may not use the environment {}: {}.",
    "Choose an image from a registry or a directory that everybody may read, or ask the endpoint's owner to add it to "
    "the allowed locations.",
)
environment_failed = Outcome(
    "ENVIRONMENT_FAILED",
    Fault.PEER,
    "The environment {} cannot be started on a node of the endpoint: {}",
    "Check the location; the endpoint's owner finds the whole output in the logs of the endpoint.",
)
environment_start_failed = Outcome(
    "ENVIRONMENT_FAILED",
    Fault.PEER,
    "No worker could be started in environment {}: {}",
    "Correct the environment, or ask the endpoint's owner; it is tried again after a while.",
)
environment_without_python = Outcome(
    "ENVIRONMENT_WITHOUT_PYTHON",
    Fault.CALLER,
    "The environment {} has no Python that a worker can use: {}.",
    "Install CPython 3.11 or later, with its standard library, in the image; nothing else of Farcall's is needed.",
)
requirements_failed = Outcome(
    "REQUIREMENTS_FAILED",
    Fault.CALLER,
    "The packages of {} cannot be installed on the endpoint: {}",
    "Check names and versions: there must be wheels for the endpoint's Python and platform.",
)
environment_unsupported = Outcome(
    "CONTAINER_UNSUPPORTED",
    Fault.CALLER,
    "No node of this endpoint can run environment {}: {}.",
    "Choose another endpoint, or an environment of another technology.",
)
environment_invalid = Outcome(
    "CONTAINER_UNSUPPORTED",
    Fault.CALLER,
    "There can be no such environment: {}.",
    "Register it as it should be, and submit the task again.",
)
environment_not_permitted = Outcome(
    FunctionNotPermitted.code,
    Fault.CALLER,
    "This endpoint runs certain functions only, and in no environment that the task names: {}.",
    "Submit the function without a container. The endpoint's owner may set one for all tasks.",
)
function_missing = Outcome(
    "FUNCTION_UNKNOWN",
    Fault.US,
    "The body of function {:.12} did not reach the endpoint intact.",
    "Submit the task again; report it if it happens twice.",
)
function_not_permitted = Outcome(
    FunctionNotPermitted.code,
    Fault.CALLER,
    "The configuration of this endpoint does not list function {} (SHA-256 {}).",
    "Ask the endpoint's owner to add it to allowed_functions.",
)
callee_not_permitted = Outcome(
    FunctionNotPermitted.code,
    Fault.CALLER,
    "This endpoint runs certain functions only, and the task calls one that it has not named when it was submitted.",
    "Name it: executor.options(callees=[function]).",
)
callee_elsewhere = Outcome(
    "CONTAINER_UNSUPPORTED",
    Fault.CALLER,
    "The function that the task calls has another environment than the task, and a call runs where its caller does.",
    "Submit the task with one container or environment for both, or make the call a stage of a graph.",
)
nested_too_deeply = Outcome(
    "CALLS_TOO_DEEP",
    Fault.USER_CODE,
    "The call is more than {} calls below its task: each of them waits for the next, and holds a process.",
    "Let fewer calls wait for calls: return what is to be called next, or submit a graph.",
)
function_not_signed = Outcome(
    FunctionNotSigned.code,
    FunctionNotSigned.fault,
    "This endpoint runs signed functions only. {}",
    FunctionNotSigned.default_hint,
)
sealed_required = Outcome(
    EndpointRequiresSealed.code,
    Fault.CALLER,
    "This endpoint runs sealed calls only, and the call is not sealed.",
    EndpointRequiresSealed.default_hint,
)
sealed_not_opened = Outcome(
    SealedCallRefused.code,
    Fault.CALLER,
    "The endpoint does not open the sealed call: {}",
    SealedCallRefused.default_hint,
)
graph_invalid = Outcome(
    "GRAPH_INVALID",
    Fault.CALLER,
    "{}",
    "Build the graph with a farcall version that this endpoint supports, and submit it again.",
)
graph_apart = Outcome(
    "CONTAINER_UNSUPPORTED",
    Fault.CALLER,
    "The nodes of this endpoint cannot run all stages of the graph: {}",
    "Choose environments that its nodes can run, or submit the stages as tasks of their own.",
)
isolation_missing = Outcome(
    "ISOLATION_MISSING",
    Fault.PEER,
    "This node of the endpoint cannot confine tasks of other users than its owner ({}).",
    "Ask the owner to run the endpoint as an ordinary user, on nodes with bubblewrap, or with Linux 6.12 or later and "
    "Landlock. An ordinary user's endpoint can also accept `isolation: process`, which does not protect files.",
)
limit_invalid = Outcome(
    "LIMIT_INVALID",
    Fault.CALLER,
    "The resource specification gives {} as {!r}.",
    "It must be a whole number above 0.",
)
_resource_unknown = Outcome(
    "LIMIT_INVALID",
    Fault.CALLER,
    "The resource specification asks for {!r}, which this endpoint does not know.",
    f"Expected: {', '.join(SPECIFIED)}. For GPUs and other accelerators, submit to an endpoint that has them.",
)


def resource_unknown(name: str) -> ErrorRecord:
    """The resource specification has a name that is no option."""
    record, alike = _resource_unknown(name), did_you_mean(name, SPECIFIED)
    return dataclasses.replace(record, hint=f"{alike} {record.hint}") if alike else record


walltime_too_long = Outcome(
    "LIMIT_INVALID",
    Fault.CALLER,
    "The task requests {:g} s, and a block of this endpoint lives {block_s:g} s: it could never finish.",
    "Give it a lower walltime_s, or ask for an endpoint with longer blocks.",
)
walltime_exceeded = Outcome(
    "WALLTIME_EXCEEDED",
    Fault.USER_CODE,
    "The task ran longer than its limit of {:g} s and was stopped.",
    "Give it a higher walltime_s, or less to do.",
)
_memory_exceeded = Outcome(
    "MEMORY_EXCEEDED",
    Fault.USER_CODE,
    "The task and its processes used {:.0f} MiB of memory, more than their limit of {:.0f} MiB.",
    "Give it a higher limit, or less to do at a time.",
)
start_memory_exceeded = Outcome(
    "MEMORY_EXCEEDED",
    Fault.USER_CODE,
    "The start of a worker in the task's environment used {:.0f} MiB of memory, more than the {:.0f} MiB that it may.",
    "Name fewer packages, or ask the endpoint's owner for a higher limit (engine.limits.memory).",
)
_output_exceeded = Outcome(
    "OUTPUT_EXCEEDED",
    Fault.USER_CODE,
    "The task printed {} bytes, more than its limit of {}.",
    "Print less; write output to keep to a file.",
)
processes_exceeded = Outcome(
    "PROCESSES_EXCEEDED",
    Fault.USER_CODE,
    "The task's worker had more processes and threads than the {} that this endpoint permits to other submitters.",
    "Start fewer at a time, or ask the endpoint's owner for a higher limit (engine.limits.processes).",
)
_worker_died = Outcome(
    "WORKER_DIED",
    Fault.USER_CODE,
    "The worker process died while it ran the task{}: {}.",
    "Look for os._exit, a crash in compiled code, or more memory used than there is.",
)
lost = Outcome(
    "TASK_LOST",
    Fault.US,
    "The task may have run, and its result was not received: {}.",
    "It was submitted with idempotent=False, so it is not started again; check what it did, then resubmit.",
)
working_directory_unavailable = Outcome(
    "WORKING_DIRECTORY_UNAVAILABLE",
    Fault.US,
    "Cannot create the working directory of the task: {}.",
    "Ask the endpoint's owner to check engine.working_dir: its file system may be full or read-only.",
    retryable=True,
)
nodes_unavailable = Outcome(
    NodesUnavailable.code,
    NodesUnavailable.fault,
    "The endpoint gets no nodes to run tasks on: {}",
    "The endpoint's owner should check account, queue and worker_init; it tries again after a while.",
    retryable=NodesUnavailable.retryable,
)
payload_unavailable = Outcome(
    "PAYLOAD_DOWNLOAD_FAILED",
    Fault.NETWORK,
    "The arguments could not be downloaded: {}.",
    "Check that the endpoint reaches the blob store, then submit the task again.",
)
result_not_uploaded = Outcome(
    "RESULT_UPLOAD_FAILED",
    Fault.NETWORK,
    "The function returned, but its result of {size_bytes} bytes could not be uploaded: {}.",
    "Check that the endpoint reaches the blob store, then submit the task again.",
)
result_too_large = Outcome(
    ResultTooLarge.code,
    ResultTooLarge.fault,
    f"The result has {{}} bytes, more than the limit of {MAX_PAYLOAD_BYTES}.",
    ResultTooLarge.default_hint,
)
record_too_large = Outcome(
    ResultTooLarge.code,
    ResultTooLarge.fault,
    "The error or the details of the result have {} bytes, more than a message has room for.",
    "Raise exceptions with shorter texts, and name fewer files.",
)
too_few_inputs = Outcome(
    "TOO_FEW_INPUTS",
    Fault.CALLER,
    "The stage needs {} inputs, and has {}.",
    "Let it need fewer (needs), or more elements be made before it.",
)
too_many_calls = Outcome(
    "GRAPH_TOO_LARGE",
    Fault.CALLER,
    "The maps of the graph make more than {:,} calls.",
    "Let each call do more, or submit several graphs.",
)
too_many_reads = Outcome(
    "GRAPH_TOO_LARGE",
    Fault.CALLER,
    "The calls of the graph read more than {:,} values, all together.",
    "Give a call one value instead of a list of many, or submit several graphs.",
)
value_too_large = Outcome(
    "VALUE_TOO_LARGE",
    Fault.USER_CODE,
    "The function returned a value of {} bytes for other calls, and the endpoint has room for {}.",
    "Return less, or write large data to a file that the next function reads.",
)
_result_not_serializable = Outcome(
    "RESULT_NOT_SERIALIZABLE",
    Fault.USER_CODE,
    "The function returned, but its result cannot be sent: {}",
    "Return plain data, and keep open files and connections inside the function.",
)
arguments_too_large = Outcome(
    "VALUE_TOO_LARGE",
    Fault.USER_CODE,
    "The call has arguments of {} bytes, and the node has no room for them beside those of calls that have not ended.",
    "Pass less, or write large data to a file that the function reads; let fewer calls wait at a time.",
)
file_not_found = Outcome(
    "FILE_NOT_FOUND",
    Fault.CALLER,
    "The file {} does not exist.",
    "Check the URL; a file of the endpoint itself is file:///path. "
    "One that the task writes is passed as out=File(...), or is File(url, 'w').",
)
object_gone = Outcome(
    "OBJECT_GONE",
    Fault.CALLER,
    "The object {} is gone from the endpoint that had it.",
    "It was evicted, not used for as long as it lives, or its endpoint was restarted. Put it again, with another "
    "lifetime, or in a shared directory there.",
)
bucket_not_found = Outcome(
    "FILE_NOT_FOUND",
    Fault.CALLER,
    "The file {} cannot be stored: there is no such bucket or container.",
    "Check the URL, or create the bucket; the region or endpoint of the storage may be wrong, too (files.storages).",
)
file_denied = Outcome(
    "FILE_DENIED",
    Fault.CALLER,
    "The endpoint may not use the file {}: {}.",
    "Ask the owner of the file for access, or the endpoint's owner to open the storage to you (files.storages).",
)
file_no_credentials = Outcome(
    "FILE_DENIED",
    Fault.CALLER,
    "The endpoint has no valid credentials for the storage of {}: {}.",
    "Ask the endpoint's owner to set them: in the environment of the endpoint, or in files.storages; "
    "a public storage needs the option skip_signature there.",
)
local_file_denied = Outcome(
    "FILE_DENIED",
    Fault.CALLER,
    "The task may not use {}: {}.",
    "It is a path of the endpoint, used with the rights of the task: check it, and its permissions there.",
)
file_place_taken = Outcome(
    "FILE_DENIED",
    Fault.CALLER,
    "The task does not get {}: its place {} is not as the endpoint makes it ({}). Links there are not followed.",
    "A task of the same submitter has made a link, a file or a closed directory there: remove it, and submit again.",
)
file_changed = Outcome(
    "FILE_CHANGED",
    Fault.CALLER,
    "The file {} changed while it was copied.",
    "Submit the task again when nothing writes the file.",
)
file_size = Outcome(
    "FILE_CHANGED",
    Fault.CALLER,
    "The file {} has {:,} bytes, and the task expects {:,}.",
    "Submit the task with the size that the file has, or without size_bytes.",
)
file_checksum = Outcome(
    "FILE_CHECKSUM",
    Fault.CALLER,
    "The file {} does not have the SHA-256 {}, but {}.",
    "Check which one is right: the file may have changed, or have been damaged on its way.",
)
file_not_written = Outcome(
    "FILE_NOT_WRITTEN",
    Fault.USER_CODE,
    "The function returned, but has not written the file for {}: there is no regular file at {}.",
    "Open the File that the function gets: open(file, 'w'). A link or a directory is not stored.",
)
file_unreachable = Outcome(
    "FILE_UNREACHABLE",
    Fault.NETWORK,
    "The endpoint does not reach the storage of {}: {}.",
    "Submit the task again later. If it stays, check the host in the URL; "
    "the endpoint's owner may have to set a proxy, or the address of the storage (files.storages).",
    retryable=True,
)
file_endpoint_offline = Outcome(
    "FILE_ENDPOINT_OFFLINE",
    Fault.PEER,
    "The endpoint that has the file is not connected: {}.",
    "Submit the task again when that endpoint is online; its owner starts it with farcall-endpoint start.",
    retryable=True,
)
file_unsupported = Outcome(
    "FILE_UNSUPPORTED",
    Fault.CALLER,
    "This endpoint cannot copy the file {}: {}.",
    "Choose another endpoint, or put the file where this one can read it.",
)
files_too_large = Outcome(
    "FILES_TOO_LARGE",
    Fault.CALLER,
    "The files of the task need {:,} bytes, and the endpoint has room for {:,}.",
    "Give the task fewer or smaller files, or let the function read the parts that it needs.",
)
files_no_room = Outcome(
    "FILES_NO_ROOM",
    Fault.PEER,
    "The endpoint cannot take the files of the task: {}.",
    "Submit the task again later, or give it fewer files; "
    "the endpoint's owner should look at files.cache and the disk.",
    retryable=True,
)
file_timeout = Outcome(
    "FILE_TIMEOUT",
    Fault.NETWORK,
    "The file {} was not copied within the limit of {:g} s.",
    "Submit the task again later, or ask the endpoint's owner for a higher limit (files.transfer_limit).",
)
files_invalid = Outcome(
    "FILES_INVALID",
    Fault.CALLER,
    "The list of the task's files is invalid: {}",
    "Submit the task with a release of Farcall that this endpoint knows.",
)
arguments_not_stored = Outcome(
    "VALUE_NOT_STORED",
    Fault.US,
    "The arguments of {} bytes could not be stored on the node: {}.",
    "Ask the endpoint's owner to check the memory of the node and `ulimit -f`, or send less.",
    retryable=True,
)
result_not_stored = Outcome(
    "VALUE_NOT_STORED",
    Fault.US,
    "The function returned a value of {} bytes, which could not be stored on the node: {}.",
    "Ask the endpoint's owner to check the memory of the node and `ulimit -f`, or return less.",
    retryable=True,
)
value_not_stored = Outcome(
    "VALUE_NOT_STORED",
    Fault.US,
    "The function returned a value of {} bytes for other calls, which could not be stored on the node: {}.",
    "Ask the endpoint's owner to check memory and disk of the node, or return less.",
    retryable=True,
)


def cancelled(*, running: bool) -> ErrorRecord:
    """The caller cancelled the task."""
    return cancelled_while_running() if running else cancelled_before_start()


def limit_exceeded(
    *, memory_bytes: int, memory_limit_bytes: int | None, output_bytes: int, output_limit_bytes: int | None
) -> ErrorRecord | None:
    """The record of a task that exceeded one of its limits, or None. A limit of None is no limit."""
    if memory_limit_bytes is not None and memory_bytes > memory_limit_bytes:
        return _memory_exceeded(memory_bytes / _MIB, memory_limit_bytes / _MIB)
    if output_limit_bytes is not None and output_bytes > output_limit_bytes:
        return _output_exceeded(output_bytes, output_limit_bytes)
    return None


def worker_died(
    reason: str, *, starts: int, reasons: tuple[str, ...] = (), stdout_tail: str = "", stderr_tail: str = ""
) -> ErrorRecord:
    """The task killed its worker process in each of its ``starts``, for these ``reasons``."""
    return dataclasses.replace(
        _worker_died("" if starts == 1 else f", {starts} times in a row", reason),
        stdout_tail=stdout_tail or None,
        stderr_tail=stderr_tail or None,
        reasons=reasons or None,
    )


def result_not_serializable(record: ErrorRecord) -> ErrorRecord:
    """The function returned a value that cannot be sent; ``record`` says why."""
    changed = _result_not_serializable(record.message)
    return dataclasses.replace(
        record, code=changed.code, message=changed.message, hint=changed.hint, fault=changed.fault
    )
