"""Field types of the shapes: ids, text that every store can hold, pagination cursors, fields that are left out when
empty."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import math
import re
import uuid
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from farcall_common.limits import MAX_FUNCTIONS_PER_SUBMIT

_CANONICAL_UUID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_VERSION: Final = "(@[1-9][0-9]{0,8})?"
_NAME: Final = "[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"
_REFERENCE: Final = f"{_CANONICAL_UUID.pattern}{_VERSION}|{_NAME}"
_Z85: Final = r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}$"

_EPOCH: Final = dt.datetime.fromtimestamp(0, dt.UTC)
_MICROSECOND: Final = dt.timedelta(microseconds=1)

#: How deep objects and arrays of free-form JSON may be nested.
MAX_DEPTH: Final = 64
#: How long small free-form JSON may be.
MAX_SMALL_BYTES: Final = 4096
#: How long free-form JSON about something that is registered may be.
MAX_METADATA_BYTES: Final = 64 * 1024
#: Length of names and descriptions, in characters: lists of many must fit an answer.
MAX_TITLE: Final = 1000
MAX_DESCRIPTION: Final = 10_000
#: Functions on the list of what an endpoint runs, which every submit to it is compared with.
MAX_FUNCTIONS_ALLOWED: Final = 10_000

T = TypeVar("T")


class Shape(BaseModel):
    """A request or an answer. Unknown fields of newer clients are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """No values: Powertools formats each request for its debug log, and it contains user bytes."""
        return ()


def _canonical(text: str) -> str:
    if _CANONICAL_UUID.fullmatch(text):
        return text
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise ValueError("not a UUID") from None


def _beginning(text: str) -> str:
    digits = text.replace("-", "").lower()
    if not re.fullmatch("[0-9a-f]{4,32}", digits):
        raise ValueError("not the first digits of an id, four or more")
    return "-".join(filter(None, (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])))


def _function_reference(text: str) -> str:
    function_id, at, version = text.partition("@")
    if not re.fullmatch(_VERSION, at + version):
        raise ValueError("not a version")
    return _canonical(function_id) + at + version


def _name(text: str) -> str:
    if not re.fullmatch(_NAME, text):
        raise ValueError("not a name: up to 100 letters, digits, hyphens, dots and underscores")
    try:
        uuid.UUID(text)
    except ValueError:
        return text
    raise ValueError("a UUID, which cannot be a name")


def _reference(text: str) -> str:
    if not re.fullmatch(_REFERENCE, text):
        raise ValueError("neither an id nor a name")
    return text


def _encodable(text: str) -> str:
    """JSON can carry half of a surrogate pair, UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair") from None
    return text


def _storable_text(text: str) -> str:
    """PostgreSQL takes no NUL in a text."""
    if "\0" in text:
        raise ValueError("holds a NUL character")
    return _encodable(text)


def _storable(value: Any, depth: int = 0) -> Any:
    if isinstance(value, str):
        _storable_text(value)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("holds a number that JSON does not have")
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError("holds a number of more than 64 bits")
    elif isinstance(value, dict | list):
        # What is stored is written again in answers, by code that recurses.
        if depth == MAX_DEPTH:
            raise ValueError(f"is nested deeper than {MAX_DEPTH} levels")
        for item in itertools.chain(value, value.values()) if isinstance(value, dict) else value:
            _storable(item, depth + 1)
    return value


def shallow(value: T, depth: int = 0) -> T:
    """Free-form JSON that is not nested deeper than :data:`MAX_DEPTH` levels: answers and arguments are written by code
    that recurses.

    :raises ValueError: if it is.
    """
    if isinstance(value, dict | list):
        if depth == MAX_DEPTH:
            raise ValueError(f"is nested deeper than {MAX_DEPTH} levels")
        for item in value.values() if isinstance(value, dict) else value:
            shallow(item, depth + 1)
    return value


def _day(text: str) -> str:
    if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
        raise ValueError("not a day like 2026-11-01")
    return dt.date.fromisoformat(text).isoformat()


def _at_most(value: dict[str, Any], most_bytes: int) -> dict[str, Any]:
    if len(json.dumps(value)) > most_bytes:
        raise ValueError(f"has more than {most_bytes} bytes")
    return value


def _few_functions(value: Any) -> Any:
    """Checked before the entries: each wrong one makes an error, and a request has room for hundreds of thousands."""
    if isinstance(value, dict) and len(value) > MAX_FUNCTIONS_PER_SUBMIT:
        raise ValueError(f"names more than {MAX_FUNCTIONS_PER_SUBMIT} functions")
    return value


#: A UUID in its canonical form, lower case with hyphens; other spellings are turned into it.
Id = Annotated[str, AfterValidator(_canonical), WithJsonSchema({"type": "string", "format": "uuid"})]

#: The first digits of a UUID, four or more, with or without hyphens.
IdBeginning = Annotated[str, AfterValidator(_beginning), WithJsonSchema({"type": "string", "minLength": 4})]

#: A function's UUID, or that and ``@`` and a version, as the key of an object. The UUID must be canonical: two
#: spellings of one id would silently become one entry.
FunctionKey = Annotated[str, Field(pattern=f"^{_CANONICAL_UUID.pattern}{_VERSION}$")]

#: A name that people give to something of theirs. Nothing that could be an id of anything, or a version.
Name = Annotated[str, AfterValidator(_name), WithJsonSchema({"type": "string", "pattern": f"^{_NAME}$"})]

#: A name, or empty for none.
OptionalName = Annotated[
    str,
    AfterValidator(lambda text: _name(text) if text else text),
    WithJsonSchema({"type": "string", "pattern": f"^({_NAME})?$"}),
]

#: An id or a name; that of a function may have a version.
Reference = Annotated[
    str, AfterValidator(_reference), WithJsonSchema({"type": "string", "pattern": f"^({_REFERENCE})$"})
]

#: User bytes, which are text; stored as bytes and never looked into.
UserBytes = Annotated[str, AfterValidator(_encodable)]

#: A function's UUID in any spelling, or that and ``@`` and a version.
FunctionReference = Annotated[
    str,
    AfterValidator(_function_reference),
    WithJsonSchema({"type": "string", "pattern": f"^{_CANONICAL_UUID.pattern}{_VERSION}$"}),
]

#: Ids; the error names the first that is wrong.
Ids = Annotated[list[Id], Field(fail_fast=True)]

#: What becomes of open tasks that would be refused now.
WaitingTasks = Literal["cancel", "keep"]

#: Text for people: names and descriptions.
Text = Annotated[str, AfterValidator(_storable_text)]
Title = Annotated[Text, Field(max_length=MAX_TITLE)]
Description = Annotated[Text, Field(max_length=MAX_DESCRIPTION)]

#: Ids of serialisation strategies.
Strategies = Annotated[list[Annotated[Text, Field(max_length=100)]], Field(fail_fast=True, max_length=32)]

#: Free-form JSON that is stored as it is.
JsonObject = Annotated[dict[str, Any], AfterValidator(lambda value: _storable(value))]

#: Free-form JSON of which each task of a submit keeps a copy, in memory while it waits.
SmallJsonObject = Annotated[JsonObject, AfterValidator(lambda value: _at_most(value, MAX_SMALL_BYTES))]

#: Free-form JSON about something that is registered.
Metadata = Annotated[JsonObject, AfterValidator(lambda value: _at_most(value, MAX_METADATA_BYTES))]

#: An object with a function in each key.
NamedFunctions = Annotated[dict[FunctionKey, T], BeforeValidator(_few_functions)]

#: Epoch seconds, up to the last year that a date has.
Instant = Annotated[float, Field(ge=0, lt=253_402_300_800, allow_inf_nan=False)]

#: A day, like 2026-11-01.
Day = Annotated[str, AfterValidator(_day), WithJsonSchema({"type": "string", "format": "date"})]

#: A pagination cursor from an answer: the time (microseconds) and the id or number of the last entry of a page.
Cursor = Annotated[str, Field(pattern="^[0-9]{1,17}:[0-9a-f-]{1,36}$")]
NumberCursor = Annotated[str, Field(pattern="^[0-9]{1,17}:[0-9]{1,18}$")]

#: A CURVE public key in Z85.
PublicKey = Annotated[str, Field(pattern=_Z85)]

#: A field of an answer that is left out when it is null.
Maybe = Annotated[T | None, Field(exclude_if=lambda value: value is None)]


def encode_cursor(at: dt.datetime, entry_id: str | int) -> str:
    """The cursor behind an entry."""
    return f"{(at - _EPOCH) // _MICROSECOND}:{entry_id}"


def decode_cursor(cursor: str | None) -> tuple[dt.datetime, str] | None:
    """Time and id of the entry after which a page starts; None for the first page."""
    if cursor is None:
        return None
    microseconds, _, entry_id = cursor.partition(":")
    return _EPOCH + int(microseconds) * _MICROSECOND, entry_id


def instant(at: float | None) -> dt.datetime | None:
    """Epoch seconds as a date."""
    return None if at is None else dt.datetime.fromtimestamp(at, dt.UTC)
