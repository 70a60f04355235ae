"""Functions as self-contained source text."""

from __future__ import annotations

import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from farcall_common.payload.source import (
    NotSelfContained,
    function_from_source,
    remember_lines,
    self_contained_source,
)


def carry(script: str, name: str = "f") -> Callable[..., Any]:
    """What a worker gets of a function that a script defines."""
    function = function_from_source(name, script)
    return function_from_source(name, self_contained_source(function, inspect.getsource))


@pytest.mark.parametrize(
    ("script", "args", "result"),
    [
        pytest.param("def f(x): return x * 2\n", [21], 42, id="alone"),
        pytest.param("def f(n): return 1 if n < 2 else n * f(n - 1)\n", [5], 120, id="recursive"),
        pytest.param("import math\ndef f(x): return math.sqrt(x)\n", [9], 3.0, id="module"),
        pytest.param("import math as m\ndef f(x): return m.sqrt(x)\n", [9], 3.0, id="module by another name"),
        pytest.param("from math import sqrt as root\ndef f(x): return root(x)\n", [9], 3.0, id="builtin function"),
        pytest.param("from random import gauss as g\ndef f(): return g.__name__\n", [], "gauss", id="method"),
        pytest.param("from fractions import Fraction\ndef f(x): return Fraction(x)\n", ["1/2"], 0.5, id="class"),
        pytest.param("import xml.dom\ndef f(): return xml.dom.__name__\n", [], "xml.dom", id="submodule"),
        pytest.param("K = {'a': [1, (None, b'x')]}\ndef f(): return K\n", [], {"a": [1, (None, b"x")]}, id="constant"),
        pytest.param("def g(x): return x + 1\ndef f(x): return g(g(x))\n", [1], 3, id="functions"),
        pytest.param("def g(n): return f(n - 1)\ndef f(n): return n and g(n)\n", [2], 0, id="mutual recursion"),
        pytest.param("def f(x, y=(1, 2), *, z=-3): return (x, y, z)\n", [0], (0, (1, 2), -3), id="defaults"),
        pytest.param("from decimal import Decimal\ndef f(x: Decimal) -> Decimal: return x\n", [1], 1, id="annotations"),
        pytest.param("if True:\n    def f(x):\n        return [y for y in x]\n", [[1]], [1], id="indented"),
        pytest.param("def f(x):\n    def g(y): return x + y\n    return g(1)\n", [1], 2, id="inner closure"),
        pytest.param("def f():\n    class C:\n        x = 'é'\n    return C.x\n", [], "é", id="inner class"),
        pytest.param(
            "def f(é: list[str] = None, *, y: 'int' = 1) -> dict[\n    str, int]:\n"
            "    class C:\n        x: int\n    return C.__annotations__\n", [], {"x": int}, id="inner annotation",
        ),
        pytest.param(
            "from decimal import Decimal as D\ndef g(a: D, b: list[int] | None, *c: D, d: 'D' = 1) -> D: ...\n"
            "def f(): return g.__annotations__\n", [],
            {"a": "D", "b": list[int] | None, "c": "D", "d": "D", "return": "D"}, id="annotations as text",
        ),
        pytest.param(
            "from __future__ import annotations\ndef g(x: D): ...\n"
            "def f():\n    def h(y: int): return g.__annotations__\n"
            "    return h.__annotations__, h(1)\n", [], ({"y": "int"}, {"x": "D"}), id="postponed annotations",
        ),
        pytest.param(
            "K = 3\ndef f(x): return eval('K + x'), globals()['K'], eval('y', {'y': x})\n",
            [1], (4, 3, 1), id="names in a text",
        ),
        pytest.param("N = 0\ndef f():\n    global N\n    N += 1\n    return N\n", [], 1, id="counter"),
    ],
)  # fmt: skip
def test_function_source_includes_its_globals(script: str, args: list[object], result: object) -> None:
    assert carry(script)(*args) == result


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("f = lambda x: x\n", "it is a lambda"),
        ("f = list(map(int, '1')) and (\n    lambda x: x)\n", "it is a lambda"),
        ("def make(n):\n    def g(x): return x + n\n    return g\nf = make(2)\n", "closure: it uses 'n' of"),
        ("def same(f): return f\n@same\ndef f(x): return x\n", "decorated"),
        ("def f(x): return x\nf.state = 1\n", "has attributes"),
        ("class C: pass\ndef f(): return C()\n", "the class 'C' of"),
        ("K = object()\ndef f(): return K\n", "'K', a object"),
        ("NAN = float('nan')\ndef f(): return NAN\n", "'NAN'"),
        ("K = {1}\ndef f(): return K\n", "'K', a set"),
        ("K = 1\nfor _ in range(99): K = [K]\ndef f(): return K\n", "'K', a list"),
        ("R = [0]\nK = [R, R]\ndef f(): return K\n", "'K' has a list or dict that occurs twice"),
        ("K = L = {}\ndef f(): return K, L\n", "'L' has a list or dict that occurs twice"),
        ("def f(x=print): return x\n", "default"),
        ("def f(x=1): return x\nf.__defaults__ = (2,)\n", "default"),
        ("def f():\n    from . import sibling\n    return sibling\n", "relative import"),
        ("def f(): return undefined\n", "not defined"),
        ("def f():\n    import __main__\n    return __main__.K\n", "uses the main module"),
        ("import sys\ndef f(): return sys.modules['__main__'].K\n", "uses the main module"),
        ("class C:\n    def g(self): return 1\nf = C().g\n", "a method"),
    ],
)
def test_function_not_expressible_as_text_is_refused(script: str, reason: str) -> None:
    with pytest.raises(NotSelfContained, match=reason):
        carry(script)


def test_functions_with_and_without_postponed_annotations_are_no_text() -> None:
    postponed = function_from_source("g", "from __future__ import annotations\ndef g(x: int): ...\n")
    function = function_from_source("f", "def f(x: int): return g\n")
    function.__globals__["g"] = postponed
    with pytest.raises(NotSelfContained, match="with and without postponed"):
        self_contained_source(function, inspect.getsource)


def test_local_modules_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "beside_the_script", ModuleType("beside_the_script"))
    with pytest.raises(NotSelfContained, match="local module 'beside_the_script'"):
        carry("import beside_the_script\ndef f(): return beside_the_script\n")


def test_functions_of_installed_packages_are_imported() -> None:
    with pytest.raises(NotSelfContained, match="imported from textwrap"):
        self_contained_source(textwrap.dedent, inspect.getsource)


def test_source_that_differs_from_the_code_is_refused() -> None:
    function = function_from_source("f", "def f(x): return x < 1\n")
    with pytest.raises(NotSelfContained, match="not what this process runs"):
        self_contained_source(function, lambda _: "def f(x): return x > 1\n")


def test_the_main_guard_of_a_text_does_not_run() -> None:
    script = "def f(): return __name__\nif __name__ == '__main__':\n    raise SystemExit('ran')\n"
    assert function_from_source("f", script)() != "__main__"


def test_tracebacks_and_inspect_find_the_lines_of_a_text() -> None:
    function = function_from_source("f", "def f():\n    return 1\n")
    assert inspect.getsource(function) == "def f():\n    return 1\n"


def test_lines_of_absent_files_are_remembered_piece_by_piece() -> None:
    name = "/nowhere/at/all/script.py"
    remember_lines(name, 3, "three\nfour\n")
    remember_lines(name, 6, "six\n")
    remember_lines(name, 1, "one\n")
    try:
        linecache.checkcache(name)
        assert [linecache.getline(name, number).strip() for number in range(1, 8)] == [
            "one", "", "three", "four", "", "six", "",
        ]  # fmt: skip
    finally:
        linecache.cache.pop(name)


def test_lines_of_existing_files_are_not_replaced() -> None:
    before = linecache.getlines(__file__)
    remember_lines(__file__, 1, "something else\n")
    assert linecache.getlines(__file__) == before


def test_only_submodules_that_are_used_are_imported() -> None:
    script = "import xml.dom.minidom, xml.sax\ndef f(x): return xml.dom.Node\n"
    text = self_contained_source(function_from_source("f", script), inspect.getsource)
    assert text.splitlines()[:2] == ["import xml", "import xml.dom"]
    assert "sax" not in text
