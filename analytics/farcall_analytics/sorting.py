"""Sort: the functions that tasks run. Ranges are chosen by a sample, so that all tasks get about as many rows.

Each row has a random number behind its keys. So rows with equal keys are spread over several ranges if they are many:
one key with half of the rows is no problem. Nulls come last, in whichever direction.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from farcall_analytics.exchange import Written
from farcall_analytics.parquet import Share, read_share, write_table
from farcall_analytics.passing import Way, from_stream, read_tables, to_stream, write_tables

_TIE: Final = "farcall tie"
"""The name of the column with random numbers; no user's column begins so."""

Keys = Sequence[tuple[str, str]]
"""Columns, each with ``ascending`` or ``descending``."""


def sample(share: Share, keys: Keys, count: int, seed: int) -> bytes:
    """So many rows of a share at random, keys and random numbers only, as an Arrow stream."""
    table = _with_ties(read_share(share, [name for name, _ in keys]), seed)
    if table.num_rows > count:
        chosen = pc.sort_indices(table[_TIE])[:count]  # the smallest random numbers
        table = table.take(chosen)
        ties = pc.random(table.num_rows, initializer=seed + 1)  # those would all be small
        table = table.set_column(table.schema.get_field_index(_TIE), _TIE, ties)
    return to_stream(table)


def splitters(samples: Sequence[bytes], keys: Keys, partitions: int) -> bytes:
    """The rows between ranges, which hold about as many rows each, as an Arrow stream; none if there are no rows."""
    table = pa.concat_tables([from_stream(each) for each in samples])
    ordered = table.take(pc.sort_indices(table, sort_keys=_order(keys)))
    places = [number * ordered.num_rows // partitions for number in range(1, partitions)]
    return to_stream(ordered.take(places) if ordered.num_rows else ordered)


def partition(
    share: Share, keys: Keys, bounds: bytes, partitions: int, way: Way, task: int, attempt: str, seed: int
) -> Written:
    """Sort a share, and write its part of each range.

    :param bounds: as :func:`splitters` finds them.
    """
    table = _with_ties(read_share(share), seed)
    between = from_stream(bounds)
    compared = [*(name for name, _ in keys), _TIE]
    # The rows between ranges are sorted with the others: where they come to lie, a range ends.
    both = pa.concat_tables([table.select(compared), between.select(compared)])
    order = pc.sort_indices(both, sort_keys=_order(keys))
    is_bound = pc.greater_equal(order, table.num_rows)
    ends = [place - number for number, place in enumerate(pc.indices_nonzero(is_bound).to_pylist())]
    ordered = table.drop_columns([_TIE]).take(order.filter(pc.invert(is_bound)))
    ends += [ordered.num_rows] * (partitions - len(ends))
    ranges = [ordered.slice(start, end - start) for start, end in itertools.pairwise([0, *ends])]
    return write_tables(way, task, attempt, ranges)


def combine(written: Sequence[Written], number: int, keys: Keys, way: Way, output: str) -> int:
    """Merge one range of all tasks, write it to a file, and return its number of rows."""
    table = pa.concat_tables(read_tables(way, written, number))
    order = pc.sort_indices(table, sort_keys=list(keys))
    write_table(output, table.take(order))
    return len(order)


def _with_ties(table: pa.Table, seed: int) -> pa.Table:
    return table.append_column(_TIE, pc.random(table.num_rows, initializer=seed))


def _order(keys: Keys) -> list[tuple[str, str]]:
    return [*keys, (_TIE, "ascending")]
