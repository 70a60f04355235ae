"""Orders: packets of tasks for a worker, with the functions that it does not know yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from farcall_common.limits import MAX_PAYLOAD_BYTES
from farcall_endpoint.contracts.manager_worker import CallOrder, Done, Order, Run
from farcall_endpoint.contracts.output import Printed, split, tails
from farcall_endpoint.graphs.values import read
from farcall_endpoint.host.shared_memory import Body, Frame, FrameList, cut
from farcall_endpoint.manager.core.actions import Send
from farcall_endpoint.manager.core.events import Job
from farcall_endpoint.manager.core.workers import Worker

_MAX_KNOWN_FUNCTIONS: Final = 256
MAX_PACKET_TASKS: Final = 64
_MAX_PACKET_BYTES: Final = 32 * 1024
"""Tasks are joined into packets up to here; one task may be larger."""
MAX_UNREAD_BYTES: Final = 96 * 1024
"""A worker gets no more tasks while its socket may hold more than this."""
_PACKET_BYTES: Final = 1024
"""Overhead of a packet in a socket's buffer, and so of a task that is sent alone."""
_READ_PART_BYTES: Final = 16 * 1024
_MAX_READ_BYTES: Final = 16 * 1024 * 1024
"""Parts of a value in shared memory are read into the manager if they are smaller than this, and all together."""


def send(worker: Worker, jobs: Sequence[Job], *, most_tasks: int) -> list[Send]:
    """Give tasks to a worker, in as few packets of at most ``most_tasks`` as possible."""
    sends: list[Send] = []
    worker.jobs.extend(jobs)
    start, size = 0, 0
    for index, job in enumerate(jobs):
        worker.unread_bytes += unread_bytes(job)
        job_bytes = len(job.payload) + job.input_bytes
        size += job_bytes
        if index > start and (index - start >= most_tasks or size > _MAX_PACKET_BYTES):
            sends.append(_packet(worker, jobs[start:index]))
            start, size = index, job_bytes
    sends.append(_packet(worker, jobs[start:]))
    return sends


def unread_bytes(job: Job) -> int:
    """Upper limit of a task's bytes in its worker's socket; large bodies travel in shared memory."""
    return _PACKET_BYTES + min(len(job.payload) + job.input_bytes, _MAX_PACKET_BYTES)


def received(
    call: CallOrder | None, done: Done, body: Body, *, is_owner: bool
) -> tuple[Frame, Sequence[Frame] | None, tuple[Printed, bytes] | None]:
    """Split the body of a worker's message about an ended task. Return the task's result, or the buffers of a call's
    value or exception, and the tails of the output, if there is any.

    :param is_owner: whether the endpoint's owner submitted the task.
    :raises ValueError: if a worker cannot have sent this message; the text says why.
    """
    printed = done.printed
    if printed is not None and not printed.fits(len(body)):
        raise ValueError("an output with lengths that cannot be")
    result_bytes = len(body) - (0 if printed is None else printed.tail_bytes)
    if call is not None:
        parts = _parts_of(call, done, body, result_bytes, is_owner=is_owner)
        return b"", parts, None if printed is None else (printed, tails(body, printed))
    if done.parts or isinstance(body, FrameList):
        raise ValueError("a result in parts")
    if not is_owner and result_bytes > MAX_PAYLOAD_BYTES:  # the worker checks it, too
        raise ValueError(f"a result of {result_bytes} bytes")
    if printed is None:
        return body, None, None
    result, found = split(body, printed)
    return result, None, (printed, found)


def _parts_of(call: CallOrder, done: Done, body: Body, value_bytes: int, *, is_owner: bool) -> Sequence[Frame]:
    is_value = call.is_edge and done.error is None
    if value_bytes > (call.most_bytes if is_value else value_bytes if is_owner else MAX_PAYLOAD_BYTES):
        raise ValueError(f"a value of {value_bytes} bytes")
    sizes = done.parts
    if not is_value:
        if sizes:
            raise ValueError("a result in parts")
        return cut(body, [value_bytes])
    if sum(sizes) != value_bytes or not (call.spread or len(sizes) == 1):
        raise ValueError("a value in parts that cannot be")
    if len(sizes) > 1 and value_bytes <= _MAX_READ_BYTES and value_bytes <= _READ_PART_BYTES * len(sizes):
        # To pass on a descriptor with each of them would take longer.
        body = b"".join([read(frame) for frame in (body.frames if isinstance(body, FrameList) else (body,))])
    return cut(body, sizes)


def _packet(worker: Worker, jobs: Sequence[Job]) -> Send:
    known = worker.functions
    new = {job.order.function_hash: job.function for job in jobs if job.order.function_hash not in known}
    if new:
        new.pop("", None)  # of calls that collect their inputs
    forget = bool(new) and len(known) + len(new) > _MAX_KNOWN_FUNCTIONS
    if forget:
        known.clear()
        new = {job.order.function_hash: job.function for job in jobs if job.order.function_hash}
    known.update(new)
    orders: list[Order] = []
    body: list[Frame] = list(new.values())
    for job in jobs:
        o = job.order
        orders.append(
            Order(
                o.task_id,
                o.attempt,
                o.function_hash,
                len(job.payload),
                o.options,
                o.traceparent,
                o.submitter,
                o.data_only,
                o.retry,
                job.call,
                o.files_dir,
                job.read_dir,
            )
        )
        body.append(job.payload)
        if job.inputs:
            body += job.inputs
    functions = tuple([(function_hash, len(code)) for function_hash, code in new.items()]) if new else ()
    return Send(worker.worker_id, Run(tuple(orders), functions, forget), tuple(body))
