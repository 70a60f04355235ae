"""Stores in memory, for tests: they pass the same suite as the real ones, and can be made to fail.

``reachable = False`` makes every call raise Unavailable; :meth:`FakeQueue.wipe` forgets everything, as a cache may.
"""

from __future__ import annotations

from farcall_common.store.fakes.blobs import FakeBlobs
from farcall_common.store.fakes.queue import FakeQueue
from farcall_common.store.fakes.records import FakeRecords

__all__ = ["FakeBlobs", "FakeQueue", "FakeRecords"]
