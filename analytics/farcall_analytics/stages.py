"""Stages: a query as fragments that tasks run, with exchanges of rows between them. No I/O.

DataFusion parses and optimizes a query, and gives it as a Substrait plan. This is cut wherever rows have to move:
behind a join, a group or a sort, rows with the same keys, or of the same range, are in one task. What lies between two
cuts is a fragment: a Substrait plan of its own, whose tables are what the task reads. Aggregates are computed in two
steps where that is possible, and the small side of a join is read by all tasks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import pyarrow as pa
from datafusion import SessionConfig, SessionContext
from datafusion.substrait import Consumer, Producer, Serde
from substrait.algebra_pb2 import AggregateFunction, AggregateRel, Expression, JoinRel, Rel, SetRel
from substrait.plan_pb2 import Plan
from substrait.type_pb2 import NamedStruct, Type

from farcall_analytics import relations
from farcall_analytics.relations import Functions, QueryProblem, column, column_of, empty_batch, width

DIRECT_SUBQUERIES: Final = "datafusion.optimizer.enable_physical_uncorrelated_scalar_subquery"
"""The setting that keeps subqueries inside expressions, from which they cannot be cut."""
BROADCAST_BYTES: Final = 16_000_000
"""Most bytes of a side of a join that all tasks read completely."""
_FILTERED_PART: Final = 0.3
"""Expected fraction of rows that pass a filter."""
_GROUPED_PART: Final = 0.3
_ROW_BYTES: Final = 1_000.0
_COMBINED_BY: Final = {"sum": "sum", "count": "sum", "min": "min", "max": "max"}
"""Function that combines the partial results of each aggregate."""

_NULLS_EQUAL: Final = "IS NOT DISTINCT FROM"
_SCALAR: Final = "__scalar_sq"
_SAME: Final = "is_not_distinct_from"
_NO_VALUE: Final = Expression(literal=Expression.Literal(boolean=False))
_NULL_AWARE: Final = re.compile(r"^ *Left(Anti|Mark) Join: .* null_aware$", re.MULTILINE)
_INNER: Final = JoinRel.JOIN_TYPE_INNER
_RIGHT_MAY_BE_WHOLE: Final = {
    _INNER,
    JoinRel.JOIN_TYPE_LEFT,
    JoinRel.JOIN_TYPE_LEFT_SEMI,
    JoinRel.JOIN_TYPE_LEFT_ANTI,
    JoinRel.JOIN_TYPE_LEFT_SINGLE,
    JoinRel.JOIN_TYPE_LEFT_MARK,
}
_LEFT_MAY_BE_WHOLE: Final = {
    _INNER,
    JoinRel.JOIN_TYPE_RIGHT,
    JoinRel.JOIN_TYPE_RIGHT_SEMI,
    JoinRel.JOIN_TYPE_RIGHT_ANTI,
    JoinRel.JOIN_TYPE_RIGHT_SINGLE,
    JoinRel.JOIN_TYPE_RIGHT_MARK,
}


class Exchange(NamedTuple):
    """How the rows of a stage are divided among the tasks of its consumer.

    :param kind: by a hash of keys (without keys: evenly), by ranges of keys, or not at all.
    :param keys: columns of the fragment. Those from ``width`` on serve as keys only, and are not passed on.
    :param directions: of keys of ranges, in SQL.
    """

    kind: Literal["hash", "range", "single"]
    width: int
    keys: tuple[int, ...] = ()
    directions: tuple[str, ...] = ()


class Source(NamedTuple):
    """A table of a fragment.

    :param name: in the fragment.
    :param table, columns: of the query, of which the task reads a share. ``sampled``: the columns that keys of ranges
        depend on; a sample may have nulls in others. Empty: perhaps all.
    :param stage: whose rows the task reads: its partition of them, or all if ``whole``.
    :param keys, directions: by which the task sorts them, as those of an :class:`Exchange`.
    """

    name: str
    table: str = ""
    columns: tuple[str, ...] = ()
    stage: int = -1
    whole: bool = False
    keys: tuple[int, ...] = ()
    directions: tuple[str, ...] = ()
    sampled: tuple[str, ...] = ()


class Stage(NamedTuple):
    """What some tasks do.

    :param fragment: a Substrait plan.
    :param sources: its tables.
    :param exchange: how rows are divided; None if they are the result.
    :param size: bytes of its rows, estimated.
    :param schema: of its rows. DataFusion itself may give others of tasks without rows.
    :param combiner: of rows that go to one task: a fragment that makes fewer rows of those of several tasks, with the
        same columns; empty if there are no fewer. ``combined``: its table.
    """

    number: int
    fragment: bytes
    sources: tuple[Source, ...]
    exchange: Exchange | None
    size: float
    schema: pa.Schema
    combiner: bytes = b""
    combined: str = ""


class Query(NamedTuple):
    """The stages of a query, each behind those that it reads from."""

    stages: tuple[Stage, ...]

    def consumer(self, number: int) -> Stage:
        """The stage that reads what another one has written."""
        return next(each for each in self.stages if any(source.stage == number for source in each.sources))


def planning_context() -> SessionContext:
    """Return a context for planning queries. Its tables need no rows."""
    return SessionContext(SessionConfig().with_target_partitions(1).set(DIRECT_SUBQUERIES, "false"))


def stages_of(logical_plan: Any, given: Any, context: SessionContext, sizes: Mapping[str, float]) -> Query:
    """The stages of an optimized logical plan.

    :param given: the plan before it was optimized.
    :param context: the context that planned it; see :func:`planning_context`.
    :param sizes: bytes of each table.
    :raises QueryProblem: if it cannot be done in stages.
    """
    if _NULL_AWARE.search(logical_plan.display_indent()):
        raise QueryProblem(
            "NOT IN (SELECT ...) of columns that may be null is not supported: write NOT EXISTS (SELECT ... WHERE ...)"
        )
    given_count, count = (each.display_indent().count(_NULLS_EQUAL) for each in (given, logical_plan))
    if count < given_count and _SCALAR in logical_plan.display_indent():  # DataFusion forgets it in such joins
        raise QueryProblem(
            f"a join with {_NULLS_EQUAL} beside a subquery is not supported: write a = b OR (a IS NULL AND b IS NULL)"
        )
    try:
        plan = Plan.FromString(Producer.to_substrait_plan(logical_plan, context).encode())
    except Exception as error:  # PyO3 has no narrower class
        raise QueryProblem(f"not supported: {error}") from error
    root = plan.relations[0].root
    if len(root.names) == width(root.input):  # else those of fields inside columns are among them
        _check_names(root.names)
    planner = _Planner(context, Functions(plan.extensions), sizes)
    last = planner.open(root.input)
    planner.close(last, None, names=root.names)
    _check_names(planner.stages[-1].schema.names)
    return Query(tuple(planner.stages))


def _check_names(names: Sequence[str]) -> None:
    twice = sorted({each for each in names if list(names).count(each) > 1})
    if twice:
        raise QueryProblem(f"several columns have the name {', '.join(twice)}: give them others")


@dataclasses.dataclass
class _Open:
    """A stage that is not complete.

    :param hashed: the columns by whose hash its rows are divided among its tasks, in their order.
    :param is_single: whether it has one task only. ``size``: see :class:`Stage`.
    """

    rel: Rel
    sources: tuple[Source, ...]
    size: float
    hashed: tuple[int, ...] | None = None
    is_single: bool = False

    def __post_init__(self) -> None:
        self.width = width(self.rel)


class _Planner:
    def __init__(self, context: SessionContext, functions: Functions, sizes: Mapping[str, float]) -> None:
        self.stages: list[Stage] = []
        self._context = context
        self._functions = functions
        self._sizes = sizes
        self._tables = 0

    # -- cuts ----------------------------------------------------------------------------------------------------------

    def close(self, done: _Open, exchange: Exchange | None, *, names: Sequence[str] = ()) -> int:
        """Complete a stage; its number."""
        number = len(self.stages)
        # Names differ between all tables of a fragment: DataFusion takes columns of the same name for one another when
        # it moves filters below joins.
        own = names or self._names(done.rel, f"c{number}_")
        schema = plain_schema(self.schema(done.rel, own))
        fragment = self._functions.plan(done.rel, own)
        self.stages.append(Stage(number, fragment, done.sources, exchange, done.size, schema))
        return number

    def schema(self, rel: Rel, names: Sequence[str] | None) -> pa.Schema:
        """The columns of a relation, under these names or those that they have.

        :raises QueryProblem: if DataFusion cannot read its own plan.
        """
        try:
            plan = Serde.deserialize_bytes(self._functions.plan(rel, names))
            logical = Consumer.from_substrait_plan(self._context, plan)
            return self._context.create_dataframe_from_logical_plan(logical).schema()
        except Exception as error:  # PyO3 has no narrower class
            raise QueryProblem(f"not supported: {error}") from error

    def _names(self, rel: Rel, prefix: str) -> list[str]:
        """Names for the columns of a relation, and behind each those of the fields inside it."""
        fields = self.schema(rel, None)
        return [
            name for number, field in enumerate(fields) for name in (f"{prefix}{number}", *_inner_names(field.type))
        ]

    def _cut(self, done: _Open, keys: Sequence[Expression] | None, *, whole: bool = False) -> _Open:
        """Divide the rows of a stage by a hash of keys, evenly if there are none, or give all of them to one task."""
        if not done.width:  # rows without columns could not be counted
            moved = self._cut(
                _Open(relations.project(done.rel, [_NO_VALUE]), done.sources, done.size), keys, whole=whole
            )
            moved.rel.read.projection.select.SetInParent()
            return dataclasses.replace(moved, hashed=None)
        if keys is None:
            number = self.close(done, Exchange("single", done.width))
            return self._read(number, done, hashed=None, whole=whole, is_single=not whole)
        keyed, numbers = _with_keys(done, keys)
        number = self.close(keyed, Exchange("hash", done.width, numbers))
        hashed = numbers if all(each < done.width for each in numbers) and numbers else None
        return self._read(number, done, hashed=hashed)

    def _combine(self, moved: _Open, rel: Rel) -> None:
        """Say how rows of several tasks become fewer before one task reads them all.

        :param moved: reads them. ``rel``: reads what that reads.
        """
        if not moved.width:
            return  # rows are counted by a column that is not there any more
        [source] = moved.sources
        stage = self.stages[source.stage]
        fragment = self._functions.plan(rel, self._names(rel, f"c{stage.number}_"))
        self.stages[source.stage] = stage._replace(combiner=fragment, combined=source.name)

    def _read(
        self, number: int, done: _Open, *, hashed: tuple[int, ...] | None, whole: bool = False, is_single: bool = False
    ) -> _Open:
        """A new stage that reads what another one has written."""
        source = Source(self._new_name(), stage=number, whole=whole)
        read = self._table(source.name, pa.schema(list(self.stages[number].schema)[: done.width]))
        return _Open(read, (source,), done.size, hashed, is_single)

    def _new_name(self) -> str:
        self._tables += 1
        return f"i{self._tables}"

    def _table(self, name: str, schema: pa.Schema) -> Rel:
        """A relation of all columns of a new table."""
        self._context.register_record_batches(name, [[empty_batch(schema)]])
        produced = Producer.to_substrait_plan(self._context.table(name).logical_plan(), self._context).encode()
        found: Rel = Plan.FromString(produced).relations[0].root.input
        while found.WhichOneof("rel_type") != "read":
            found = found.project.input
        return found

    # -- relations -----------------------------------------------------------------------------------------------------

    def open(self, rel: Rel) -> _Open:
        """A relation as the last part of a stage, behind the ones that it reads from."""
        kind = str(rel.WhichOneof("rel_type"))
        build = {
            "read": self._scan,
            "filter": self._filter,
            "project": self._project,
            "join": self._join,
            "cross": self._join,
            "aggregate": self._aggregate,
            "sort": self._sort,
            "fetch": self._fetch,
            "set": self._set,
        }.get(kind)
        if build is None:
            raise QueryProblem(f"{kind} is not supported")
        if kind != "set" and relations.contains(_own_expressions(rel), "subquery"):
            raise QueryProblem("a subquery in this place is not supported: write it as a join")
        return build(rel)

    def _scan(self, rel: Rel) -> _Open:
        read = rel.read
        if not read.HasField("named_table"):
            return _Open(rel, (), 0.0, is_single=True)  # values in the query
        table = read.named_table.names[-1]
        all_columns = self._context.table(table).schema()
        names = all_columns.names
        if read.HasField("projection"):
            names = [names[item.field] for item in read.projection.select.struct_items]
        # one column at least, so that rows can be counted
        names_read = names or [all_columns.names[0]]
        schema = pa.schema([all_columns.field(each) for each in names_read])
        source = Source(self._new_name(), table, tuple(names_read))
        part = len(names_read) / len(all_columns)
        found = self._table(source.name, schema)
        if not names:
            found.read.projection.select.SetInParent()
        return _Open(found, (source,), self._sizes[table] * part)

    def _filter(self, rel: Rel) -> _Open:
        inner = self.open(rel.filter.input)
        return dataclasses.replace(inner, rel=_on(rel, inner.rel), size=inner.size * _FILTERED_PART)

    def _project(self, rel: Rel) -> _Open:
        inner = self.open(rel.project.input)
        windows = [
            list(part.partitions)
            for part in relations.parts_named(_own_expressions(rel), "window_function")
            if isinstance(part, Expression.WindowFunction)
        ]
        if windows and not inner.is_single:
            inner = self._cut(inner, _common(windows))
        moved = _moved(rel, inner.width)
        hashed = None if inner.hashed is None else tuple(moved.get(each, -1) for each in inner.hashed)
        if hashed is not None and -1 in hashed:
            hashed = None
        size = inner.size * min(1.0, width(rel) / max(1, inner.width))
        return dataclasses.replace(inner, rel=_on(rel, inner.rel), hashed=hashed, size=size)

    def _join(self, rel: Rel) -> _Open:
        join = rel.join if rel.HasField("join") else JoinRel(left=rel.cross.left, right=rel.cross.right, type=_INNER)
        left, right = self.open(join.left), self.open(join.right)
        left_keys, right_keys = self._equal_keys(join, left.width)
        kind = join.type
        if left.is_single and right.is_single:
            return self._joined(join, left, self._cut(right, None, whole=True))
        smaller_left = left.size < right.size and not left.is_single
        fits_right = kind in _RIGHT_MAY_BE_WHOLE and (right.size <= BROADCAST_BYTES or not left_keys)
        fits_left = kind in _LEFT_MAY_BE_WHOLE and (left.size <= BROADCAST_BYTES or not left_keys)
        if fits_right and not (fits_left and smaller_left):
            return self._joined(join, left, self._cut(right, None, whole=True))
        if fits_left:
            return self._joined(join, self._cut(left, None, whole=True), right)
        if not left_keys:
            left, right = (each if each.is_single else self._cut(each, None) for each in (left, right))
            return self._joined(join, left, right)
        left_keys, right_keys = self._same_types(left, left_keys, right, right_keys)
        places = {column_of(each): place for place, each in enumerate(left_keys)}
        if left.hashed and all(each in places for each in left.hashed):  # its rows are where they should be
            keys = [right_keys[places[each]] for each in left.hashed]
            return self._joined(join, left, self._cut(right, keys))
        return self._joined(join, self._cut(left, left_keys), self._cut(right, right_keys))

    def _equal_keys(self, join: JoinRel, left_width: int) -> tuple[list[Expression], list[Expression]]:
        """Expressions of the left and the right side that must be equal."""
        lefts, rights = [], []
        for each in relations.conjuncts(join.expression, self._functions):
            if self._functions.name(each) not in ("equal", _SAME):
                continue
            sides = [argument.value for argument in each.scalar_function.arguments]
            used = [relations.columns_in(side) for side in sides]
            if used[0] and used[1] and min(used[0]) >= left_width > max(used[1]):
                sides.reverse()
                used.reverse()
            if used[0] and used[1] and max(used[0]) < left_width <= min(used[1]):
                lefts.append(sides[0])
                rights.append(relations.shifted(sides[1], -left_width))
        return lefts, rights

    def _same_types(
        self, left: _Open, left_keys: list[Expression], right: _Open, right_keys: list[Expression]
    ) -> tuple[list[Expression], list[Expression]]:
        """The keys of both sides, of which equal values have the same hash: DataFusion may leave them different types.

        :raises QueryProblem: if they cannot be had.
        """
        types = [
            list(map(_hash_type, self.schema(relations.project(side.rel, keys), None).types))
            for side, keys in ((left, left_keys), (right, right_keys))
        ]
        number = Type(fp64=Type.FP64(nullability=Type.NULLABILITY_NULLABLE))
        found: tuple[list[Expression], list[Expression]] = [], []
        for own, other, left_key, right_key in zip(*types, left_keys, right_keys, strict=True):
            keys = [left_key, right_key]
            if {own, other} == {"integer", "floating"}:
                keys = [relations.cast(each, number) for each in keys]
            elif own != other:
                raise QueryProblem(f"a join of {own} with {other} is not supported: cast one of them")
            for side, key in zip(found, keys, strict=True):
                side.append(key)
        return found

    def _without_mixed_nulls(self, expression: Expression) -> Expression:
        """A join condition in which nulls are equal everywhere, or nowhere but in an ``or``: DataFusion takes all parts
        of a condition alike when it reads them."""
        functions = self._functions
        parts = list(relations.conjuncts(expression, functions))
        if {functions.name(each) for each in parts} >= {"equal", _SAME}:
            parts = [self._same(each) if functions.name(each) == _SAME else each for each in parts]
            return functions.call("and", *parts)
        return expression

    def _same(self, expression: Expression) -> Expression:
        left, right = (argument.value for argument in expression.scalar_function.arguments)
        call = self._functions.call
        both_null = call("and", call("is_null", left), call("is_null", right))
        return call("or", call("equal", left, right), both_null)

    def _joined(self, join: JoinRel, left: _Open, right: _Open) -> _Open:
        rel = Rel(join=join)
        rel.join.left.CopyFrom(left.rel)
        rel.join.right.CopyFrom(right.rel)
        if not rel.join.HasField("expression"):
            rel.join.expression.literal.boolean = True
        rel.join.expression.CopyFrom(self._without_mixed_nulls(rel.join.expression))
        whole_left = any(each.whole for each in left.sources) and len(left.sources) == 1
        own, other = (right, left) if whole_left else (left, right)
        hashed: tuple[int, ...] | None = None
        if not whole_left and join.type in _RIGHT_MAY_BE_WHOLE:
            hashed = left.hashed
        elif whole_left and join.type == _INNER and right.hashed is not None:
            hashed = tuple(each + left.width for each in right.hashed)
        size = max(left.size, right.size)
        is_single = own.is_single and (other.is_single or any(each.whole for each in other.sources))
        return _Open(rel, (*left.sources, *right.sources), size, hashed, is_single)

    def _aggregate(self, rel: Rel) -> _Open:
        node = rel.aggregate
        inner = self.open(node.input)
        keys = [column_of(each) for each in node.grouping_expressions]
        is_whole = inner.is_single or (inner.hashed is not None and set(inner.hashed) <= set(keys))
        one_set = len(node.groupings) <= 1
        if is_whole and (one_set or inner.is_single):
            return self._grouped(rel, inner)
        if not one_set:  # a row belongs to groups in several partitions
            return self._grouped(rel, self._cut(inner, None))
        if all(self._can_be_parted(each) for each in node.measures):
            return self._in_two_steps(rel, inner)
        return self._grouped(rel, self._cut(inner, list(node.grouping_expressions) or None))

    def _grouped(self, rel: Rel, inner: _Open) -> _Open:
        places = {column_of(each): place for place, each in enumerate(rel.aggregate.grouping_expressions)}
        hashed = None
        if inner.hashed is not None and all(each in places for each in inner.hashed):
            hashed = tuple(places[each] for each in inner.hashed)
        part = _GROUPED_PART if rel.aggregate.grouping_expressions else 0.0
        return _Open(_on(rel, inner.rel), inner.sources, inner.size * part + _ROW_BYTES, hashed, inner.is_single)

    def _can_be_parted(self, measure: AggregateRel.Measure) -> bool:
        found = measure.measure
        name = self._functions.name_of(found)
        is_distinct = found.invocation == AggregateFunction.AGGREGATION_INVOCATION_DISTINCT
        return (name in _COMBINED_BY or name == "avg") and not is_distinct and not found.sorts

    def _in_two_steps(self, rel: Rel, inner: _Open) -> _Open:
        """Aggregate the rows of each task, exchange the groups, and put those with the same keys together."""
        functions, node = self._functions, rel.aggregate
        count = len(node.grouping_expressions)
        types = self._types(_on(rel, inner.rel))
        first, second = Rel(), Rel()
        first.CopyFrom(rel)
        first.aggregate.input.CopyFrom(inner.rel)
        del first.aggregate.measures[:]
        results: list[Expression] = [column(number) for number in range(count)]
        for place, measure in enumerate(node.measures, count):
            name = functions.name_of(measure.measure)
            parts = ["sum", "count"] if name == "avg" else [name]
            numbers = []
            for part in parts:
                numbers.append(count + len(first.aggregate.measures))
                each = first.aggregate.measures.add()
                each.CopyFrom(measure)
                each.measure.function_reference = functions.number(part)
                second.aggregate.measures.append(functions.measure(_COMBINED_BY[part], column(numbers[-1])))
            found = column(numbers[0])
            if name == "avg":
                found = functions.call("divide", found, relations.cast(column(numbers[1]), _number_like(types, place)))
            of = types.struct.types[place]
            is_nested = of.WhichOneof("kind") in ("struct", "list", "map")
            results.append(found if is_nested else relations.cast(found, of))
        groups = _Open(first, inner.sources, inner.size * (_GROUPED_PART if count else 0.0) + _ROW_BYTES)
        moved = self._cut(groups, [column(number) for number in range(count)] or None)
        second.aggregate.input.CopyFrom(moved.rel)
        grouping = second.aggregate.groupings.add()
        for number in range(count):
            second.aggregate.grouping_expressions.append(column(number))
            grouping.expression_references.append(number)
        if not count:
            self._combine(moved, second)
        done = relations.project(second, results)
        return _Open(done, moved.sources, moved.size, moved.hashed, moved.is_single)

    def _types(self, rel: Rel) -> NamedStruct:
        """The types of the columns of a relation."""
        read = self._table(self._new_name(), self.schema(rel, self._names(rel, "c"))).read
        found = NamedStruct()
        found.CopyFrom(read.base_schema)
        return found

    def _sort(self, rel: Rel) -> _Open:
        inner = self.open(rel.sort.input)
        if inner.is_single:
            return dataclasses.replace(inner, rel=_on(rel, inner.rel))
        keyed, numbers = _with_keys(inner, [each.expr for each in rel.sort.sorts])
        directions = tuple(map(relations.direction, rel.sort.sorts))
        keyed = dataclasses.replace(keyed, sources=self._sampled(keyed, numbers))
        number = self.close(keyed, Exchange("range", inner.width, numbers, directions))
        moved = self._read(number, inner, hashed=None)
        if max(numbers) < inner.width:
            [source] = moved.sources
            return dataclasses.replace(moved, sources=(source._replace(keys=numbers, directions=directions),))
        return dataclasses.replace(moved, rel=_on(rel, moved.rel))

    def _sampled(self, keyed: _Open, keys: Sequence[int]) -> tuple[Source, ...]:
        """The sources of a stage, with the columns that its keys depend on."""
        read = relations.columns_read(keyed.rel, set(keys))
        if read is None or len(keyed.sources) != 1 or not keyed.sources[0].table:
            return keyed.sources
        [source] = keyed.sources
        fields = self._context.table(source.name).schema()
        needed = [
            name
            for number, (name, field) in enumerate(zip(source.columns, fields, strict=True))
            if number in read or not field.nullable or pa.types.is_nested(field.type)
        ]
        return (source._replace(sampled=tuple(needed)),)

    def _fetch(self, rel: Rel) -> _Open:
        offset, count = relations.fetch_bounds(rel)
        below = rel.fetch.input
        if below.WhichOneof("rel_type") == "sort" and count is not None:
            inner = self.open(below.sort.input)
            if inner.is_single:
                return dataclasses.replace(
                    inner, rel=relations.fetch(_on(below, inner.rel), offset=offset, count=count)
                )
            # the first rows of each task are enough
            firsts = relations.fetch(_on(below, inner.rel), offset=0, count=offset + count)
            size = min(inner.size, (offset + count) * _ROW_BYTES)
            moved = self._cut(_Open(firsts, inner.sources, size), None)
            self._combine(moved, relations.fetch(_on(below, moved.rel), offset=0, count=offset + count))
            return dataclasses.replace(moved, rel=relations.fetch(_on(below, moved.rel), offset=offset, count=count))
        inner = self.open(below)
        if not inner.is_single:  # tasks write in the order of their rows, and are read in their own
            if count is not None:
                inner = dataclasses.replace(inner, rel=relations.fetch(inner.rel, offset=0, count=offset + count))
            inner = self._cut(inner, None)
            if count is not None:
                self._combine(inner, relations.fetch(inner.rel, offset=0, count=offset + count))
        return dataclasses.replace(inner, rel=relations.fetch(inner.rel, offset=offset, count=count))

    def _set(self, rel: Rel) -> _Open:
        if rel.set.op != SetRel.SET_OP_UNION_ALL:
            raise QueryProblem("of set operations, only UNION, INTERSECT and EXCEPT of SQL are supported")
        moved = [self._cut(self.open(each), []) for each in rel.set.inputs]
        found = Rel()
        found.set.op = rel.set.op
        found.set.inputs.extend(each.rel for each in moved)
        sources = tuple(source for each in moved for source in each.sources)
        return _Open(found, sources, sum(each.size for each in moved))


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """A schema without the types of strings that DataFusion uses inside."""
    plain = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
    return pa.schema([field.with_type(plain.get(field.type, field.type)) for field in schema])


def _hash_type(of: pa.DataType) -> str:
    """What types have in common whose equal values have the same hash."""
    if pa.types.is_integer(of):
        return "integer"
    if pa.types.is_floating(of):
        return "floating"
    is_text = pa.types.is_string(of) or pa.types.is_large_string(of) or pa.types.is_string_view(of)
    return "string" if is_text else str(of)


def _inner_names(of: pa.DataType) -> list[str]:
    """The names of the fields of a struct, in lists and maps, too."""
    if pa.types.is_struct(of):
        return [name for field in of for name in (field.name, *_inner_names(field.type))]
    if pa.types.is_map(of):
        return [*_inner_names(of.key_type), *_inner_names(of.item_type)]
    return _inner_names(of.value_type) if pa.types.is_nested(of) else []


def _on(rel: Rel, inner: Rel) -> Rel:
    """A relation with another input."""
    found = Rel()
    found.CopyFrom(rel)
    getattr(found, str(rel.WhichOneof("rel_type"))).input.CopyFrom(inner)
    return found


def _own_expressions(rel: Rel) -> Rel:
    """A relation without what it reads from."""
    found = Rel()
    found.CopyFrom(rel)
    node = getattr(found, str(rel.WhichOneof("rel_type")))
    for name in ("input", "left", "right"):
        if name in node.DESCRIPTOR.fields_by_name:
            node.ClearField(name)
    return found


def _with_keys(done: _Open, keys: Sequence[Expression]) -> tuple[_Open, tuple[int, ...]]:
    """A stage with further columns for the keys that are no columns yet; the numbers of all keys."""
    new: list[Expression] = []
    numbers = []
    for key in keys:
        found = column_of(key)
        if found is None:
            found = done.width + len(new)
            new.append(key)
        numbers.append(found)
    rel = relations.project(done.rel, new, keeps=True) if new else done.rel
    return _Open(rel, done.sources, done.size), tuple(numbers)


def _moved(rel: Rel, inner_width: int) -> Mapping[int, int]:
    """Return the positions to which a projection moves the columns of its input."""
    node = rel.project
    mapping = node.common.emit.output_mapping if node.common.HasField("emit") else range(width(rel))
    found: dict[int, int] = {}
    for place, number in enumerate(mapping):
        own = number if number < inner_width else column_of(node.expressions[number - inner_width])
        if own is not None:
            found.setdefault(own, place)
    return found


def _common(windows: Sequence[Sequence[Expression]]) -> list[Expression] | None:
    """The keys by which all window functions divide rows; None if there are none."""
    first, *others = windows
    return [key for key in first if all(key in each for each in others)] or None


def _number_like(types: NamedStruct, place: int) -> Any:
    """The type as which a count divides a sum: that of the mean if it has a fixed number of digits."""
    found = types.struct.types[place].__class__()
    kind = types.struct.types[place].WhichOneof("kind")
    if kind == "decimal":
        found.decimal.precision, found.decimal.scale = 20, 0
        found.decimal.nullability = types.struct.types[place].decimal.nullability
    else:
        found.CopyFrom(types.struct.types[place])
    return found
