"""Output of a graph: the ends of what its calls printed, one after the other, as one stream each."""

from __future__ import annotations

from typing import NamedTuple

from farcall_endpoint.contracts.output import Printed, Stream


class _Ended(NamedTuple):
    task_id: str
    title: str
    printed: Printed
    tails: bytes


class OutputTails:
    """Output of calls in the order of their ends. Only the last bytes of each stream are kept.

    One call may be *open*: it runs, and its output, read from its worker, is the end of the streams. Output of calls
    that end meanwhile follows the open call's output, so that every offset keeps its meaning.

    :param most_bytes: maximum bytes of each stream; 0: no output.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.open = ""  # id of that call
        self._kept = (bytearray(), bytearray())
        self._ends = [0, 0]
        self._later: list[_Ended] = []
        self._later_bytes = 0

    @property
    def ends(self) -> tuple[int, int]:
        """The offsets behind the last bytes, where the output of the open call begins."""
        return self._ends[0], self._ends[1]

    def begin(self, task_id: str, title: str) -> None:
        """Open a call, if none is."""
        if not self.open:
            self.open = task_id
            for number in range(2):
                self._append(number, self._lead(number, title))

    def end(self, task_id: str, title: str, printed: Printed | None, tails: bytes = b"") -> None:
        """A call has ended, was dropped, or its worker has died. It printed something, or nothing is known of it;
        ``title`` says which call it is."""
        if not self.most_bytes:
            return
        if task_id == self.open:
            self.open = ""
            if printed is not None:
                self._add(0, b"", tails[: printed.stdout_tail], printed.stdout_end)
                self._add(1, b"", tails[printed.stdout_tail : printed.tail_bytes], printed.stderr_end)
            later, self._later, self._later_bytes = self._later, [], 0
            for each in later:
                self.end(*each)
        elif printed is None:
            return
        elif self.open:
            self._later.append(_Ended(task_id, title, printed, tails))
            self._later_bytes += len(tails)
            while self._later_bytes > 2 * self.most_bytes and len(self._later) > 1:
                self._later_bytes -= len(self._later.pop(0).tails)
        else:
            for number, tail, end in (
                (0, tails[: printed.stdout_tail], printed.stdout_end),
                (1, tails[printed.stdout_tail : printed.tail_bytes], printed.stderr_end),
            ):
                if tail:
                    self._add(number, self._lead(number, title), tail, end)

    def streams(self, stdout_from: int = 0, stderr_from: int = 0, *, most_bytes: int = 2**62) -> tuple[Stream, Stream]:
        """Both streams without the open call, from these offsets on as far as they are kept."""
        first, second = (
            self._stream(number, start, most_bytes) for number, start in enumerate((stdout_from, stderr_from))
        )
        return first, second

    def printed(self) -> tuple[Printed, bytes] | None:
        """The same at the end of the graph; None if there is none."""
        if self.open:
            self.end(self.open, "", None)
        stdout, stderr = map(bytes, self._kept)
        if not stdout and not stderr:
            return None
        return Printed(len(stdout), len(stderr), *self._ends), stdout + stderr

    def _lead(self, number: int, title: str) -> bytes:
        kept = self._kept[number]
        line_end = b"" if not kept or kept.endswith(b"\n") else b"\n"
        return line_end + f"--- {title}\n".encode()

    def _add(self, number: int, lead: bytes, tail: bytes, end: int) -> None:
        if end > len(tail):  # its first bytes are gone, and so is what came before them
            self._kept[number].clear()
            self._ends[number] += end - len(tail)
        self._append(number, lead + tail)

    def _append(self, number: int, data: bytes) -> None:
        self._kept[number].extend(data)
        self._ends[number] += len(data)
        del self._kept[number][: -self.most_bytes]

    def _stream(self, number: int, start: int, most_bytes: int) -> Stream:
        kept, end = self._kept[number], self._ends[number]
        start = min(max(start, end - len(kept)), end)
        at = start - (end - len(kept))
        return Stream(start, bytes(kept[at : at + most_bytes]))


def joined(known: Stream, live: Stream, base: int, *, most_bytes: int) -> Stream:
    """Bytes of a stream, and behind them those of the open call, which begin at the offset ``base``."""
    if not live.data:
        return known
    if known.data and (live.start or known.end != base):
        return known
    if not known.data:
        return Stream(base + live.start, live.data)
    return Stream(known.start, (known.data + live.data)[:most_bytes])
