"""Source text of functions: the only form that every Python version reads.

A function rarely stands alone: a script's functions use its imports, its constants and one another.
:func:`self_contained_source` writes all of that into one text that runs anywhere, and refuses when it cannot promise
that: then the function travels as byte code. :func:`function_from_source` is the other direction.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import dis
import hashlib
import inspect
import itertools
import linecache
import math
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from farcall_common.payload.pickling import (
    USES_MAIN,
    attribute,
    global_names,
    is_decorated,
    names_in_code,
    plain_function,
    travels_by_value,
    uses_main_module,
)
from farcall_common.payload.pools import SOURCE_MODULE, teach_pools

_SURROUNDINGS = frozenset({"EXTENDED_ARG", "NOP", "PUSH_NULL"})
_SAME_STEP = {"LOAD_METHOD": "LOAD_ATTR"}
_JUMPS = frozenset({*dis.hasjabs, *dis.hasjrel})
_FUTURE_FLAGS = __future__.annotations.compiler_flag
_MAX_LITERAL_CHARACTERS = 10_000
_MAX_LITERAL_INT_BITS = 1024
_MAX_LITERAL_DEPTH = 50
"""Python compiles no text with more than about 100 to 200 brackets in one another."""
_MAX_LINES = 1_000_000

_Definition = ast.FunctionDef | ast.AsyncFunctionDef


class NotSelfContained(Exception):  # not in our tree: the reason why the next strategy is tried
    """The source text of a function is not enough to run it."""


def function_from_source(name: str, source: str) -> Callable[..., Any]:
    """Run a source text and return its function ``name``; tracebacks show its lines.

    :raises KeyError: if the text does not define the name.
    :raises Exception: what running the text raises.
    """
    if source[:1].isspace():  # a method or a nested function
        source = textwrap.dedent(source)
    digest = hashlib.sha256(source.encode(errors="backslashreplace")).hexdigest()
    filename = f"<function {name} {digest[:8]}>"
    teach_pools()
    namespace: dict[str, Any] = {"__name__": SOURCE_MODULE}
    exec(compile(source, filename, "exec", dont_inherit=True), namespace)  # noqa: S102 - user code is the product
    remember_lines(filename, 1, source)
    function: Callable[..., Any] = namespace[name]
    return function


def remember_lines(filename: str, first_line: int, text: str) -> None:
    """Let tracebacks show lines of a file that is not on this machine; no effect if the file exists."""
    if not 1 <= first_line <= _MAX_LINES or Path(filename).exists():
        return
    known = linecache.cache.get(filename)
    lines = list(known[2]) if known is not None and len(known) == 4 else []
    new = text.splitlines(keepends=True)
    lines.extend(["\n"] * (first_line - 1 + len(new) - len(lines)))
    lines[first_line - 1 : first_line - 1 + len(new)] = new
    # Without a modification time linecache never reads the file on disk.
    linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)


def self_contained_source(function: object, read_source: Callable[[Any], str]) -> str:
    """The source text of a function with its dependencies in front of it: imports, constants, other functions.

    ``read_source`` finds the text of one function. The text is compiled and compared with the function's byte code, so
    that a file which was edited since it was imported, or a decorator, cannot make the worker run something else.

    :raises NotSelfContained: if it is not a plain function of this machine, or uses something that text cannot carry.
    :raises OSError: if there is no source text.
    :raises SyntaxError: if the text that was found does not compile.
    """
    plain = plain_function(function)
    if type(plain) is not FunctionType:  # a proxy says that it is one
        raise NotSelfContained(f"a {type(function).__name__} has no source of its own")
    if not travels_by_value(plain.__module__ or ""):
        raise NotSelfContained(f"it is imported from {plain.__module__}")
    bundle = _Bundle(read_source)
    bundle.require(plain.__name__, function, attributes=())
    return bundle.text()


def source_of(function: Any, read_source: Callable[[Any], str]) -> str:
    """The text of a function; without the decorator of the SDK, which is the first if it is decorated."""
    source = read_source(plain_function(function))
    if not is_decorated(function):
        return source
    source = textwrap.dedent(source)
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return source
    match body:
        case [ast.FunctionDef(decorator_list=[_, *others]) | ast.AsyncFunctionDef(decorator_list=[_, *others]) as node]:
            first = others[0].lineno if others else node.lineno
            return "".join(source.splitlines(keepends=True)[first - 1 :])
    return source


class _Bundle:
    """The statements that a function needs, each name once; a second definition of a name is refused."""

    def __init__(self, read_source: Callable[[Any], str]) -> None:
        self._read_source = read_source
        self._meanings: dict[str, object] = {}
        self._mutable: set[int] = set()
        self._imports: dict[str, None] = {}
        self._constants: list[str] = []
        self._functions: list[str] = []
        self._postponed: set[bool] = set()

    def text(self) -> str:
        future = ["from __future__ import annotations"] if True in self._postponed else []
        head = [*future, *self._imports, *self._constants]
        return "\n".join([*head, *(["\n"] if head else []), "\n\n".join(self._functions)])

    def require(self, name: str, value: object, *, attributes: tuple[str, ...]) -> None:
        """Define ``name`` as ``value``; ``attributes`` are the dotted names that are used in it."""
        known, plain = name in self._meanings, plain_function(value)
        if known and self._meanings[name] is not plain:
            raise NotSelfContained(f"the name {name!r} has two meanings")
        self._meanings[name] = plain
        if isinstance(value, ModuleType):
            self._import_module(name, value, attributes)
        elif known:
            return
        elif _is_literal(value):
            if not _are_new(value, self._mutable):
                raise NotSelfContained(f"{name!r} has a list or dict that occurs twice")
            self._constants.append(f"{name} = {value!r}")
        elif (origin := _importable(value)) is not None:
            alias = "" if origin[1] == name else f" as {name}"
            self._imports[f"from {origin[0]} import {origin[1]}{alias}"] = None
        elif type(plain) is FunctionType and plain.__name__ == name:
            self._define(plain, source_of(value, self._read_source))
        else:
            what = f"the class {name!r}" if isinstance(value, type) else f"{name!r}, a {type(value).__name__}"
            raise NotSelfContained(f"it uses {what} of this program")

    def _import_module(self, name: str, module: ModuleType, attributes: tuple[str, ...]) -> None:
        if travels_by_value(module.__name__):
            raise NotSelfContained(f"it uses the local module {module.__name__!r}")
        self._imports[f"import {module.__name__}" + ("" if name == module.__name__ else f" as {name}")] = None
        for inner in attributes:  # scipy.optimize.minimize: importing scipy would not be enough
            submodule = f"{module.__name__}.{inner}"
            if submodule in sys.modules and getattr(sys.modules[submodule], "__spec__", None) is not None:
                self._imports[f"import {submodule}"] = None

    def _define(self, function: FunctionType, source: str) -> None:
        source = textwrap.dedent(source).rstrip() + "\n"
        try:
            tree = ast.parse(source)
        except SyntaxError:  # a part of a statement
            raise NotSelfContained(_unwritten(function)) from None
        definition = _only_definition(tree, function)
        _check_same(source, function)
        chains = _attribute_chains(definition)
        source = self._with_annotations(source, definition, function)
        if uses_main_module(function.__code__):
            raise NotSelfContained(USES_MAIN)
        named = names_in_code(function.__code__)
        for name in sorted(global_names(function.__code__)):
            if name in function.__globals__:
                value = function.__globals__[name]
                self.require(name, value, attributes=tuple(sorted(chains.get(name, ()))))
            elif name in named and not hasattr(builtins, name):
                raise NotSelfContained(f"it uses {name!r}, which is not defined")
        self._functions.append(source)

    def _with_annotations(self, source: str, definition: _Definition, function: FunctionType) -> str:
        """The text of a function with its own annotations as text, unless they can be evaluated anywhere: a worker
        needs neither them nor their imports. Those of functions and classes inside stay."""
        if not any(
            getattr(node, "annotation", None) or getattr(node, "returns", None) for node in ast.walk(definition)
        ):
            return source
        self._postponed.add(bool(function.__code__.co_flags & _FUTURE_FLAGS))
        if len(self._postponed) > 1:
            raise NotSelfContained("it uses functions with and without postponed annotations")
        if True in self._postponed:
            return source
        lines = source.encode().splitlines(keepends=True)
        starts = [0, *itertools.accumulate(map(len, lines))]
        text = b"".join(lines)
        for node in sorted(_own_annotations(definition), key=lambda node: (node.lineno, node.col_offset), reverse=True):
            if not _is_plain_annotation(node, function.__globals__):
                start = starts[node.lineno - 1] + node.col_offset
                end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
                text = text[:start] + repr(ast.unparse(node)).encode() + text[end:]
        return text.decode()


def _only_definition(tree: ast.Module, function: FunctionType) -> _Definition:
    match tree.body:
        case [(ast.FunctionDef() | ast.AsyncFunctionDef()) as definition] if definition.name == function.__name__:
            pass
        case _:
            raise NotSelfContained(_unwritten(function))
    if definition.decorator_list:
        raise NotSelfContained(f"{function.__name__} is decorated")
    if function.__closure__:
        names = ", ".join(map(repr, function.__code__.co_freevars))
        raise NotSelfContained(f"{function.__name__} is a closure: it uses {names} of the function around it")
    if function.__dict__:
        raise NotSelfContained(f"{function.__name__} has attributes")
    if any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(definition)):
        raise NotSelfContained(f"{function.__name__} has a relative import")
    defaults = [ast.literal_eval(node) if _is_constant(node) else ... for node in definition.args.defaults]
    keyword_defaults = {
        argument.arg: ast.literal_eval(node) if _is_constant(node) else ...
        for argument, node in zip(definition.args.kwonlyargs, definition.args.kw_defaults, strict=True)
        if node is not None
    }
    if defaults != list(function.__defaults__ or ()) or keyword_defaults != (function.__kwdefaults__ or {}):
        raise NotSelfContained(f"{function.__name__} has a default that is not a plain constant")
    return definition


def _unwritten(function: FunctionType) -> str:
    return "it is a lambda" if function.__name__ == "<lambda>" else f"{function.__name__} is not written with def"


def _is_constant(node: ast.expr) -> bool:
    try:
        return ast.literal_eval(node) is not ...
    except ValueError:
        return False


def _check_same(source: str, function: FunctionType) -> None:
    flags = function.__code__.co_flags & _FUTURE_FLAGS
    module = compile(source, "<source>", "exec", flags=flags, dont_inherit=True)
    compiled = next(constant for constant in module.co_consts if isinstance(constant, CodeType))
    if not _same_code(compiled, function.__code__):
        raise NotSelfContained(f"the source found for {function.__name__} is not what this process runs")


def _same_code(one: CodeType, other: CodeType) -> bool:
    inner, other_inner = _inner(one), _inner(other)
    return (
        _fingerprint(one) == _fingerprint(other)
        and len(inner) == len(other_inner)
        and all(map(_same_code, inner, other_inner))
    )


def _fingerprint(code: CodeType) -> tuple[object, ...]:
    """The behaviour of a code object, without what depends on the text around it.

    How ``np.sum(x)`` is called depends on whether the compiler saw ``import numpy as np`` above it, and with that every
    jump distance below.
    """
    flags = code.co_flags & ~inspect.CO_NESTED  # a nested function is sent without the outer one
    steps = [
        (_SAME_STEP.get(step.opname, step.opname), None if step.opcode in _JUMPS else repr(step.argval))
        for step in dis.get_instructions(code)
        if step.opname not in _SURROUNDINGS and not isinstance(step.argval, CodeType)
    ]
    return (code.co_varnames, code.co_freevars, flags, steps)


def _inner(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _attribute_chains(definition: ast.AST) -> dict[str, set[str]]:
    """Dotted names by their first part: ``scipy.optimize.minimize`` gives scipy: {optimize, optimize.minimize}."""
    chains: dict[str, set[str]] = {}
    for node in ast.walk(definition):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name):
            dotted = (".".join(parts[: length + 1]) for length in range(len(parts)))
            chains.setdefault(node.id, set()).update(dotted)
    return chains


def _own_annotations(definition: _Definition) -> list[ast.expr]:
    own = definition.args
    every = (*own.posonlyargs, *own.args, *own.kwonlyargs, own.vararg, own.kwarg)
    found = [argument.annotation for argument in every if argument is not None] + [definition.returns]
    return [annotation for annotation in found if annotation is not None]


def _is_plain_annotation(node: ast.AST, names: Mapping[str, object]) -> bool:
    """Whether it consists of constants and names of Python."""
    match node:
        case ast.Constant():
            return True
        case ast.Name(name):
            return hasattr(builtins, name) and name not in names
        case ast.Subscript(ast.Name("list" | "tuple" | "dict" | "set" | "frozenset" | "type") as kind, inside):
            return all(_is_plain_annotation(each, names) for each in (kind, inside))
        case ast.Tuple(parts):
            return all(_is_plain_annotation(part, names) for part in parts)
        case ast.BinOp(ast.Name() | ast.Subscript() | ast.BinOp() as left, ast.BitOr(), right):
            is_none = isinstance(right, ast.Constant) and right.value is None
            return _is_plain_annotation(left, names) and (is_none or _is_plain_annotation(right, names))
    return False


def _is_literal(value: object) -> bool:
    """Whether ``repr`` represents the value completely."""
    return _is_plain(value) and len(repr(value)) <= _MAX_LITERAL_CHARACTERS


def _are_new(value: Any, seen: set[int]) -> bool:
    """Whether no list or dict in a literal occurs twice, there or among those seen before: its text would be two."""
    if type(value) in (list, dict):
        if id(value) in seen:
            return False
        seen.add(id(value))
    parts = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return all(_are_new(part, seen) for part in parts)


def _is_plain(value: Any, depth: int = 0) -> bool:
    kind = type(value)  # exactly: a subclass is more than its repr
    if kind is float:
        return math.isfinite(value)
    if kind is int:
        return bool(value.bit_length() <= _MAX_LITERAL_INT_BITS)
    if kind in (list, tuple, dict):
        inside = value if kind is not dict else itertools.chain(value, value.values())
        return depth < _MAX_LITERAL_DEPTH and all(_is_plain(part, depth + 1) for part in inside)
    return value is None or kind in (bool, str, bytes)


def _importable(value: object) -> tuple[str, str] | None:
    """Module and name from which a worker can import the value."""
    module_name, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module_name is None and isinstance(value, BuiltinMethodType | MethodType):
        module_name = type(value.__self__).__module__
    if isinstance(value, BuiltinMethodType | MethodType):  # random.gauss is a method, and a name of its module
        name = value.__name__
    if not isinstance(module_name, str) or not isinstance(name, str) or not name.isidentifier():
        return None
    if travels_by_value(module_name) or attribute(sys.modules.get(module_name), name) is not value:
        return None
    return module_name, name
