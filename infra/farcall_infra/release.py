"""The release of this installation: its version, and a digest of all sources that go into a deployment.

A clone has the version of the last release plus local changes, so a version alone does not distinguish two deployments.
The digest leaves out settings and prices, and code that only reads deployments. It is the same in a clone and in the
wheels that were built from it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from farcall_infra.bundles import FORWARDER, LAMBDAS, package_directory, package_files

#: The output of every stack that holds the release it was deployed with.
RELEASE_OUTPUT: Final = "Release"

_DIGITS: Final = 12
_APP: Final = "farcall_infra"


@functools.cache
def this_release() -> str:
    """For example ``0.1.0+0123456789ab``. Two installations of the same release make the same templates and bundles."""
    packages = {_APP, *LAMBDAS.packages, *FORWARDER.packages}
    digest = sources_digest({package: package_directory(package) for package in packages})
    return f"{importlib.metadata.version('farcall-infra')}+{digest[:_DIGITS]}"


def sources_digest(packages: Mapping[str, Path]) -> str:
    """A digest of the deployed files of our packages, which are given by name and directory."""
    digest = hashlib.sha256()
    for package, directory in sorted(packages.items()):
        for path in package_files(directory):
            relative = path.relative_to(directory)
            is_settings = package == _APP and (relative.parts[0] == "cloud" or relative.suffix == ".toml")
            if not is_settings:
                digest.update(f"\n{package}/{relative.as_posix()}\n".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()
