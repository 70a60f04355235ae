"""Orders: packets of tasks for a worker, with the functions that it does not know yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from farcall_endpoint.manager.actions import Send
from farcall_endpoint.manager.events import Job
from farcall_endpoint.manager.workers import Worker
from farcall_endpoint.worker.channel import Order, Run

_MAX_KNOWN_FUNCTIONS: Final = 256
MAX_PACKET_TASKS: Final = 64
_MAX_PACKET_BYTES: Final = 32 * 1024
"""Tasks are joined into packets up to here; one task may be larger."""
MAX_UNREAD_BYTES: Final = 96 * 1024
"""A worker gets no more tasks while its socket may hold more than this."""
_PACKET_BYTES: Final = 1024
"""Overhead of a packet in a socket's buffer, and so of a task that is sent alone."""


def send(worker: Worker, jobs: Sequence[Job], *, most_tasks: int) -> list[Send]:
    """Give tasks to a worker, in as few packets of at most ``most_tasks`` as possible."""
    sends: list[Send] = []
    worker.jobs.extend(jobs)
    start, size = 0, 0
    for index, job in enumerate(jobs):
        worker.unread_bytes += unread_bytes(job)
        size += len(job.payload)
        if index > start and (index - start >= most_tasks or size > _MAX_PACKET_BYTES):
            sends.append(_packet(worker, jobs[start:index]))
            start, size = index, len(job.payload)
    sends.append(_packet(worker, jobs[start:]))
    return sends


def unread_bytes(job: Job) -> int:
    """Upper limit of a task's bytes in its worker's socket; large bodies travel in shared memory."""
    return _PACKET_BYTES + min(len(job.payload), _MAX_PACKET_BYTES)


def _packet(worker: Worker, jobs: Sequence[Job]) -> Send:
    known = worker.functions
    new = {job.order.function_hash: job.function for job in jobs if job.order.function_hash not in known}
    forget = bool(new) and len(known) + len(new) > _MAX_KNOWN_FUNCTIONS
    if forget:
        known.clear()
        new = {job.order.function_hash: job.function for job in jobs}
    known.update(new)
    orders = tuple(
        [
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
            )
            for job in jobs
            for o in (job.order,)
        ]
    )
    functions = tuple([(function_hash, len(body)) for function_hash, body in new.items()])
    body = (*new.values(), *[job.payload for job in jobs])
    return Send(worker.worker_id, Run(orders, functions, forget), body)
