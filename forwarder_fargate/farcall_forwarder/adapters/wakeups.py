"""Wake-up thread: receives the queue's wake-ups and other forwarders' results. Its subscription blocks."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections.abc import Callable, Sequence
from typing import Final

from farcall_common.errors import Unavailable
from farcall_common.store.model import FileMessage, OutputAsk, SharedResults
from farcall_common.store.ports import Queue

_LISTEN_S: Final = 0.2
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 5.0

_logger = logging.getLogger(__name__)


class WakeUpThread:
    """Listens until stopped, and subscribes again after every lost connection.

    :param on_work_available: called in this thread with the ids of endpoints.
    :param on_results: called in this thread with results that other forwarders have recorded.
    :param on_asks: called in this thread with requests for output of tasks.
    :param on_file_messages: called in this thread with requests for files of endpoints, and with answers to them.
    :param on_pubsub_lost: called in this thread when messages may be missed, and again when the connection is back.
    :param on_error: called in this thread with an unexpected error, which ends the thread.
    """

    def __init__(
        self,
        queue: Queue,
        forwarder_id: str,
        *,
        on_work_available: Callable[[Sequence[str]], None],
        on_results: Callable[[Sequence[SharedResults]], None],
        on_asks: Callable[[Sequence[OutputAsk]], None],
        on_file_messages: Callable[[Sequence[FileMessage]], None],
        on_pubsub_lost: Callable[[], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._queue = queue
        self._forwarder_id = forwarder_id
        self._on_woken = on_work_available
        self._on_results = on_results
        self._on_asks = on_asks
        self._on_file_messages = on_file_messages
        self._on_pubsub_lost = on_pubsub_lost
        self._on_error = on_error
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
        is_lost = False
        try:
            while not self._stop.is_set():
                try:
                    with contextlib.closing(self._queue.listen(self._forwarder_id)) as wake_ups:
                        pause_s = _FIRST_PAUSE_S
                        if is_lost:
                            self._on_pubsub_lost()
                            is_lost = False
                        while not self._stop.is_set():
                            if endpoint_ids := wake_ups.get(_LISTEN_S):
                                self._on_woken(endpoint_ids)
                            if shared := wake_ups.take_shared():
                                self._on_results(shared)
                            if asks := wake_ups.take_asks():
                                self._on_asks(asks)
                            if messages := wake_ups.take_file_messages():
                                self._on_file_messages(messages)
                except Unavailable as error:
                    _logger.warning("no wake-ups, sweeps replace them: %s", error)
                    self._on_pubsub_lost()
                    is_lost = True
                    self._stop.wait(random.uniform(0, pause_s))  # noqa: S311 -- spreads retries, guards nothing
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except BaseException as error:  # noqa: BLE001 -- an error of this thread ends the process
            self._on_error(error)
