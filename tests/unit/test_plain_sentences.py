"""Docstrings and error messages of the products are English sentences or noun phrases, which stand alone."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("analytics", "common", "endpoint", "forwarder_fargate", "infra", "lambdas", "local", "localstack", "sdk")
#: First words of a docstring without a subject: "Of the rows, what ...", "So much may ...", "Those of ...".
HEADLESS = re.compile(
    r"(Of|So (long|many|much|far)|Those|That of|That is|As|Who|Whose|Where|By (the|what)|For (a|the|those|each)|From|"
    r"What (is|it|they|one|a|an|the|to|has|can|may|was|becomes?|tasks?|this|that)|To (those|what)|"
    r"Not|None of|Neither|Nor)\b"
)
#: Wording of messages that is not contemporary English.
FOREIGN = re.compile(
    r"(?<![Tt]here )\b(is|are) (no|none of|not one of) [a-z]|\bthere can be no\b|"
    r"\b(so many|so long|as long as it says)\b|\bmay hide\b|\bwhoever\b|\b(is|are) to be\b|\bhas none of\b"
)


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Those of modules, classes and functions, and strings behind an assignment."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for before, item in itertools.pairwise([None, *body]) if isinstance(body, list) else ():
            if before is None or isinstance(before, ast.Assign | ast.AnnAssign):
                value = item.value if isinstance(item, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield value


def messages(tree: ast.AST) -> Iterator[ast.Constant]:
    """Texts of the exceptions that are raised."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for part in ast.walk(node.exc):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and len(part.value) > 12:
                    yield part


def findings(text: str) -> list[str]:
    """The docstrings and messages of a module that are no sentences, with their lines."""
    tree = ast.parse(text)
    found = [each for each in docstrings(tree) if HEADLESS.match(str(each.value).strip())]
    found += [each for each in messages(tree) if FOREIGN.search(str(each.value))]
    return [f"{each.lineno}: {str(each.value).strip().splitlines()[0]}" for each in found]


@pytest.mark.parametrize("part", PARTS)
def test_docstrings_and_messages_are_sentences(part: str) -> None:
    modules = sorted((ROOT / part).rglob("farcall*/**/*.py"))
    assert modules
    found = {str(path.relative_to(ROOT)): findings(path.read_text(encoding="utf-8")) for path in modules}
    assert {path: each for path, each in found.items() if each} == {}


@pytest.mark.parametrize(
    "text",
    [
        '"""Of the rows, what a filter keeps."""',
        'A = 1\n"""So many at a time."""',
        'class C:\n    """That is one."""',
        'raise ValueError(f"{job!r} is no name of a job")',
        'raise ValueError("the value is to be a number")',
    ],
)
def test_what_is_no_sentence_is_found(text: str) -> None:
    assert len(findings(text)) == 1


@pytest.mark.parametrize(
    "text", ['"""Offline tier."""', '"""Whether it is ready."""', 'raise ValueError("there is no task with this id")']
)
def test_sentences_are_accepted(text: str) -> None:
    assert findings(text) == []
