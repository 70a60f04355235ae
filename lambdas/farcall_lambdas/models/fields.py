"""Building blocks of the shapes: ids, text that every store can hold, fields that are left out when empty."""

from __future__ import annotations

import itertools
import math
import re
import uuid
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

__all__ = ["Id", "IdKey", "JsonObject", "Maybe", "PublicKey", "Shape", "Text", "UserBytes"]

_CANONICAL_UUID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_Z85: Final = r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}$"

#: How deep objects and arrays of free-form JSON may be nested.
MAX_DEPTH: Final = 64

T = TypeVar("T")


class Shape(BaseModel):
    """A request or an answer. What a newer client adds is ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


def _canonical(text: str) -> str:
    if _CANONICAL_UUID.fullmatch(text):
        return text
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise ValueError("not a UUID") from None


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


#: A UUID in its canonical form, lower case with hyphens; other spellings are turned into it.
Id = Annotated[str, AfterValidator(_canonical), WithJsonSchema({"type": "string", "format": "uuid"})]

#: A UUID as the key of an object. Must be canonical: two spellings of one id would silently become one entry.
IdKey = Annotated[str, Field(pattern=f"^{_CANONICAL_UUID.pattern}$", json_schema_extra={"format": "uuid"})]

#: User bytes, which are text; stored as bytes and never looked into.
UserBytes = Annotated[str, AfterValidator(_encodable)]

#: Text for people: names and descriptions.
Text = Annotated[str, AfterValidator(_storable_text)]

#: Free-form JSON that is stored as it is.
JsonObject = Annotated[dict[str, Any], AfterValidator(lambda value: _storable(value))]

#: A CURVE public key in Z85.
PublicKey = Annotated[str, Field(pattern=_Z85)]

#: A field of an answer that is left out, not null, when there is nothing to say.
Maybe = Annotated[T | None, Field(exclude_if=lambda value: value is None)]
