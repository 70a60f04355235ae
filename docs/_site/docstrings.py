"""Docstrings are written with Sphinx' roles; the site is written in Markdown."""

from __future__ import annotations

import re
from typing import Any, Final

import griffe

_ROLE: Final = re.compile(r":(?:class|meth|func|attr|mod|exc|data):`(?P<tilde>~?)(?P<name>[\w.]+)`")
_SEVERAL: Final = re.compile(
    r"^(?P<indent>[ ]*):(?P<field>raises|param) (?P<names>\w+(?:, \w+)+): (?P<text>.+(?:\n(?P=indent)[ ]+\S.*)*)",
    re.MULTILINE,
)
_LITERAL: Final = re.compile(r"^(?P<lead>.*)::[ \t]*$", re.MULTILINE)


class RolesAsCode(griffe.Extension):
    """Shows ``:class:`Thing``` as code, takes fields of several names apart, and drops the second colon of ``::``."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            text = _ROLE.sub(_as_code, obj.docstring.value)
            text = _SEVERAL.sub(_one_each, text)
            if isinstance(obj, griffe.Class) and any(str(base) == "msgspec.Struct" for base in obj.bases):
                text = text.replace(":param ", ":var ")  # griffe derives no parameters from the fields of a struct
            obj.docstring.value = _LITERAL.sub(lambda found: f"{found['lead']}:" if found["lead"] else "", text)


def _as_code(found: re.Match[str]) -> str:
    name = found["name"].rpartition(".")[2] if found["tilde"] else found["name"]
    return f"`{name}`"


def _one_each(found: re.Match[str]) -> str:
    return "\n".join(
        f"{found['indent']}:{found['field']} {name}: {found['text']}" for name in found["names"].split(", ")
    )
