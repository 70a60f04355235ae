"""Fake stores, in memory: they pass the same suite as the real ones, and can be made to fail.

``reachable = False`` makes every call raise Unavailable; :meth:`FakeQueue.wipe` forgets everything, as a cache may.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from farcall_common.store import Stores, Tickets
from tests.support.stores.blobs import FakeBlobs
from tests.support.stores.database import FakeDatabase
from tests.support.stores.queue import FakeQueue

__all__ = ["FakeBlobs", "FakeDatabase", "FakeQueue", "fake_stores"]

TICKET_KEY: Final = "a ticket key that is long enough for HS256"


def fake_stores(
    clock: Callable[[], float] = time.time, *, database: FakeDatabase | None = None, queue: FakeQueue | None = None
) -> Stores:
    """Empty stores; ``clock`` is that of the database and the queue."""
    return Stores(
        **vars((database or FakeDatabase(clock)).records),
        queue=queue or FakeQueue(clock),
        blobs=FakeBlobs(),
        tickets=Tickets(TICKET_KEY),
    )
