"""Engine: what tasks do with tables: run a fragment, and divide rows by a hash or by ranges of their keys.

DataFusion does it, so that types, equality and the order of values are those by which it has planned the query; Arrow
sorts where both have the same order. A task has one thread: a worker has its own processors.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
from datafusion import RuntimeEnvBuilder, SessionConfig, SessionContext, column
from datafusion.substrait import Consumer, Serde

from farcall_analytics.relations import QueryProblem, empty_batch
from farcall_common.errors import ConfigurationError

_NUMBER = "number"
_TIE = "tie"
_SPILLED_ROWS: Final = 8192
"""Rows of a batch if memory is limited: DataFusion spills whole batches to the disk."""
_RESERVATION: Final = "datafusion.execution.sort_spill_reservation_bytes"
_MERGE_BYTES: Final = 10_000_000
"""Bytes of a limited memory that are reserved for the merge of sorted runs, but at most a quarter of the memory."""

_used_by = 0


def require_threads() -> None:
    """Begin to use DataFusion and storages, whose threads a fork of this process would lack: it would wait forever.

    :raises ConfigurationError: in a fork of a process that has begun to use them.
    """
    global _used_by
    if _used_by not in (0, os.getpid()):
        raise ConfigurationError(
            "This process is the fork of one that has used farcall_analytics, and lacks the threads of that one.",
            hint="Use ProcessPoolExecutor(mp_context=multiprocessing.get_context('forkserver')), or Farcall's Engine.",
        )
    _used_by = os.getpid()


def run(
    fragment: bytes,
    tables: Mapping[str, pa.Table],
    schema: pa.Schema,
    *,
    memory: int | None = None,
    only: Sequence[int] | None = None,
) -> pa.Table:
    """The rows of a fragment.

    :param fragment: a Substrait plan. ``tables``: that it reads, by name. ``schema``: of its rows.
    :param only: the columns that are wanted; others are not computed.
    :param memory: bytes beyond which sorts, groups and joins use the disk.
    :raises QueryProblem: if the query is the reason, as when it divides by zero.
    :raises MemoryError, OSError: if memory or the disk do not suffice.
    """
    context = _context(memory)
    for name, table in tables.items():
        _register(context, name, table if memory is None else _in_batches(table))
    with _errors():
        logical = Consumer.from_substrait_plan(context, Serde.deserialize_bytes(fragment))
        frame = context.create_dataframe_from_logical_plan(logical)
        if only is not None:
            schema = pa.schema([schema.field(number) for number in only])
            frame = frame.select(*map(column, schema.names))
        return frame.to_arrow_table().cast(schema)


def divide_by_hash(table: pa.Table, keys: Sequence[int], partitions: int) -> list[pa.Table]:
    """The rows of a table in so many others: those with the same keys are in the same one; without keys, evenly."""
    if partitions == 1:
        return [table]
    if not keys:
        rows = table.num_rows
        return _pieces(table, [number * rows // partitions for number in range(1, partitions)])
    context = _context(None)
    context.enable_spark_functions()
    found = _keys(table, keys)
    found = found.cast(pa.schema([field.with_type(_hashed_as(field.type)) for field in found.schema]), safe=False)
    _register(context, "rows", found)
    hashed = f"xxhash64({', '.join(found.column_names)})"
    query = f"select ({hashed} % {partitions} + {partitions}) % {partitions} as number from rows"  # noqa: S608 - own names
    with _errors():
        numbers = context.sql(query).to_arrow_table()[_NUMBER].combine_chunks()
    counts = dict(zip(*map(pa.Array.to_pylist, pc.value_counts(numbers).flatten()), strict=True))
    ends = list(itertools.accumulate(counts.get(number, 0) for number in range(partitions)))
    return _pieces(_take(table, pc.sort_indices(numbers)), ends[:-1])


def sort(table: pa.Table, keys: Sequence[int], directions: Sequence[str]) -> pa.Table:
    """The rows of a table in order.

    :param keys: columns. ``directions``: their orders, in SQL.
    """
    return _take(table, _places(_keys(table, keys), directions))


def sample(table: pa.Table, keys: Sequence[int], count: int, seed: int) -> pa.Table:
    """The keys of so many rows at random, with a random number each."""
    chosen = _keys(table, keys)
    draw = random.Random(seed)  # noqa: S311 - no secret
    if chosen.num_rows > count:
        chosen = chosen.take(pa.array(draw.sample(range(chosen.num_rows), count)))
    return chosen.append_column(_TIE, pa.array([draw.random() for _ in range(chosen.num_rows)], pa.float64()))


def bounds_of(samples: Sequence[pa.Table], directions: Sequence[str], partitions: int) -> pa.Table:
    """The keys between ranges that hold about as many rows each; none if there are no rows.

    :param samples: of all tasks. ``directions``: of the keys, in SQL.
    """
    table = pa.concat_tables(samples)
    ordered = table.take(_places(table, directions))
    places = [number * ordered.num_rows // partitions for number in range(1, partitions)]
    return ordered.take(places) if ordered.num_rows else ordered


def divide_by_range(
    table: pa.Table, keys: Sequence[int], directions: Sequence[str], bounds: pa.Table, partitions: int, seed: int
) -> list[pa.Table]:
    """The rows of a table in so many ranges.

    Rows with equal keys are spread over several ranges if they are many: each has a random number behind its keys, as
    the bounds have. So one key with half of the rows is no problem.
    """
    compared = _keys(table, keys)
    compared = compared.append_column(_TIE, pc.random(compared.num_rows, initializer=seed))
    order = _places(pa.concat_tables([compared, bounds.cast(compared.schema)]), directions)
    is_bound = pc.greater_equal(order, table.num_rows)  # where a bound comes to lie, a range ends
    ends = [place - number for number, place in enumerate(pc.indices_nonzero(is_bound).to_pylist())]
    ordered = _take(table, order.filter(pc.invert(is_bound)))
    return _pieces(ordered, [*ends, *[table.num_rows] * (partitions - 1 - len(ends))])


def _places(keys: pa.Table, directions: Sequence[str]) -> pa.Array:
    """The numbers of rows in their order. ``keys``: a column for each direction, and more that are ascending."""
    words = [each.split() for each in directions]
    types = [field.type for field in keys.schema if field.name != _TIE]
    has_others = any(pa.types.is_floating(each) or pa.types.is_nested(each) for each in types)
    if all(last == "last" for *_, last in words) and not has_others:
        # Arrow is faster, but has another place for what is not a number
        orders = ["descending" if direction == "desc" else "ascending" for direction, *_ in words]
        names = zip(keys.column_names, [*orders, *["ascending"] * (keys.num_columns - len(orders))], strict=True)
        return pc.sort_indices(keys, sort_keys=list(names))
    context = _context(None)
    _register(context, "rows", keys.append_column(_NUMBER, pa.array(range(keys.num_rows), pa.int64())))
    order = [f"{name} {each}" for name, each in itertools.zip_longest(keys.column_names, directions, fillvalue="")]
    query = f"select {_NUMBER} from rows order by {', '.join(order)}"  # noqa: S608 - own names
    with _errors():
        return context.sql(query).to_arrow_table()[_NUMBER].combine_chunks()


def _take(table: pa.Table, places: pa.Array) -> pa.Table:
    """Some rows of a table: from one chunk, as Arrow takes each of several ones by itself."""
    return table.combine_chunks().take(places)


def _keys(table: pa.Table, keys: Sequence[int]) -> pa.Table:
    """The columns of keys, under names of their own."""
    return table.select(list(keys)).rename_columns([f"k{number}" for number in range(len(keys))])


def _hashed_as(of: pa.DataType) -> pa.DataType:
    """The type as which the hash takes values; equal ones stay equal, also of types with fewer digits."""
    if pa.types.is_integer(of) or pa.types.is_time64(of) or pa.types.is_duration(of):
        return pa.int64()
    if pa.types.is_time32(of):
        return pa.int32()
    if pa.types.is_floating(of):
        return pa.float64()
    return pa.string() if pa.types.is_decimal256(of) else of


def _pieces(table: pa.Table, ends: Sequence[int]) -> list[pa.Table]:
    return [table.slice(start, end - start) for start, end in itertools.pairwise([0, *ends, table.num_rows])]


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """What DataFusion says, as the error that it is."""
    try:
        yield
    except Exception as error:  # PyO3 has no narrower class
        text = str(error).removeprefix("DataFusion error: ")
        if found := re.search(r"\(os error (\d+)\)", text):
            raise OSError(int(found[1]), text) from error
        raise (MemoryError if "Resources exhausted" in text else QueryProblem)(text) from error


def _context(memory: int | None) -> SessionContext:
    runtime = RuntimeEnvBuilder().with_disk_manager_os()
    config = SessionConfig().with_target_partitions(1)
    if memory is not None:
        runtime = runtime.with_fair_spill_pool(memory)
        config = config.set(_RESERVATION, str(min(_MERGE_BYTES, memory // 4)))
    return SessionContext(config, runtime)


def _in_batches(table: pa.Table) -> pa.Table:
    """A copy in small batches, each with memory of its own: of a slice DataFusion counts all that it is a part of."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=_SPILLED_ROWS)
    with pa.ipc.open_stream(sink.getvalue()) as batches:
        return batches.read_all()


def _register(context: SessionContext, name: str, table: pa.Table) -> None:
    batches: list[Any] = table.to_batches() or [empty_batch(table.schema)]
    context.register_record_batches(name, [batches])
