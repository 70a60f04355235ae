"""The page of errors has an entry for each code that any part can report, and for no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import farcall  # its errors are below FarcallError, too
from farcall_common.errors import FarcallError, Fault
from farcall_endpoint.contracts import outcomes
from tests.docs.pages import DOCS

PARTS: Final = ("common", "sdk/farcall", "endpoint/farcall_endpoint", "lambdas", "forwarder_fargate", "local")
CODE: Final = re.compile(r"[A-Z]+(?:_[A-Z]+)*")
ENTRY: Final = re.compile(r"^### `(?P<code>[A-Z_]+)`\n\nWhose fault: (?P<whose>.+?)\. Retry: (?P<again>.+?)\.$", re.M)
WORDS: Final = {
    Fault.CALLER: "the caller",
    Fault.USER_CODE: "the function",
    Fault.PEER: "the other side",
    Fault.NETWORK: "the network",
    Fault.US: "Farcall",
}
#: Functions that make a record, with the code as their first argument.
MAKERS: Final = frozenset({"ErrorRecord", "Outcome"})


def classes(root: type[FarcallError] = FarcallError) -> Iterator[type[FarcallError]]:
    """Every error class of the packages that users import."""
    yield root
    for child in root.__subclasses__():
        if child.__module__.startswith(("farcall.", "farcall_common.")):
            yield from classes(child)


def codes_in(path: Path) -> set[str]:
    """The codes that a module writes: those of its error classes and of the records that it makes."""
    found: set[object] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
                value = getattr(line, "value", None)
                if isinstance(target, ast.Name) and target.id == "code" and isinstance(value, ast.Constant):
                    found.add(value.value)
        elif isinstance(node, ast.Call):
            made = getattr(node.func, "id", None) in MAKERS
            given = [word.value for word in node.keywords if word.arg == "code"] + (node.args[:1] if made else [])
            found |= {value.value for value in given if isinstance(value, ast.Constant)}
    return {code for code in found if isinstance(code, str) and CODE.fullmatch(code)}


def written() -> dict[str, set[str]]:
    """Where each code is written."""
    root = DOCS.parent
    places: dict[str, set[str]] = {}
    for part in PARTS:
        for path in sorted((root / part).rglob("*.py")):
            if "testing" not in path.parts:
                for code in codes_in(path):
                    places.setdefault(code, set()).add(str(path.relative_to(root)))
    return places


def entries() -> dict[str, tuple[str, str]]:
    """Whose fault and whether to try again, by code, as the page says."""
    text = "".join((DOCS / page).read_text(encoding="utf-8") for page in ("errors.md", "errors/requests.md"))
    found = [(match["code"], (match["whose"], match["again"])) for match in ENTRY.finditer(text)]
    assert len(found) == text.count("\n### "), "an entry is not written like the others"
    assert len(found) == len(dict(found)), "a code has two entries"
    return dict(found)


def test_every_code_has_an_entry() -> None:
    places = written()
    assert {"TASK_FAILED", "WORKER_DIED", "ENDPOINT_INCOMPATIBLE", "TICKET_INVALID", "SPOOL_UNWRITABLE"} <= set(places)
    missing = {code: sorted(where) for code, where in places.items() if code not in entries()}
    assert not missing


def test_every_entry_has_a_code() -> None:
    assert sorted(set(entries()) - set(written())) == []


def test_every_task_error_of_an_endpoint_has_an_entry() -> None:
    codes = {each.code for each in vars(outcomes).values() if isinstance(each, outcomes.Outcome)}
    assert len(codes) >= 14
    assert codes <= set(entries())


def test_the_page_names_the_fault_of_each_error() -> None:
    page = entries()
    known = [cls for cls in classes() if cls.code in page]
    assert farcall.EndpointIncompatible in known
    assert {cls.code: page[cls.code][0] for cls in known if WORDS[cls.fault] not in page[cls.code][0]} == {}


def test_the_page_suggests_a_retry_only_where_it_can_help() -> None:
    page = entries()
    known = {cls.code: cls.retryable for cls in classes() if cls.code in page}
    says = {code: page[code][1] for code in known}
    assert {code: text for code, text in says.items() if text.startswith("no") and known[code]} == {}
    assert {code: text for code, text in says.items() if text.startswith("yes") and not known[code]} == {}
