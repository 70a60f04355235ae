"""``farcall.include``: local modules that travel with functions."""

from __future__ import annotations

from types import ModuleType


def include(*modules: ModuleType | str) -> None:
    """Let small local modules travel with functions: ``farcall.include("mylib")``.

    Each function that is sent from then on has the source text of these modules, and of the local modules that they
    import. ``import mylib`` works in the function wherever it runs, on any minor version of Python; instances of the
    module's classes may be arguments and results. Each function gets the modules that were sent with it, whatever the
    endpoint has, or others sent. A package travels with all of its modules; other files do not.

    The text is read now: include a module again after it was edited, and functions are registered again if it changed.

    :param modules: modules or their names, packages as a whole. They are imported.
    :raises ImportError: if there is no such module.
    :raises SerializationError: if one is an installed package, which belongs on the endpoint, or not pure Python.
    :raises PayloadTooLarge: if all of them take over 1 MiB of text.
    :raises TypeError: for anything but modules and names.
    :raises ValueError: for a part of a package, and for the program itself.
    """
    from farcall_common.payload import include

    include.include(*modules)
