"""Hears the queue's wake-ups, and what other forwarders share. A subscription blocks, so it has a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections.abc import Callable, Sequence
from typing import Final

from farcall_common.errors import Unavailable
from farcall_common.store.model import SharedEnds
from farcall_common.store.ports import Queue

__all__ = ["WakeUpThread"]

_LISTEN_S: Final = 0.2
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 5.0

_logger = logging.getLogger(__name__)


class WakeUpThread:
    """Listens until stopped, again after every cut.

    :param on_woken: called in this thread with the ids of endpoints.
    :param on_shared: called in this thread with ends that other forwarders have recorded.
    :param on_cut: called in this thread when something may pass unheard, and again when it has come to an end.
    :param on_death: called in this thread with an error that should not have been.
    """

    def __init__(
        self,
        queue: Queue,
        forwarder_id: str,
        *,
        on_woken: Callable[[Sequence[str]], None],
        on_shared: Callable[[Sequence[SharedEnds]], None],
        on_cut: Callable[[], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._queue = queue
        self._forwarder_id = forwarder_id
        self._on_woken = on_woken
        self._on_shared = on_shared
        self._on_cut = on_cut
        self._on_death = on_death
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wake-ups", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; waits for it, a fifth of a second at most."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        is_cut = False
        try:
            while not self._stop.is_set():
                try:
                    with contextlib.closing(self._queue.listen(self._forwarder_id)) as wake_ups:
                        pause_s = _FIRST_PAUSE_S
                        if is_cut:
                            self._on_cut()
                            is_cut = False
                        while not self._stop.is_set():
                            if endpoint_ids := wake_ups.get(_LISTEN_S):
                                self._on_woken(endpoint_ids)
                            if shared := wake_ups.take_shared():
                                self._on_shared(shared)
                except Unavailable as error:
                    _logger.warning("no wake-ups, the sweep has to do: %s", error)
                    self._on_cut()
                    is_cut = True
                    self._stop.wait(random.uniform(0, pause_s))  # noqa: S311 -- spreads retries, guards nothing
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except BaseException as error:  # noqa: BLE001 -- a thread that dies takes the process along
            self._on_death(error)
