"""Stores of the cloud: PostgreSQL for the records, Valkey for the queue, S3 (or a directory) for large bytes.

:mod:`~farcall_common.store.ports` has their interfaces, :mod:`~farcall_common.store.model` their values.
:mod:`~farcall_common.store.migrate` upgrades a database; :mod:`~tests.support.stores` has fakes for tests.
"""

from __future__ import annotations

from farcall_common.store.blobs_s3 import S3Blobs
from farcall_common.store.model import (
    AuditEntry,
    BlobRef,
    CancelOutcome,
    Container,
    Endpoint,
    EndpointStatus,
    ForwarderInfo,
    Function,
    FunctionAlias,
    LeasedTask,
    PeerKey,
    PeerKind,
    QueuedTask,
    QueuePosition,
    QueueState,
    SharedResults,
    Task,
    TaskEvent,
    TaskGroup,
    TaskResult,
    TokensTaken,
)
from farcall_common.store.ports import Blobs, Queue, Records, Registry, WakeUps
from farcall_common.store.queue_valkey import ValkeyQueue
from farcall_common.store.settings import DatabaseSettings, Stores, StoreSettings, open_records, open_stores
from farcall_common.store.tickets import Ticket, Tickets
from farcall_common.store.transitions import cancelled_before_dispatch

__all__ = [
    "AuditEntry",
    "BlobRef",
    "Blobs",
    "CancelOutcome",
    "Container",
    "DatabaseSettings",
    "Endpoint",
    "EndpointStatus",
    "ForwarderInfo",
    "Function",
    "FunctionAlias",
    "LeasedTask",
    "PeerKey",
    "PeerKind",
    "Queue",
    "QueuePosition",
    "QueueState",
    "QueuedTask",
    "Records",
    "Registry",
    "S3Blobs",
    "SharedResults",
    "StoreSettings",
    "Stores",
    "Task",
    "TaskEvent",
    "TaskGroup",
    "TaskResult",
    "Ticket",
    "Tickets",
    "TokensTaken",
    "ValkeyQueue",
    "WakeUps",
    "cancelled_before_dispatch",
    "open_records",
    "open_stores",
]
