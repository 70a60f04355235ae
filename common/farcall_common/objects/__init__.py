"""Objects by reference: values in a store that tasks and programs share, and small references to them.

A :class:`Reference` travels in place of its value. A worker puts the value in when a function is called with a
reference as an argument. The stores are connectors, with the interface of ProxyStore's, so that each side's can be used
with the other.

This package unpickles what is in a store: it is for clients and workers only. A manager reads files of blocks and loads
nothing else of it.
"""

from typing import TYPE_CHECKING, Any, Final

from farcall_common import later

if TYPE_CHECKING:
    from farcall_common.object_keys import Key
    from farcall_common.objects.connectors import Connector
    from farcall_common.objects.directory import Directory
    from farcall_common.objects.memory import Memory
    from farcall_common.objects.references import Reference
    from farcall_common.objects.s3 import S3
    from farcall_common.objects.store import ContextLifetime, Store
    from farcall_common.objects.valkey import Valkey

__all__ = ["S3", "Connector", "ContextLifetime", "Directory", "Key", "Memory", "Reference", "Store", "Valkey"]

_MODULES: Final = {
    "S3": "farcall_common.objects.s3",
    "Connector": "farcall_common.objects.connectors",
    "ContextLifetime": "farcall_common.objects.store",
    "Directory": "farcall_common.objects.directory",
    "Key": "farcall_common.object_keys",
    "Memory": "farcall_common.objects.memory",
    "Reference": "farcall_common.objects.references",
    "Store": "farcall_common.objects.store",
    "Valkey": "farcall_common.objects.valkey",
}


def __getattr__(name: str) -> Any:
    return later(__name__, _MODULES, name)
