"""The release of this installation: its version, and a digest of all sources that go into a deployment.

A clone has the version of the last release plus local changes, so a version alone does not distinguish two deployments.
The digest leaves out settings, and code that only reads deployments.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from farcall_infra.bundles import FORWARDER, LAMBDAS, WORKSPACE

#: The output of every stack that holds the release it was deployed with.
RELEASE_OUTPUT: Final = "Release"

_DIGITS: Final = 12


@functools.cache
def this_release(workspace: Path = WORKSPACE) -> str:
    """For example ``0.1.0+0123456789ab``. Two installations of the same release make the same templates and bundles."""
    digest = hashlib.sha256()
    for path in sorted(_files(workspace)):
        digest.update(f"\n{path.relative_to(workspace)}\n".encode())
        digest.update(path.read_bytes())
    return f"{importlib.metadata.version('farcall-infra')}+{digest.hexdigest()[:_DIGITS]}"


def _files(workspace: Path) -> Iterator[Path]:
    yield workspace / "uv.lock"  # the versions of everything else
    app = workspace / "infra" / "farcall_infra"
    sources = {workspace / source for bundle in (LAMBDAS, FORWARDER) for source in bundle.sources}
    for root in (*sources, workspace / "infra" / "runtime", app):
        for path in root.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and not path.is_relative_to(app / "cloud"):
                yield path
