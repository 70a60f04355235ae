"""Size of JSON as text inside JSON: a body in the event or the answer of a Lambda function."""

from __future__ import annotations

import json


def nested_bytes(text: str) -> int:
    """Bytes of a JSON text as a string inside JSON: its quotes, backslashes and line ends take two bytes each."""
    return len(json.dumps(text, ensure_ascii=False).encode())


def sent_bytes(value: object) -> int:
    """Bytes that a value adds to an answer of the API: as JSON in ASCII, as a string inside JSON."""
    text = json.dumps(value)
    return len(text) + text.count('"') + text.count("\\")
