"""Output of a graph: the ends of what its calls printed, one after the other, as one stream each."""

from __future__ import annotations

from farcall_endpoint.output import Printed, Stream


class OutputTails:
    """Collects the output of calls in the order of their ends, and keeps the last bytes of each stream.

    :param most_bytes: so many of each stream; 0: none.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._kept = (bytearray(), bytearray())
        self._ends = [0, 0]

    def add(self, title: str, printed: Printed, tails: bytes) -> None:
        """What a call printed; ``title`` says which."""
        if self.most_bytes:
            self._add(0, title, tails[: printed.stdout_tail], printed.stdout_end)
            self._add(1, title, tails[printed.stdout_tail : printed.tail_bytes], printed.stderr_end)

    def _add(self, number: int, title: str, tail: bytes, end: int) -> None:
        if not tail:
            return
        kept = self._kept[number]
        line_end = b"" if not kept or kept.endswith(b"\n") else b"\n"
        lead = line_end + f"--- {title}\n".encode()
        missing = end - len(tail)
        if missing:  # those bytes are gone, and so is what came before them
            kept.clear()
        kept += lead + tail
        self._ends[number] += len(lead) + end
        del kept[: -self.most_bytes]

    def streams(self, stdout_from: int = 0, stderr_from: int = 0, *, most_bytes: int = 2**62) -> tuple[Stream, Stream]:
        """Both streams, from these offsets on as far as they are kept."""
        first, second = (
            self._stream(number, start, most_bytes) for number, start in enumerate((stdout_from, stderr_from))
        )
        return first, second

    def _stream(self, number: int, start: int, most_bytes: int) -> Stream:
        kept, end = self._kept[number], self._ends[number]
        start = min(max(start, end - len(kept)), end)
        at = start - (end - len(kept))
        return Stream(start, bytes(kept[at : at + most_bytes]))

    def printed(self) -> tuple[Printed, bytes] | None:
        """The same for a report; None if there is none."""
        stdout, stderr = map(bytes, self._kept)
        if not stdout and not stderr:
            return None
        return Printed(len(stdout), len(stderr), *self._ends), stdout + stderr
