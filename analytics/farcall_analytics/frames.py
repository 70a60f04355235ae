"""Datasets: tables in files or in memory, and queries on them. Nothing runs before rows are asked for.

Queries are those of DataFusion, whose expressions are used here: ``fa.col("revenue") > 10``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

import pyarrow as pa
from datafusion import DataFrame, Expr, SessionContext, SQLOptions, col
from datafusion import functions as f

from farcall_analytics import bars, jobs
from farcall_analytics.attempts import Executor
from farcall_analytics.bars import Progress
from farcall_analytics.job_plans import Facts, JobPlan, JobPlanner
from farcall_analytics.jobs import Outcome
from farcall_analytics.parquet import Input, Paths, absolute, find_input, find_paths, is_below, shown
from farcall_analytics.profile_files import NODES, assumed_tier, fast_tier_name, profile_of, tier_name
from farcall_analytics.relations import QueryProblem, empty_batch
from farcall_analytics.settings import ON_NODES, Settings
from farcall_analytics.stages import Query, planning_context, stages_of
from farcall_common.errors import ConfigurationError
from farcall_common.objects.node_blocks import SCHEME, is_on_nodes

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

STORAGE: Final = "FARCALL_ANALYTICS_STORAGE"
"""The variable that names the storage of exchanges if a program does not."""
_QUERIES_ONLY: Final = SQLOptions().with_allow_ddl(False).with_allow_dml(False).with_allow_statements(False)
_MOST_ROWS: Final = 2**62
_NUMBERS: Final = itertools.count(1)

Key = str | Expr
JoinKind = Literal["inner", "left", "right", "full", "semi", "anti"]


class Place(NamedTuple):
    """Executor and settings of queries."""

    executor: Executor
    settings: Settings


class Dataset:
    """A table, or a query on tables.

    Made by :func:`read_parquet`, :func:`from_arrow` and :func:`sql`.
    """

    def __init__(self, place: Place, frame: DataFrame, tables: Mapping[str, Input | pa.Table]) -> None:
        self._place = place
        self._frame = frame
        self._tables = tables

    def __repr__(self) -> str:
        return f"<Dataset {', '.join(f'{field.name}: {field.type}' for field in self.schema)}>"

    @property
    def schema(self) -> pa.Schema:
        """Names and types of its columns."""
        return self._frame.schema()

    # -- queries -------------------------------------------------------------------------------------------------------

    def select(self, *columns: str | Expr, **named: Expr) -> Dataset:
        """Some columns, and new ones by name."""
        chosen = [*map(_column, columns), *(_named(name, each) for name, each in named.items())]
        return self._with(lambda frame: frame.select(*chosen))

    def with_columns(self, **named: Expr) -> Dataset:
        """All columns, and new ones by name."""
        return self._with(lambda frame: frame.with_columns(**named))

    def filter(self, *predicates: Expr) -> Dataset:
        """The rows for which all predicates are true."""
        return self._with(lambda frame: frame.filter(*predicates))

    def join(self, other: Dataset, on: str | Sequence[str], *, how: JoinKind = "inner") -> Dataset:
        """The rows of both with equal keys; of other columns, both must not have the same.

        :param how: ``semi`` and ``anti``: rows of this one that have, or do not have, a partner.
        :raises QueryProblem: if a column is missing, or both sides have a column outside the keys.
        """
        keys = [on] if isinstance(on, str) else list(on)
        if how not in get_args(JoinKind):
            raise QueryProblem(f"how: expected {', '.join(get_args(JoinKind))}, got {how}")
        if not isinstance(other, Dataset):
            raise QueryProblem("join: expected a dataset; fa.from_arrow makes one of a table or a data frame")
        for side in (self, other):
            side._check(keys)
        both = set(self.schema.names) & set(other.schema.names) - set(keys)
        if both and how not in ("semi", "anti"):
            raise QueryProblem(f"both sides have {', '.join(sorted(both))}, outside the keys: rename one of them")
        return self._with(lambda frame: _joined(frame, other._frame, keys, how), other._tables)

    def group_by(self, *keys: Key | Sequence[Key]) -> Groups:
        """Group rows with equal keys. :meth:`Groups.agg` aggregates each group."""
        keys = _flat(keys)
        self._check([each for each in keys if isinstance(each, str)])
        return Groups(self, keys)

    def agg(self, **named: Expr) -> Dataset:
        """Aggregates of all rows, by name."""
        return self.group_by().agg(**named)

    def sort(self, *keys: Key | Sequence[Key], descending: bool | Sequence[bool] = False) -> Dataset:
        """All rows, by keys; nulls last.

        :param descending: of all keys, or of each.
        """
        keys = _flat(keys)
        self._check([each for each in keys if isinstance(each, str)])
        downs = [descending] * len(keys) if isinstance(descending, bool) else _booleans(descending)
        if not keys:
            raise QueryProblem("a sort needs keys")
        if len(downs) != len(keys):
            raise QueryProblem(
                f"descending: expected True or False, for all keys or for each of {len(keys)}, got {descending!r}"
            )
        sorts = [
            _column(key).sort(ascending=not down, nulls_first=False) for key, down in zip(keys, downs, strict=True)
        ]
        return self._with(lambda frame: frame.sort(*sorts))

    def distinct(self) -> Dataset:
        """Each row once."""
        return self._with(lambda frame: frame.distinct())

    def limit(self, count: int, *, offset: int = 0) -> Dataset:
        """Some rows: the first ones behind a sort."""
        given: tuple[Any, Any] = count, offset
        if not all(isinstance(each, int) and 0 <= each < _MOST_ROWS for each in given):
            raise QueryProblem(f"limit: expected whole numbers from 0 on, got {count!r} and {offset!r}")
        return self._with(lambda frame: frame.limit(count, offset))

    def union(self, other: Dataset) -> Dataset:
        """The rows of both, which have the same columns, in any order.

        :raises QueryProblem: if one has a column that the other one lacks.
        """
        if not isinstance(other, Dataset):
            raise QueryProblem("union: expected a dataset; fa.from_arrow makes one of a table or a data frame")
        names = self.schema.names
        if different := sorted(set(names) ^ set(other.schema.names)):
            raise QueryProblem(f"{', '.join(different)}: a column of one side only; select the same ones of both")
        return self._with(lambda frame: frame.union(other.select(*names)._frame), other._tables)

    # -- results -------------------------------------------------------------------------------------------------------

    def stages(self) -> Query:
        """The stages in which it runs.

        :raises QueryProblem: if it cannot be done in stages.
        """
        context = planning_context()
        for name, table in self._tables.items():
            _register(context, name, table.schema)
        sizes = {name: _size(table) for name, table in self._tables.items()}
        with _query_errors():
            plan = self._frame.optimized_logical_plan()
        return stages_of(plan, self._frame.logical_plan(), context, sizes)

    def with_settings(self, **changes: Any) -> Dataset:
        """The same rows, got in another way: see :class:`~farcall_analytics.Settings`."""
        _check_settings(changes)
        settings = dataclasses.replace(self._place.settings, **changes)
        return Dataset(self._place._replace(settings=settings), self._frame, self._tables)

    def plan(self, **changes: Any) -> JobPlan:
        """How it would be run, and what that would take; nothing runs. ``explain()`` of it is a table.

        :param changes: of settings, such as ``objective="fastest"`` and ``deadline_s=120``. To run it so, make them
            with :meth:`with_settings`.
        :raises NoPlan: if none keeps the deadline, or the budget, with the nearest one.
        """
        dataset = self.with_settings(**changes)
        return dataset._planner(dataset.stages()).compared()

    def _planner(self, query: Query) -> JobPlanner:
        settings = self._place.settings
        fast = settings.fast_storage
        facts = {name: Facts(_tasks(table), _size(table)) for name, table in self._tables.items()}
        profile = profile_of(self._place.executor, settings.storage, fast)
        if settings.method in ON_NODES and NODES not in profile.tiers:
            profile = dataclasses.replace(profile, tiers={**profile.tiers, NODES: assumed_tier(SCHEME)})
        fast_tier = fast_tier_name(settings.storage, fast) if fast and not is_on_nodes(fast) else ""
        node_tier = NODES if NODES in profile.tiers else ""
        return JobPlanner(query, facts, profile, settings.limits(tier_name(settings.storage), fast_tier, node_tier))

    def write_parquet(self, output: str, *, job: str | None = None, progress: Progress | None = None) -> Outcome:
        """Write the rows to files ``part-00000.parquet`` and so on.

        :param output: a directory that all workers share, or ``s3://BUCKET/PREFIX``. Files of that name which are
            there are replaced, or deleted.
        :param job: a name of the job. A program that is started again with the same one continues it.
        :param progress: called with the name of a stage, its tasks that are done, and all of them; if it is not given,
            a terminal shows bars.
        """
        if not str(output).strip():
            raise QueryProblem("output: expected a directory, or s3://BUCKET/PREFIX")
        for path in (path for table in self._tables.values() if isinstance(table, Input) for path in table.paths):
            if is_below(path, str(output)):
                raise QueryProblem(f"{shown(path)}, which is read, is in the output directory: write into another one")
        return self._run(output=absolute(output), job=job, progress=progress)

    def to_arrow(self, *, progress: Progress | None = None) -> pa.Table:
        """All rows, in the memory of this program."""
        table = self._run(progress=progress).table
        assert table is not None
        return table

    def to_pandas(self) -> pd.DataFrame:
        """All rows as a data frame of pandas, which must be installed."""
        return self.to_arrow().to_pandas()

    def to_polars(self) -> pl.DataFrame:
        """All rows as a data frame of Polars, which must be installed."""
        import polars

        found = polars.from_arrow(self.to_arrow())
        assert isinstance(found, polars.DataFrame)
        return found

    def _run(self, *, output: str = "", job: str | None = None, progress: Progress | None = None) -> Outcome:
        query = self.stages()
        planner = self._planner(query)
        planner.plan()
        with bars.shown(progress) as update:
            return jobs.run(
                self._place.executor,
                query,
                self._tables,
                self._place.settings,
                planner,
                output=output,
                job=job,
                progress=update,
            )

    def _with(
        self, build: Callable[[DataFrame], DataFrame], others: Mapping[str, Input | pa.Table] | None = None
    ) -> Dataset:
        with _query_errors():
            frame = build(self._frame)
        return Dataset(self._place, frame, {**self._tables, **(others or {})})

    def _check(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.schema.names:
                raise QueryProblem(f"unknown column {name}. Expected one of: {', '.join(self.schema.names)}")


class Groups:
    """Rows with equal keys."""

    def __init__(self, dataset: Dataset, keys: Sequence[str | Expr]) -> None:
        self._dataset = dataset
        # an expression without a name has one that does not tell how many datasets there are
        self._keys = [
            _column(each) if isinstance(each, str) else each.alias(re.sub(r"\bt\d+\.", "", each.schema_name()))
            for each in keys
        ]

    def agg(self, **named: Expr) -> Dataset:
        """A row for each group: its keys, and aggregates by name, such as ``revenue=fa.sum("price")``."""
        aggregates = [_named(name, each) for name, each in named.items()]
        if not aggregates:
            raise QueryProblem("agg needs aggregates, such as revenue=fa.sum('price')")
        twice = sorted({each.schema_name() for each in self._keys} & set(named))
        if twice:
            raise QueryProblem(f"{', '.join(twice)}: a key has that name, too; give the aggregate another one")
        return self._dataset._with(lambda frame: frame.aggregate(self._keys, aggregates))


def read_parquet(paths: Paths, *, executor: Executor, storage: str | None = None, **options: Any) -> Dataset:
    """The rows of files: paths that all workers share or addresses in S3, also with ``*`` in the name.

    :param executor: that runs tasks, of Farcall or any other.
    :param storage: by which tasks pass rows on; if it is not given, that in ``FARCALL_ANALYTICS_STORAGE``.
    :param options: of :class:`~farcall_analytics.Settings`.
    :raises ConfigurationError: if there is no storage, or an option cannot be.
    :raises InputProblem: if a file is missing or damaged, or has other columns than the first one.
    """
    place = _place(executor, storage, options)
    found = find_input(find_paths(paths), share_bytes=place.settings.share_bytes)
    return _dataset(place, found)


def from_arrow(table: Any, *, executor: Executor, storage: str | None = None, **options: Any) -> Dataset:
    """A table of this program: of Arrow, a data frame of Polars or pandas, a relation of DuckDB, or lists by name."""
    try:
        found = table if isinstance(table, pa.Table) else pa.table(table)
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise QueryProblem(
            f"expected a table of Arrow, a data frame, or lists by name, got {type(table).__name__}"
        ) from error
    return _dataset(_place(executor, storage, options), _plain(found))


def sql(
    query: str, *, tables: Mapping[str, Any], executor: Executor, storage: str | None = None, **options: Any
) -> Dataset:
    """A query in SQL, as DataFusion has it.

    :param tables: by name: datasets, paths of files, or tables in memory; see :func:`from_arrow`.
    :raises QueryProblem: if it is not SQL, or names what is not there.
    """
    place = _place(executor, storage, options)
    context = planning_context()
    all_tables: dict[str, Input | pa.Table] = {}
    for name, given in tables.items():
        if isinstance(given, Dataset):
            dataset = given
        elif isinstance(given, (str, os.PathLike)) or (isinstance(given, list) and given):
            dataset = read_parquet(given, executor=executor, storage=storage, **options)
        else:
            dataset = from_arrow(given, executor=executor, storage=storage, **options)
        with _query_errors():
            context.register_view(_quoted(name), dataset._frame)
        all_tables |= dataset._tables
    with _query_errors():
        frame = context.sql_with_options(query.strip().removesuffix(";"), _QUERIES_ONLY)
    if frame.logical_plan().display().startswith(("Explain", "Analyze", "DescribeTable")):
        raise QueryProblem(
            "expected a query: leave out EXPLAIN or DESCRIBE. sql(...).plan() returns the plan of a query"
        )
    return Dataset(place, frame, all_tables)


def sum(column: str | Expr) -> Expr:  # noqa: A001 - as in the libraries that users know
    """The sum of a column in each group."""
    return f.sum(_column(column))


def min(column: str | Expr) -> Expr:  # noqa: A001
    """The smallest value of a column in each group."""
    return f.min(_column(column))


def max(column: str | Expr) -> Expr:  # noqa: A001
    """The largest value of a column in each group."""
    return f.max(_column(column))


def mean(column: str | Expr) -> Expr:
    """The mean of a column in each group."""
    return f.avg(_column(column))


def count(column: str | Expr | None = None, *, distinct: bool = False) -> Expr:
    """The values of a column in each group that are not null; without a column, the rows."""
    return f.count_star() if column is None else f.count(_column(column), distinct=distinct)


@contextlib.contextmanager
def _query_errors() -> Iterator[None]:
    """What DataFusion says of a query, as an error of it."""
    try:
        yield
    except Exception as error:  # PyO3 has no narrower class
        raise QueryProblem(str(error).removeprefix("DataFusion error: ")) from error


def _booleans(values: Any) -> list[bool]:
    """The values, if all are booleans."""
    is_list = isinstance(values, Sequence) and all(isinstance(each, bool) for each in values)
    return list(values) if is_list else []


def _flat(keys: Sequence[Key | Sequence[Key]]) -> tuple[Key, ...]:
    """Keys, also if they were given as a list."""
    for each in keys:
        if not isinstance(each, (str, Expr, Sequence)):
            raise QueryProblem(f"expected a column name or an expression as key, got {each!r}")
    return tuple(itertools.chain.from_iterable([each] if isinstance(each, (str, Expr)) else each for each in keys))


def _named(name: str, expression: Expr) -> Expr:
    if not isinstance(expression, Expr):
        raise QueryProblem(f"{name}: expected an expression such as fa.sum('price') or fa.col('price') * 2")
    return expression.alias(name)


def _check_settings(options: Mapping[str, Any]) -> None:
    names = {each.name for each in dataclasses.fields(Settings)} - {"storage"}
    for name in options:
        if name not in names:
            raise ConfigurationError(f"Unknown setting {name}.", hint=f"Choose from: {', '.join(sorted(names))}.")


def _place(executor: Executor, storage: str | None, options: Mapping[str, Any]) -> Place:
    _check_settings(options)
    if not hasattr(executor, "submit"):
        raise ConfigurationError(
            f"executor: expected an executor, got {executor!r}.", hint="Pass farcall.Executor('NAME OF AN ENDPOINT')."
        )
    url = storage or os.environ.get(STORAGE)
    if not url:
        raise ConfigurationError(
            "No storage is set by which tasks pass rows on.",
            hint=f"Pass storage='s3://BUCKET/PREFIX' or 'file:///SHARED/DIRECTORY', or set {STORAGE}.",
        )
    return Place(executor, Settings(str(url), **options))


def _joined(left: DataFrame, right: DataFrame, keys: Sequence[str], how: JoinKind) -> DataFrame:
    """A join whose keys are those of the left side, or of the one that has the row."""
    names = left.schema().names
    renamed = {name: f"farcall key {number}" for number, name in enumerate(keys)}
    others = right.schema().names
    # new names, so that a dataset may be joined with a part of itself
    right = right.select(*(_column(name).alias(renamed.get(name, name)) for name in others))
    frame = left.join_on(right, *(_column(key) == _column(renamed[key]) for key in keys), how=how)
    if how in ("semi", "anti"):
        return frame

    def of_key(name: str) -> Expr:
        left_key, right_key = _column(name), _column(renamed[name])
        if how == "full":
            return f.coalesce(left_key, right_key).alias(name)
        return right_key.alias(name) if how == "right" else left_key

    chosen = [of_key(name) if name in renamed else _column(name) for name in names]
    return frame.select(*chosen, *(_column(name) for name in others if name not in renamed))


def _dataset(place: Place, table: Input | pa.Table) -> Dataset:
    twice = sorted({each for each in table.schema.names if table.schema.names.count(each) > 1})
    if twice or not table.schema.names:
        raise QueryProblem(f"several columns have the name {', '.join(twice)}" if twice else "there are no columns")
    name = f"t{next(_NUMBERS)}"  # differs from those of all other datasets, with which it may be joined
    context = planning_context()
    _register(context, name, table.schema)
    return Dataset(place, context.table(name), {name: table})


def _plain(table: pa.Table) -> pa.Table:
    """A table whose categories are values: plans have no type for them."""
    for number, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            of = pa.string() if pa.types.is_string_view(field.type.value_type) else field.type.value_type
            chunks = [chunk.dictionary.cast(of).take(chunk.indices) for chunk in table[number].chunks]
            table = table.set_column(number, field.name, pa.chunked_array(chunks, of))
    return table


def _register(context: SessionContext, name: str, schema: pa.Schema) -> None:
    context.register_record_batches(name, [[empty_batch(schema)]])


def _size(table: Input | pa.Table) -> float:
    return float(table.size if isinstance(table, Input) else table.nbytes)


def _tasks(table: Input | pa.Table) -> int:
    return len(table.shares) if isinstance(table, Input) else 1


def _column(name: str | Expr) -> Expr:
    return col(_quoted(name)) if isinstance(name, str) else name


def _quoted(name: str) -> str:
    """A name as DataFusion reads it, with capital letters and dots."""
    return '"' + name.replace('"', '""') + '"'
