"""Template snapshots: templates as short text for reviewers, and the differences between two of them.

References, imports and joined strings are written as ``${Name.Attribute}``, and JSON within a string as its contents.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tests.contract.templates import Templates

#: The lines of each parameter, resource and output, by stack, type and name.
Summary = Mapping[str, list[str]]

_WIDTH: Final = 140
#: Text that cannot be mistaken for anything else without quotes.
_PLAIN: Final = re.compile(r"(?!\d|(true|false|null)$)[^\n,\[\]{}]+")


def summarize(templates: Templates) -> Summary:
    """A paragraph for each member of the templates. Assets' hashes change with every line of code, and are left out."""
    exports = {
        output["Export"]["Name"]: f"{stack}:{_plain(output['Value'], {})}"
        for stack, template in templates.items()
        for output in template.get("Outputs", {}).values()
        if "Export" in output
    }
    summary: dict[str, list[str]] = {}
    for stack, template in sorted(templates.items()):
        for section, members in sorted(template.items()):
            if not isinstance(members, dict):
                summary[f"{stack} {section}"] = list(_lines(_plain(members, exports), "  "))
                continue
            for name, member in sorted(members.items()):
                if "Export" not in member:  # those are where they are imported
                    kind = member.get("Type", section) if section == "Resources" else section
                    title = _without_hashes(f"{stack} {kind} {name}")
                    summary[title] = list(_lines(_plain(member, exports), "  "))
    return summary


def as_text(summary: Summary) -> str:
    return "\n".join("\n".join([title, *lines, ""]) for title, lines in summary.items())


def differences(base: Summary, other: Summary) -> str:
    """The lines that are in one of them only, below the title of their paragraph."""
    changed = []
    for title in sorted(base.keys() | other.keys()):
        compared = difflib.ndiff(base.get(title, []), other.get(title, []), charjunk=None)
        if lines := [line for line in compared if line[0] in "+-"]:
            changed.append("\n".join([title, *lines]) + "\n")
    return "\n".join(changed)


def _plain(value: Any, exports: Mapping[str, str]) -> Any:
    """The value with CloudFormation's functions written as text."""
    match value:
        case {"Ref": str(name), **rest} if not rest:
            return f"${{{_without_hashes(name)}}}"
        case {"Fn::GetAtt": [str(name), str(attribute)], **rest} if not rest:
            return f"${{{_without_hashes(name)}.{attribute}}}"
        case {"Fn::ImportValue": str(name), **rest} if not rest:
            return exports.get(name, f"import {name}")
        case {"Fn::Sub": str(text), **rest} if not rest:
            return text
        case {"Fn::Join": ["", [*parts]], **rest} if not rest:
            return _plain("".join(str(_plain(part, exports)) for part in parts), exports)
        case dict():
            return {_without_hashes(key): _plain(item, exports) for key, item in sorted(value.items())}
        case list():
            return [_plain(item, exports) for item in value]
        case str() if value.startswith(('{"', "[{")):
            with contextlib.suppress(ValueError):  # a part of JSON, or a template of it
                return _plain(json.loads(value), exports)
    return _without_hashes(value) if isinstance(value, str) else value


def _without_hashes(text: str) -> str:
    """Asset hashes change with every line of code, and so do the names that CDK derives from them."""
    text = re.sub(r"\b[0-9a-f]{64}\b", "HASH", text)
    text = re.sub(r"^(\d+\.\d+\.\d+)\+[0-9a-f]{12}$", r"\1+HASH", text)  # a release
    text = re.sub(r"((?:WebRestDeployment|CurrentVersion)[0-9A-F]{8})[0-9a-f]{32}", r"\1HASH", text)
    return "BOOT PROGRAM" if text.startswith('"""First program of the forwarder') else text


def _short(value: Any) -> str:
    """JSON in one line, with few quotes."""
    match value:
        case dict():
            return "{" + ", ".join(f"{key}: {_short(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_short, value)) + "]"
        case str() if _PLAIN.fullmatch(re.sub(r"\$\{[\w:.]+\}", "", value) or "-"):
            return value
    return json.dumps(value, ensure_ascii=False)


def _lines(value: Any, indent: str) -> Iterator[str]:
    match value:
        case dict():
            for key, item in value.items():
                yield from _item(f"{key}:", item, indent)
        case list() if any(isinstance(item, dict | list) for item in value):
            for item in value:
                yield from _item("-", item, indent)
        case list():
            yield from textwrap.wrap(_short(value), _WIDTH, initial_indent=indent, subsequent_indent=indent)
        case _:
            yield indent + _short(value)


def _item(label: str, item: Any, indent: str) -> Iterator[str]:
    line = f"{indent}{label} {_short(item)}"
    if len(line) <= _WIDTH or not isinstance(item, dict | list):
        yield line
    else:
        yield indent + label
        yield from _lines(item, f"{indent}  ")
