"""Relations: the trees of a Substrait plan: their columns, expressions and functions. No I/O.

A relation is a message of the type ``Rel``; its columns have numbers, from 0 on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Final

import pyarrow as pa
from google.protobuf.message import Message
from substrait.algebra_pb2 import (
    AggregateFunction,
    AggregateRel,
    Expression,
    FunctionArgument,
    JoinRel,
    Rel,
    RelRoot,
    SortField,
)
from substrait.extensions.extensions_pb2 import SimpleExtensionDeclaration
from substrait.plan_pb2 import Plan, PlanRel
from substrait.type_pb2 import Type

_LEFT_ONLY: Final = {JoinRel.JOIN_TYPE_LEFT_SEMI, JoinRel.JOIN_TYPE_LEFT_ANTI}
_RIGHT_ONLY: Final = {JoinRel.JOIN_TYPE_RIGHT_SEMI, JoinRel.JOIN_TYPE_RIGHT_ANTI}
_DIRECTIONS: Final = {
    SortField.SORT_DIRECTION_ASC_NULLS_FIRST: "asc nulls first",
    SortField.SORT_DIRECTION_ASC_NULLS_LAST: "asc nulls last",
    SortField.SORT_DIRECTION_DESC_NULLS_FIRST: "desc nulls first",
    SortField.SORT_DIRECTION_DESC_NULLS_LAST: "desc nulls last",
}


class QueryProblem(ValueError):
    """A query that is wrong, or cannot be done in stages; the text says what of it."""


def width(rel: Rel) -> int:
    """How many columns a relation has."""
    kind = rel.WhichOneof("rel_type")
    node = getattr(rel, str(kind))
    if kind in ("project", "read", "aggregate", "join", "cross") and node.common.HasField("emit"):
        return len(node.common.emit.output_mapping)
    if kind == "read":
        selected = node.projection.select.struct_items
        return len(selected) if node.HasField("projection") else len(node.base_schema.struct.types)
    if kind == "project":
        return width(node.input) + len(node.expressions)
    if kind == "aggregate":
        return len(node.grouping_expressions) + len(node.measures) + (len(node.groupings) > 1)
    if kind == "join":
        return _width_of_join(node)
    if kind == "cross":
        return width(node.left) + width(node.right)
    return width(node.inputs[0] if kind == "set" else node.input)


def _width_of_join(join: JoinRel) -> int:
    if join.type in _LEFT_ONLY:
        return width(join.left)
    if join.type in _RIGHT_ONLY:
        return width(join.right)
    is_mark = join.type in (JoinRel.JOIN_TYPE_LEFT_MARK, JoinRel.JOIN_TYPE_RIGHT_MARK)
    if is_mark:
        return width(join.left if join.type == JoinRel.JOIN_TYPE_LEFT_MARK else join.right) + 1
    return width(join.left) + width(join.right)


def column(number: int) -> Expression:
    """The expression that is a column."""
    found = Expression()
    found.selection.direct_reference.struct_field.field = number
    found.selection.root_reference.SetInParent()
    return found


def column_of(expression: Expression) -> int | None:
    """The column that an expression is; None if it is something else."""
    if expression.WhichOneof("rex_type") != "selection":
        return None
    reference = expression.selection.direct_reference
    if not reference.HasField("struct_field") or reference.struct_field.HasField("child"):
        return None
    return reference.struct_field.field


def columns_in(expression: Message) -> set[int]:
    """The columns that an expression depends on."""
    return {each.struct_field.field for each in _references(expression)}


def columns_read(rel: Rel, wanted: Set[int]) -> Set[int] | None:
    """The columns of its table that some columns of a relation depend on; None if that is not known."""
    kind = str(rel.WhichOneof("rel_type"))
    node = getattr(rel, kind)
    if kind == "read" and not node.HasField("projection") and not node.common.HasField("emit"):
        return wanted
    if kind == "filter" and not node.common.HasField("emit"):
        return columns_read(node.input, wanted | columns_in(node.condition))
    if kind == "project":
        inner = width(node.input)
        places = node.common.emit.output_mapping if node.common.HasField("emit") else range(width(rel))
        numbers = {places[each] for each in wanted}
        used = (columns_in(node.expressions[each - inner]) for each in numbers if each >= inner)
        return columns_read(node.input, {each for each in numbers if each < inner}.union(*used))
    return None


def shifted(expression: Expression, by: int) -> Expression:
    """An expression on columns that have moved."""
    found = Expression()
    found.CopyFrom(expression)
    for reference in _references(found):
        reference.struct_field.field += by
    return found


def contains(message: Message, field: str) -> bool:
    """Whether an expression has a part of this kind, at whatever depth."""
    return any(name == field or contains(part, field) for name, part in _parts(message))


def parts_named(message: Message, field: str) -> Iterator[Message]:
    """All parts of this kind in an expression."""
    for name, part in _parts(message):
        if name == field:
            yield part
        yield from parts_named(part, field)


def project(rel: Rel, expressions: Sequence[Expression], *, keeps: bool = False) -> Rel:
    """A relation of these expressions; behind its own columns if ``keeps``."""
    found = Rel()
    found.project.input.CopyFrom(rel)
    found.project.expressions.extend(expressions)
    own = width(rel)
    found.project.common.emit.output_mapping.extend(range(0 if keeps else own, own + len(expressions)))
    return found


def fetch(rel: Rel, *, offset: int, count: int | None) -> Rel:
    """Rows ``offset`` to ``offset + count`` of a relation."""
    found = Rel()
    found.fetch.input.CopyFrom(rel)
    found.fetch.offset_expr.literal.i64 = offset
    if count is not None:
        found.fetch.count_expr.literal.i64 = count
    return found


def fetch_bounds(rel: Rel) -> tuple[int, int | None]:
    """The offset and the count of a ``fetch``."""
    node = rel.fetch
    count = node.count_expr.literal.i64 if node.HasField("count_expr") else None
    return node.offset_expr.literal.i64, count


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    """No rows of these types."""
    return pa.record_batch([pa.nulls(0, field.type) for field in schema], schema=schema)


def cast(expression: Expression, to: Type) -> Expression:
    """An expression as another type."""
    found = Expression()
    found.cast.type.CopyFrom(to)
    found.cast.input.CopyFrom(expression)
    found.cast.failure_behavior = Expression.Cast.FAILURE_BEHAVIOR_THROW_EXCEPTION
    return found


def conjuncts(expression: Expression, functions: Functions) -> Iterator[Expression]:
    """The parts of an expression that must all be true."""
    if functions.name(expression) == "and":
        for argument in expression.scalar_function.arguments:
            yield from conjuncts(argument.value, functions)
    else:
        yield expression


def direction(sort: SortField) -> str:
    """The order of a key, in SQL.

    :raises QueryProblem: for an order that SQL does not have.
    """
    found = _DIRECTIONS.get(sort.direction)
    if found is None:
        raise QueryProblem("rows are sorted ascending or descending, with nulls first or last")
    return found


class Functions:
    """The functions of a plan, which its expressions name by numbers."""

    def __init__(self, extensions: Iterable[SimpleExtensionDeclaration]) -> None:
        # DataFusion writes them in any order; equal queries are equal bytes here
        self._declared = sorted(extensions, key=lambda each: each.extension_function.function_anchor)
        self._names = {
            each.extension_function.function_anchor: each.extension_function.name.partition(":")[0]
            for each in self._declared
        }

    def name(self, expression: Expression) -> str:
        """Return the name of the scalar function that an expression calls; empty if it is no call."""
        if expression.WhichOneof("rex_type") != "scalar_function":
            return ""
        return self._names[expression.scalar_function.function_reference]

    def name_of(self, measure: AggregateFunction) -> str:
        """Return the name of an aggregate function."""
        return self._names[measure.function_reference]

    def number(self, name: str) -> int:
        """Return the number of a function; declare the function if necessary."""
        for number, found in self._names.items():
            if found == name:
                return number
        declared = SimpleExtensionDeclaration()
        number = declared.extension_function.function_anchor = max(self._names, default=-1) + 1
        declared.extension_function.name = self._names[number] = name
        declared.extension_function.extension_urn_reference = 0xFFFFFFFF
        self._declared.append(declared)
        return number

    def call(self, name: str, *arguments: Expression) -> Expression:
        """A call of a scalar function."""
        found = Expression()
        found.scalar_function.function_reference = self.number(name)
        found.scalar_function.arguments.extend(FunctionArgument(value=each) for each in arguments)
        return found

    def measure(self, name: str, argument: Expression) -> AggregateRel.Measure:
        """An aggregate."""
        found = AggregateRel.Measure()
        found.measure.function_reference = self.number(name)
        found.measure.invocation = AggregateFunction.AGGREGATION_INVOCATION_ALL
        found.measure.arguments.append(FunctionArgument(value=argument))
        return found

    def plan(self, rel: Rel, names: Sequence[str] | None) -> bytes:
        """A whole plan, whose columns have these names, or those of the relation."""
        root = PlanRel(rel=rel) if names is None else PlanRel(root=RelRoot(input=rel, names=names))
        found: bytes = Plan(extensions=self._declared, relations=[root]).SerializeToString()
        return found


def _references(expression: Message) -> Iterator[Expression.ReferenceSegment]:
    for part in parts_named(expression, "selection"):
        if isinstance(part, Expression.FieldReference) and part.direct_reference.HasField("struct_field"):
            yield part.direct_reference


def _parts(message: Message) -> Iterator[tuple[str, Message]]:
    for field, value in message.ListFields():
        for part in value if field.is_repeated else (value,):
            if isinstance(part, Message):
                yield field.name, part
