"""Executors, applications and failures of the TaPS benchmark. TaPS is not needed to read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

WORKERS: Final = 2

CLOUD: Final = "farcall"
"""The executor that needs a deployment."""

EXECUTORS: Final[Mapping[str, Mapping[str, Any]]] = {
    "farcall-engine": {"name": "farcall-engine", "max_workers": WORKERS},
    "thread-pool": {"name": "thread-pool", "max_threads": WORKERS},
    "process-pool": {"name": "process-pool", "max_processes": WORKERS},
    "dask": {"name": "dask", "workers": WORKERS},
    "parsl-local": {"name": "parsl-local", "workers": WORKERS},
    "ray": {"name": "ray", "num_cpus": WORKERS},
    "farcall, cloud": {"name": CLOUD, "endpoint": "taps"},
}
"""Options of TaPS' executors by their titles."""

OBJECTS: Final[Mapping[str, str]] = {"farcall, cloud": "farcall, cloud, objects"}
"""Executors that are also measured with large values in files, and the titles of that."""

LARGE_TYPES: Final[Sequence[str]] = ("ndarray", "Counter", "Data")
"""Values that are in files then. Their sizes would not say so: ``getsizeof`` is 128 bytes for a tile of a matrix, and
TaPS' filter by pickled size fails for futures."""


def connector(directory: str) -> Mapping[str, Any]:
    """The connector of TaPS' transformer for ProxyStore: it keeps values in files of a directory."""
    return {"kind": "proxystore.connectors.file.FileConnector", "options": {"store_dir": directory}}


def synthetic(structure: str, count: int, **options: Any) -> Mapping[str, Any]:
    """Options of TaPS' synthetic application."""
    return {"name": "synthetic", "structure": structure, "task_count": count, **options}


APPLICATIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "cholesky": {"name": "cholesky", "matrix_size": 1024, "block_size": 128},
    "mapreduce": {
        "name": "mapreduce",
        "data_dir": "files",
        "map_tasks": 32,
        "generate": True,
        "generated_files": 32,
        "generated_words": 5_000,
    },
    "synthetic, bag": synthetic("bag", 500, bag_max_running=100),
    "synthetic, bag of 10 ms": synthetic("bag", 100, bag_max_running=8, task_sleep=0.01),
    "synthetic, diamond": synthetic("diamond", 200, task_data_bytes=10_000),
    "synthetic, reduce": synthetic("reduce", 100, task_data_bytes=100_000),
    "synthetic, sequential": synthetic("sequential", 100, task_data_bytes=1_000),
}
"""Options by the title of what is run: those of TaPS' applications that need no other programs and no downloads."""

LARGE: Final[Sequence[str]] = ("cholesky", "mapreduce", "synthetic, reduce")
"""Those with values of more than 64 KiB."""

QUICK: Final[Mapping[str, Mapping[str, Any]]] = {
    "cholesky": {"name": "cholesky", "matrix_size": 64, "block_size": 32},
    "synthetic, diamond": synthetic("diamond", 5, task_data_bytes=100_000),
}

RAISING: Final[Sequence[str]] = ("failure", "zero-division", "dependency")
KILLING: Final[Sequence[str]] = ("worker-killed",)
"""Failures that TaPS injects. Those that end other processes of the machine or use up its memory are left out."""
