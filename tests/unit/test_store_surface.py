from __future__ import annotations

import subprocess
import sys

from farcall_common import store
from tests.support import stores as fakes


def test_public_surface_is_sorted_and_complete() -> None:
    for module in (store, fakes):
        assert module.__all__ == sorted(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)


def test_a_request_that_needs_no_blob_does_not_wait_for_boto3() -> None:
    """Nor any process but the migrator for Alembic: imports are most of a cold start."""
    code = "import sys, farcall_common.store as s; s.S3Blobs('b'); print({'boto3', 'alembic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
