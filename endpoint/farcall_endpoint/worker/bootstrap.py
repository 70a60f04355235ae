"""Bootstrap of a worker in an environment: ``python -I -S bootstrap.py SOCKET [MODULE]``, with the image's own Python.

It lies at the top of the bundle, the directory with the worker's code that is mounted into the image (see
:mod:`farcall_endpoint.environments.prepare.bundle`). Bundle and image do not hide each other's packages: what the
worker and its tasks must share comes from the bundle, other libraries of the worker are its own, and all else is the
image's.

``MODULE`` has a function ``boot(path, find_packages)`` that does the rest: the worker by default, or a template of
workers. It calls ``find_packages`` when it is confined.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Final

WORKER: Final = "farcall_endpoint.worker.__main__"
SHARED: Final = ("cloudpickle", "dill", "farcall_common", "farcall_endpoint", "landlockpy")
"""Packages of which there is one in a process. They read and write what tasks exchange, and find their own functions by
name while they do."""
HIDDEN: Final = ("msgspec", "typing_extensions")
"""Libraries of the worker. Tasks import those of their image, if it has them."""
_OF_SDK: Final = "farcall_common"
"""The package of which an image with the SDK needs more modules than the bundle has."""


class BundleFinder:
    """Finds the packages of the bundle that are shared, whenever they are imported.

    :param library: the directory with the bundle's packages.
    """

    def __init__(self, library: str) -> None:
        self._path = [library]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The place of a module; None if it is none of the bundle's."""
        if name.partition(".")[0] not in SHARED:
            return None
        return PathFinder.find_spec(name, self._path if path is None else path, target)


class Packages:
    """The packages of bundle and image.

    :param library: the directory with the bundle's packages.
    """

    def __init__(self, library: str) -> None:
        self._library = library
        sys.path.insert(0, library)

    def find(self) -> None:
        """Make the image's packages importable, with its ``PYTHONPATH``: what ``-I -S`` left out. Runs code of the
        image, as every start of its Python does."""
        import site

        sys.path.remove(self._library)
        site.ENABLE_USER_SITE = False  # its directory would be the submitter's, not the image's
        site.main()
        places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [os.path.abspath(place) for place in places if place]  # noqa: PTH100
        for name in HIDDEN:
            if PathFinder.find_spec(name) is not None:
                for loaded in [each for each in sys.modules if each.partition(".")[0] == name]:
                    del sys.modules[loaded]
        installed = PathFinder.find_spec(_OF_SDK)
        if installed is not None:
            sys.modules[_OF_SDK].__path__ += installed.submodule_search_locations or ()
        sys.meta_path.insert(0, BundleFinder(self._library))


def main() -> None:
    """Boot the worker of the bundle that this file belongs to."""
    entry = sys.argv[2] if len(sys.argv) > 2 else WORKER
    packages = Packages(os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))  # noqa: PTH100, PTH118, PTH120
    importlib.import_module(entry).boot(sys.argv[1], packages.find)


if __name__ == "__main__":
    main()
