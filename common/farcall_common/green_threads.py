"""Programs whose threads are replaced by gevent or eventlet: executors would wait for ever there, and are refused."""

from __future__ import annotations

import sys
from typing import Final

from farcall_common.errors import ConfigurationError

#: Modules that tell what they have replaced, the function that tells it, and the parts of the standard library.
_LIBRARIES: Final = (
    ("gevent.monkey", "is_module_patched", ("threading", "queue", "select")),
    ("eventlet.patcher", "is_monkey_patched", ("thread", "select")),
)


def refuse_green_threads(what: str) -> None:
    """Executors have threads that wait outside of the loop of such a library, which would stand still meanwhile.

    :param what: the class that is made, for the message.
    :raises ConfigurationError: where a library has replaced threads, queues or ``select``.
    """
    for module_name, tells, parts in _LIBRARIES:
        module = sys.modules.get(module_name)
        if module is not None and any(getattr(module, tells)(part) for part in parts):
            name = module_name.partition(".")[0]
            raise ConfigurationError(
                f"{name} has replaced the threads of this program, and an {what} needs real ones.",
                hint=f"Use the {what} in a process without {name}'s patches, such as one that `subprocess` starts.",
            )
