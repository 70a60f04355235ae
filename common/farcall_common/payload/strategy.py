"""Strategy: one way to convert values to text and back, with a permanent id of two characters.

Its code is often the user's: here are the messages and hints for exceptions of such code, too.
"""

from __future__ import annotations

import abc
import dataclasses
import textwrap
from collections.abc import Iterable, Sequence
from typing import ClassVar

from farcall_common.errors import SerializationError
from farcall_common.payload.framing import Piece, pack, unpack

_MAX_REASON_CHARACTERS = 300

#: Advice for a value that cannot be sent.
SEND_DATA = "Send plain data, and open files and connections inside the function."


@dataclasses.dataclass(frozen=True)
class Strategy(abc.ABC):
    """One way to write values as UTF-8 text.

    ``prefix`` is the start of its buffers: the id and a newline. Ids are append-only: old buffers stay readable.
    ``runs_code``: whether reading a buffer may run code that its writer chose. ``also_writes``: prefixes of other
    strategies with which :meth:`write` writes some values.
    """

    prefix: ClassVar[bytes]
    for_code: ClassVar[bool]
    runs_code: ClassVar[bool] = True
    also_writes: ClassVar[Sequence[bytes]] = ()

    @property
    def id(self) -> str:
        """The two characters in front of each buffer."""
        return self.prefix[:2].decode()

    @property
    def name(self) -> str:
        """The name in messages, by which users choose it."""
        return type(self).__name__

    def write(self, value: object) -> Sequence[Piece]:
        """The buffer of a value, in pieces.

        :raises Exception: as :meth:`dump`.
        """
        return self.prefix, self.dump(value)

    @abc.abstractmethod
    def dump(self, value: object) -> bytes:
        """The text of a value, without the prefix.

        :raises Exception: anything, if the value cannot be written so: then the next strategy is tried.
        """

    @abc.abstractmethod
    def load(self, text: bytes) -> object:
        """The value of a text of :meth:`dump`, here or in Globus Compute.

        :raises Exception: anything, if the text cannot be read here.
        """


@dataclasses.dataclass(frozen=True)
class Combination(Strategy):
    """Several buffers of the same value; the first that can be read is used."""

    parts: ClassVar[Sequence[Strategy]]

    def dump(self, value: object) -> bytes:
        """Write the value in every way that works.

        :raises SerializationError: if none does.
        """
        buffers: list[bytes] = []
        failures: list[str] = []
        for part in self.parts:
            try:
                buffers.append(part.prefix + part.dump(value))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - a strategy may fail in any way
                failures.append(explain(part, error))
        if not buffers:
            raise SerializationError("; ".join(failures))
        return self.join(buffers)

    def join(self, buffers: Sequence[bytes]) -> bytes:
        """The text of these buffers; :meth:`split` is the inverse."""
        return pack(buffers)

    def split(self, text: bytes) -> Sequence[Piece]:
        """The buffers inside, each with its own id.

        :raises DeserializationError: if the text is damaged.
        """
        return unpack(text)

    def load(self, text: bytes) -> object:
        """Raise an error: the :class:`~farcall_common.payload.Serializer` decides which parts may be read."""
        raise NotImplementedError(f"{type(self).__name__} is read part by part")


def explain(strategy: Strategy, error: BaseException) -> str:
    """One line with the reason why a strategy failed."""
    return explain_all([(strategy, error)])


def explain_all(failures: Iterable[tuple[Strategy, BaseException]]) -> str:
    """One line with the reasons why strategies failed; a reason that several have in common is there once."""
    parts: list[str] = []
    before = ""
    for strategy, error in failures:
        text = textwrap.shorten(message_of(error), _MAX_REASON_CHARACTERS, placeholder=" ...")
        reason = type(error).__name__ + (f": {text}" if text else "")
        parts.append(f"{strategy.name}: {'the same' if reason == before else reason}")
        before = reason
    return "; ".join(parts)


def message_of(error: BaseException) -> str:
    """The exception's text; ``str`` of a user's exception may fail."""
    try:
        return str(error)
    except BaseException as failure:  # noqa: BLE001 - user code may raise anything
        return f"(its text cannot be shown: {type(failure).__name__})"


def hint_for(error: BaseException) -> str:
    """Advice for errors whose usual cause is that the worker's machine is not the caller's; empty for others."""
    text = message_of(error)
    match error:
        case ModuleNotFoundError(name=str(name)):
            package = name.partition(".")[0]
            return (
                f"Install {package} on the endpoint, or in the environment of the task. If it is your own module, send "
                f"it along: call farcall.include({package!r}) before you submit."
            )
        case AttributeError() if "__main__" in text:
            return "A class or function of a script was sent by name; the default strategies send it by value."
        case ImportError():
            return "The endpoint has another version of this package; install the same version."
        case AttributeError() if text.startswith("Can't get attribute"):
            return "The endpoint has another version of this package; install the same version."
        case NameError(name=str(name)):
            return f"If {name} is defined outside the function, import or define it inside, or pass it as an argument."
        case MemoryError():
            return "Request more memory, or send the data in smaller pieces."
        case _:
            return ""
