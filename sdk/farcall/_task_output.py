"""Output of tasks: what they print, read while they run and afterwards."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from farcall_common.backoff import Backoff
from farcall_common.errors import FarcallError
from farcall_common.mapping import chunks_of
from farcall_common.plain_text import plain

if TYPE_CHECKING:
    from farcall._api import Api
    from farcall._sealing import Sealer

StreamName = Literal["stdout", "stderr"]
STREAMS: Final[tuple[StreamName, ...]] = ("stdout", "stderr")
#: What is read of a task that has printed more: the last bytes of each stream.
_TAIL_BYTES: Final = 16 * 1024
TASKS_PER_REQUEST: Final = 100
#: Running tasks that a watch asks about: each counts against the rate limit.
_OLDEST: Final = 20
_FIRST_POLL_S: Final = 0.5
_LONGEST_POLL_S: Final = 2.0
#: Time after the end of a task in which its endpoint may still give its last output.
_LAST_OUTPUT_S: Final = 10.0

_NO_ANSWER: Final = "NO_ANSWER"
#: What an endpoint keeps can be read when it is back.
ENDPOINT_OFFLINE: Final = "ENDPOINT_OFFLINE"
#: How often an endpoint that has not answered is asked once more.
_REPEATS: Final = 4

_logger = logging.getLogger("farcall")

OnOutput = Callable[["OutputPart"], object]


@dataclasses.dataclass(frozen=True)
class OutputPart:
    """A part of what a task has written to ``stream``.

    ``str()`` of it is its text without the last newline and without control characters, so that
    ``executor.options(on_output=print)`` shows it. ``skipped_bytes`` before it are not kept any more. ``is_restarted``:
    it is the first of another attempt or retry, whose output begins again.
    """

    task_id: str
    stream: StreamName
    text: str
    skipped_bytes: int = 0
    is_restarted: bool = False

    def __str__(self) -> str:
        return plain(f"{self.remarks}{self.text.removesuffix(chr(10))}")

    @property
    def remarks(self) -> str:
        """Lines that explain a gap before the text."""
        restarted = "[the task was started again]\n" if self.is_restarted else ""
        return f"{restarted}[{self.skipped_bytes} bytes are not kept]\n" if self.skipped_bytes else restarted


@dataclasses.dataclass(frozen=True)
class TaskOutput:
    """The last output of a task, at most 16 KiB of each stream.

    ``complete``: the task has ended, and no more will come. ``reason`` is None, or why there is none: NOT_STARTED,
    ENDPOINT_OFFLINE, NOT_KEPT (the task has printed nothing, ended over a day ago, or was submitted with
    ``output_bytes=0``), NO_ANSWER, SEALED (what is recorded is sealed, and its endpoint has nothing),
    NOT_SEALED (the call was sealed, and what the service shows is not: it is left out); there may be more.
    """

    task_id: str
    stdout: str
    stderr: str
    complete: bool
    reason: str | None = None


class OutputCursor:
    """How far the output of a task has been read.

    :param first: where to begin in each stream: a byte, or if negative so many bytes before the end.
    """

    def __init__(self, task_id: str, *, first: int = -_TAIL_BYTES) -> None:
        self.task_id: str = task_id
        self._next: dict[StreamName, int] = dict.fromkeys(STREAMS, first)
        self._attempt = 0
        self._is_restarted = False
        #: Whether the task has ended and all of its output has been read.
        self.complete: bool = False
        #: The state of the task, and why there is no output, by the last answer.
        self.state: str = ""
        self.reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The entry of a request."""
        return {"task_id": self.task_id, **{f"{stream}_from": self._next[stream] for stream in STREAMS}}

    def take(self, answer: Mapping[str, Any]) -> Iterator[OutputPart]:
        """The parts of an answer that are new."""
        reason = answer.get("reason")
        self.state, self.reason = plain(str(answer["status"])), None if reason is None else plain(str(reason))
        attempt = int(answer.get("attempt") or 0)
        # The record counts other attempts than the endpoint, which counts retries, too.
        is_live = answer.get("source") == "endpoint"
        if is_live and self._attempt and attempt != self._attempt:  # it was started again, and its output begins again
            self._attempt, self._next, self._is_restarted = attempt, dict.fromkeys(STREAMS, 0), True
            return
        self.complete = bool(answer.get("complete"))
        for stream in STREAMS:
            piece: Mapping[str, Any] = answer.get(stream) or {}
            text, begins = str(piece.get("text") or ""), int(piece.get("from") or 0)
            if not text and begins > max(0, self._next[stream]):  # asked from elsewhere than this cursor did
                self.complete = False
            if not text or begins < self._next[stream]:  # the service gives it again
                continue
            if is_live:
                self._attempt = attempt
            skipped = begins - self._next[stream] if self._next[stream] >= 0 else 0
            self._next[stream] = int(piece["next"])
            yield OutputPart(self.task_id, stream, text, max(0, skipped), self._is_restarted)
            self._is_restarted = False


class OutputReader:
    """Reads output through the API. May be used from any thread."""

    def __init__(self, api: Api, sealer: Sealer) -> None:
        self._api = api
        self._sealer = sealer

    def read(self, cursors: Sequence[OutputCursor], *, stop: threading.Event | None = None) -> list[OutputPart]:
        """Read new output of up to 100 tasks, up to 64 KiB of each stream.

        :raises FarcallError: if the API does not answer, or a seal cannot be opened.
        """
        answers = self._api.batch_output([cursor.to_json() for cursor in cursors], stop=stop)
        parts: list[OutputPart] = []
        for cursor in cursors:
            if (answer := answers.get(cursor.task_id)) is not None:
                parts += cursor.take(self._sealer.opened_output(cursor.task_id, answer))
        return parts

    def last(self, task_ids: Sequence[str]) -> dict[str, TaskOutput]:
        """The last output of tasks, by id; without those that do not exist. An endpoint that does not answer in time is
        asked again.

        :raises FarcallError: as :meth:`read`.
        """
        found: dict[str, TaskOutput] = {}
        for some in chunks_of(dict.fromkeys(task_ids), TASKS_PER_REQUEST):
            cursors = [OutputCursor(task_id) for task_id in some]
            texts = {(part.task_id, part.stream): part.text for part in self.read(cursors)}
            for _ in range(_REPEATS):
                if unanswered := [cursor for cursor in cursors if cursor.reason == _NO_ANSWER]:
                    texts |= {(part.task_id, part.stream): part.text for part in self.read(unanswered)}
            for cursor in cursors:
                if cursor.state:
                    out, err = (texts.get((cursor.task_id, stream), "") for stream in STREAMS)
                    found[cursor.task_id] = TaskOutput(cursor.task_id, out, err, cursor.complete, cursor.reason)
        return found

    def follow(self, cursor: OutputCursor) -> Iterator[list[OutputPart]]:
        """Yield new output of a task until it has ended; empty lists while it prints nothing.

        :raises FarcallError: as :meth:`read`.
        """
        from farcall_common.wire import TaskState  # here: only commands and scripts that watch one task need it

        polling = Backoff(first_s=_FIRST_POLL_S, most_s=_LONGEST_POLL_S)
        give_up_at: float | None = None
        while True:
            parts = self.read([cursor])
            yield parts
            if give_up_at is None and cursor.state and TaskState(cursor.state).is_terminal:
                give_up_at = time.monotonic() + _LAST_OUTPUT_S
            if cursor.complete or not cursor.state or (give_up_at and time.monotonic() > give_up_at):
                return
            if parts:
                polling.reset()
            time.sleep(polling.next_s())


@dataclasses.dataclass
class _Watched:
    """A task whose output is reported; ``ended_at`` in monotonic seconds."""

    cursor: OutputCursor
    report: OnOutput
    ended_at: float | None = None
    unfinished: dict[StreamName, str] = dataclasses.field(default_factory=dict)


class OutputWatch:
    """Reports the output of tasks to their ``on_output``, in whole lines if they come soon. A thread runs :meth:`run`.

    Asks for the oldest tasks first, as they are the ones that run, and for all that have ended.

    :param clock: monotonic seconds.
    """

    def __init__(self, reader: OutputReader, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader = reader
        self._clock = clock
        self._tasks: OrderedDict[str, _Watched] = OrderedDict()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._abandoned = threading.Event()

    def add(self, task_id: str, report: OnOutput) -> None:
        """Report the output of a task from now on."""
        with self._lock:
            is_first = not self._tasks
            self._tasks[task_id] = _Watched(OutputCursor(task_id, first=0), report)
        if is_first:  # later ones wait for the next request: a burst of calls makes no burst of requests
            self._wake.set()

    def ended(self, task_id: str) -> None:
        """The result of a task has arrived, or it was cancelled."""
        watched = self._tasks.get(task_id)
        if watched is not None:
            watched.ended_at = self._clock()

    def stop(self) -> None:
        """Let :meth:`run` return when the output of the tasks that have ended is complete."""
        self._stopping = True
        self._wake.set()

    def abandon(self) -> None:
        """Let :meth:`run` return soon."""
        self._abandoned.set()
        self._wake.set()

    def run(self) -> None:
        """Report until :meth:`stop`. The body of a thread."""
        polling = Backoff(first_s=_FIRST_POLL_S, most_s=_LONGEST_POLL_S)
        while not self._abandoned.is_set():
            try:
                if self.check():
                    polling.reset()
            except FarcallError as error:
                _logger.debug("the output of tasks cannot be read: %s", error)
            if self._stopping and not any(each.ended_at for each in self._watched()):
                return
            self._wake.wait(polling.next_s() if self._tasks else None)
            self._wake.clear()

    def check(self) -> bool:
        """Ask once, and report. Returns whether there was output.

        :raises FarcallError: if the API does not answer.
        """
        now, watched = self._clock(), self._watched()
        ended = [each for each in watched if each.ended_at is not None]
        running = itertools.islice((each for each in watched if each.ended_at is None), _OLDEST)
        seen = False
        for some in chunks_of([*ended, *running], TASKS_PER_REQUEST):
            try:
                parts = self._reader.read([each.cursor for each in some], stop=self._abandoned)
            finally:
                self._forget(each for each in some if each.ended_at and now - each.ended_at > _LAST_OUTPUT_S)
            seen = seen or bool(parts)
            self._report(some, parts)
            self._forget(each for each in some if each.cursor.complete)
        return seen

    def _report(self, asked: Sequence[_Watched], parts: Sequence[OutputPart]) -> None:
        new = {(part.task_id, part.stream): part for part in parts}
        for each in asked:
            for stream in STREAMS:
                part = new.get((each.cursor.task_id, stream)) or OutputPart(each.cursor.task_id, stream, "")
                held = each.unfinished.pop(stream, "")
                text, end = held + part.text, len(held + part.text)
                if part.text and not held and not each.cursor.complete:  # the rest of a line follows, most likely
                    end = max(text.rfind("\n"), text.rfind("\r")) + 1
                    each.unfinished[stream] = text[end:]
                if end or part.remarks:
                    _call(each.report, dataclasses.replace(part, text=text[:end]))

    def _watched(self) -> list[_Watched]:
        with self._lock:
            return list(self._tasks.values())

    def _forget(self, watched: Iterable[_Watched]) -> None:
        with self._lock:
            for each in watched:
                self._tasks.pop(each.cursor.task_id, None)


def _call(report: OnOutput, part: OutputPart) -> None:
    try:
        report(part)
    except Exception:
        _logger.exception("on_output of task %s raised an exception", part.task_id)
