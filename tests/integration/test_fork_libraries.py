"""Real libraries in templates: what survives a fork works in forks, and what may not survive one is not loaded.

scikit-learn and SciPy are among the development packages. With the others: ``uv run --with pyarrow --with pandas --with
polars --with grpcio --with jax --with numba --with numexpr pytest tests/integration/test_fork_libraries.py``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.templates import fork_worker, running_template

_WORKERS = 3


def fit() -> bool:
    import numpy
    from sklearn.ensemble import HistGradientBoostingClassifier

    values = numpy.random.default_rng(1).random((2000, 4))
    labels = values[:, 0] > 0.5
    return bool(HistGradientBoostingClassifier(max_iter=3).fit(values, labels).score(values, labels) > 0.9)


def solve() -> bool:
    import numpy
    from scipy import fft, linalg  # type: ignore[import-untyped]

    matrix = numpy.random.default_rng(1).random((400, 400))
    fft.fft(matrix, workers=2)
    return bool(abs(linalg.solve(matrix, matrix) - numpy.eye(400)).max() < 1e-6)


def query_table() -> bool:
    import pyarrow
    import pyarrow.compute
    from pyarrow import csv

    table = csv.read_csv(pyarrow.BufferReader(b"a,b\n" + b"1,2\n2,2\n" * 50_000))
    groups = table.group_by("a").aggregate([("b", "sum")])
    return bool(groups.num_rows == 2 and pyarrow.compute.sum(table["b"]).as_py() == 200_000)


def group() -> bool:
    import pandas

    frame = pandas.DataFrame({"a": ["x", "y"] * 50_000, "b": 1.0})
    return bool(frame.groupby("a").b.sum().to_list() == [50_000.0, 50_000.0])


def evaluate() -> bool:
    import numexpr  # type: ignore[import-not-found]
    import numpy

    found = numexpr.evaluate("sum(values * 2)", {"values": numpy.ones(100_000)})
    return bool(found == 200_000.0 and numexpr.get_num_threads() == 2)


def add_in_parallel() -> bool:
    import os

    import numba  # type: ignore[import-not-found]
    import numpy

    @numba.njit(parallel=True)  # type: ignore[untyped-decorator]
    def total(values: Any) -> float:
        found = 0.0
        for number in numba.prange(len(values)):
            found += values[number]
        return found

    return bool(total(numpy.ones(1000)) == 1000.0 and numba.get_num_threads() == len(os.sched_getaffinity(0)))


def group_with_threads() -> bool:
    import polars

    frame = polars.DataFrame({"a": [1, 2] * 50_000, "b": range(100_000)})
    return bool(frame.lazy().group_by("a").agg(polars.col("b").sum()).collect().height == 2)


def call() -> bool:
    from concurrent.futures import ThreadPoolExecutor

    import grpc  # type: ignore[import-untyped]

    class Echo(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, _: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(lambda request, _: request)

    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        answer = channel.unary_unary("/echo/echo")(b"hello", timeout=60)
    server.stop(None).wait()
    return bool(answer == b"hello")


def compile_function() -> bool:
    import jax  # type: ignore[import-not-found]

    return bool(jax.jit(lambda value: value * 2)(2.0) == 4.0)


#: By module: a function that uses it, and says whether the answer is right.
SURVIVE: dict[str, Callable[[], bool]] = {
    "sklearn.ensemble": fit,
    "scipy.linalg": solve,
    "pyarrow.compute": query_table,
    "pandas": group,
    "numexpr": evaluate,
    "numba": add_in_parallel,
}
LEFT_OUT: dict[str, Callable[[], bool]] = {
    "polars": group_with_threads,
    "grpc": call,
    "jax": compile_function,
}


def place_of(module: str) -> str:
    """The directory of a library; skips if it is not installed."""
    found = importlib.util.find_spec(module.partition(".")[0])
    if found is None or found.origin is None:
        pytest.skip(f"{module} is not among the development packages")
    return str(Path(found.origin).parents[1])


def use(module: str, function: Callable[[], bool]) -> tuple[list[bool], dict[str, str]]:
    """What a function returns in forks that run at the same time, and what their template left out."""
    place = place_of(module)
    variables = {**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    with running_template(modules=[module], places=[place], spares=1) as template:
        workers = [fork_worker(template, variables=variables).ready() for _ in range(_WORKERS)]
        for worker in workers:
            worker.send(function)
        values = [worker.result() for worker in workers]
        again = [worker.run(function) for worker in workers]
        assert again == values
        for worker in workers:
            worker.end()
        return values, dict(template.imports.skipped)


@pytest.mark.parametrize("module", SURVIVE)
def test_what_survives_a_fork_works_in_all_of_them(module: str) -> None:
    values, skipped = use(module, SURVIVE[module])
    assert not skipped
    assert values == [True] * _WORKERS


@pytest.mark.parametrize("module", LEFT_OUT)
def test_what_may_not_survive_a_fork_works_in_forks_that_load_it_themselves(module: str) -> None:
    values, skipped = use(module, LEFT_OUT[module])
    assert values == [True] * _WORKERS
    assert module in skipped
