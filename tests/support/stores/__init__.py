"""Stores in memory, for tests: they pass the same suite as the real ones, and can be made to fail.

``reachable = False`` makes every call raise Unavailable; :meth:`FakeQueue.wipe` forgets everything, as a cache may.
"""

from __future__ import annotations

from tests.support.stores.blobs import FakeBlobs
from tests.support.stores.queue import FakeQueue
from tests.support.stores.records import FakeRecords

__all__ = ["FakeBlobs", "FakeQueue", "FakeRecords"]
