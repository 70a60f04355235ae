"""Preloading: what a template imports, learned from reports that a task can forge."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_common.environments import Environment
from farcall_endpoint.environments.templates.preload import (
    PreloadStore,
    Statistics,
    chosen,
    excluded,
    learned,
    measured,
)
from farcall_endpoint.environments.templates.templates import template_key, variables_of_template
from farcall_endpoint.worker.fork_hazards import FORBIDDEN, is_forbidden

_MIB = 2**20


def after(*reports: list[str]) -> Statistics:
    statistics = Statistics()
    for names in reports:
        statistics = learned(statistics, names)
    return statistics


def test_modules_are_imported_in_the_order_in_which_tasks_imported_them() -> None:
    statistics = after(["numpy", "numpy.linalg", "pandas"], ["numpy"])
    assert chosen(statistics, None, budget_bytes=_MIB) == ("numpy", "numpy.linalg", "pandas")


def test_rare_and_cheap_modules_are_left_out() -> None:
    statistics = after(["often", "cheap"], *[["often", "cheap"]] * 30, ["once"])
    assert chosen(statistics, None, budget_bytes=_MIB) == ("often", "cheap")
    statistics = measured(statistics, {"often": (0.5, _MIB // 2), "cheap": (0.00001, 100)})
    assert chosen(statistics, None, budget_bytes=_MIB) == ("often",)


def test_memory_goes_to_what_saves_the_most_time() -> None:
    statistics = measured(after(["large", "good", "fair"]), {"large": (1.0, 90), "good": (1.0, 10), "fair": (0.5, 10)})
    statistics = measured(
        statistics,
        {name: (module.seconds or 0, module.size_bytes * _MIB) for name, module in statistics.modules.items()},
    )
    assert chosen(statistics, None, budget_bytes=50 * _MIB) == ("good", "fair")
    assert chosen(statistics, None, budget_bytes=150 * _MIB) == ("large", "good", "fair")


def test_the_environment_s_own_list_decides() -> None:
    environment = Environment.of({"type": "venv", "location": "/opt/venv", "preload": ["scipy", "sad"]})
    statistics = excluded(after(["numpy"]), "sad", "it crashed")
    assert chosen(statistics, environment, budget_bytes=0) == ("scipy",)
    none = Environment.of({"type": "venv", "location": "/opt/venv", "preload": []})
    assert chosen(statistics, none, budget_bytes=_MIB) == ()


def test_what_was_excluded_is_not_learned_again() -> None:
    statistics = excluded(after(["sad", "glad"]), "sad", "the import of sad took longer than 60 s")
    assert chosen(learned(statistics, ["sad", "glad"]), None, budget_bytes=_MIB) == ("glad",)
    skipped = measured(statistics, {}, {"glad": "it is not among the environment's own modules"})
    assert chosen(learned(skipped, ["glad"]), None, budget_bytes=_MIB) == ()


def test_with_a_package_its_modules_are_excluded() -> None:
    """Each would make the next template unfit by importing the package."""
    statistics = excluded(after(["sad", "sad.part", "sadder"]), "sad", "it has 2 threads")
    assert chosen(learned(statistics, ["sad.other.part"]), None, budget_bytes=_MIB) == ("sadder",)
    environment = Environment.of({"type": "venv", "location": "/opt/venv", "preload": ["sad.part", "scipy"]})
    assert chosen(statistics, environment, budget_bytes=0) == ("scipy",)
    parts = excluded(after(["sad", "sad.part"]), "sad.part", "it crashed")
    assert chosen(parts, None, budget_bytes=_MIB) == ("sad",)


def test_old_reports_lose_their_weight() -> None:
    statistics = after(*[["old"]] * 900, *[["new"]] * 5000)
    assert chosen(statistics, None, budget_bytes=_MIB) == ("new",)


@given(st.lists(st.lists(st.text(max_size=30), max_size=50), max_size=5))
def test_forged_reports_lead_to_names_of_modules_only(reports: list[list[str]]) -> None:
    for name in chosen(after(*reports), None, budget_bytes=2**40):
        assert all(part.isidentifier() for part in name.split("."))
        assert not is_forbidden(name)


def test_forged_reports_are_bounded() -> None:
    statistics = after(["honest"], ["honest"])
    for number in range(20):
        statistics = learned(statistics, [f"forged_{number}_{each}" for each in range(5000)])
    assert len(statistics.modules) <= 2000
    assert "honest" in statistics.modules
    for number in range(3000):
        statistics = excluded(statistics, f"module_{number}", "x" * 10_000)
    assert sum(map(len, statistics.excluded.values())) < 200_000


def test_statistics_are_kept_in_files(tmp_path: Path) -> None:
    store = PreloadStore(tmp_path / "preload")
    assert store.of("k") == Statistics()
    first, second = after(["numpy"]), after(["numpy"], ["numpy"])
    store.put("k", first, now=100.0)
    store.put("k", second, now=101.0)  # too soon after that
    assert PreloadStore(tmp_path / "preload").of("k") == first
    store.close()
    assert PreloadStore(tmp_path / "preload").of("k") == second
    (tmp_path / "preload/k.json").write_text("{")
    assert PreloadStore(tmp_path / "preload").of("k") == Statistics()


def test_without_a_directory_statistics_last_as_long_as_their_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = PreloadStore(tmp_path / "file/preload")
    store.put("k", after(["numpy"]), now=0.0)
    store.close()
    assert "numpy" in store.of("k").modules


@pytest.mark.parametrize("above", [True, False])
def test_statistics_that_other_users_could_have_put_there_are_neither_read_nor_written(
    tmp_path: Path, above: bool
) -> None:
    directory = tmp_path / "cache/preload"
    directory.mkdir(parents=True)
    (directory.parent if above else directory).chmod(0o777)
    os.mkfifo(directory / "k.json")  # to open it would take forever
    store = PreloadStore(directory)
    assert store.of("k") == Statistics()
    store.put("k", after(["numpy"]), now=0.0, at_once=True)
    store.close()
    assert [path.is_fifo() for path in directory.iterdir()] == [True]
    assert "numpy" in store.of("k").modules


def test_the_directory_of_statistics_is_not_a_link(tmp_path: Path) -> None:
    (tmp_path / "of-the-owner").mkdir()
    (tmp_path / "preload").symlink_to(tmp_path / "of-the-owner")
    store = PreloadStore(tmp_path / "preload")
    store.put("k", after(["numpy"]), now=0.0, at_once=True)
    assert not list((tmp_path / "of-the-owner").iterdir())


def test_the_cache_in_which_statistics_are_kept_is_private(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        PreloadStore(tmp_path / "cache/preload").put("k", after(["numpy"]), now=0.0, at_once=True)
    finally:
        os.umask(former)
    assert [(tmp_path / path).stat().st_mode & 0o777 for path in ("cache", "cache/preload")] == [0o700, 0o700]


def test_any_number_of_environments_is_remembered_within_limits(tmp_path: Path) -> None:
    store = PreloadStore(tmp_path)
    for number in range(1500):
        store.put(f"{number}", after(["numpy"]), now=0.0)
        assert "numpy" in store.of("0").modules
    assert len(list(tmp_path.iterdir())) <= 1001
    assert "numpy" in store.of("1490").modules
    store.close()


@pytest.mark.parametrize("name", [*FORBIDDEN, "polars.lazyframe", "__main__", "venv.__main__", "this", "test.support"])
def test_modules_that_are_never_preloaded(name: str) -> None:
    assert is_forbidden(name)
    assert not after([name]).modules


def test_names_that_only_look_forbidden() -> None:
    assert not any(map(is_forbidden, ["polars_ds", "mpi4py", "testing", "grpc_tools", "numpy.test"]))


@pytest.mark.parametrize("name", ["NVIDIA_API_KEY", "CUDA_TOKEN", "TF_VAR_database", "JAX_SECRET", "PYTHON_AUTH"])
def test_templates_get_no_secrets_as_other_users_can_read_the_command_that_starts_them(name: str) -> None:
    assert not variables_of_template({name: "x"})
    assert template_key("abc", {name: "x"}) == "abc"


def test_templates_are_known_by_the_variables_that_imports_read() -> None:
    variables = {"CUDA_VISIBLE_DEVICES": "0", "PYTHONHASHSEED": "1", "HOME": "/home/ada", "FARCALL_WORKER_ID": "7"}
    assert variables_of_template(variables) == {"CUDA_VISIBLE_DEVICES": "0", "PYTHONHASHSEED": "1"}
    key = template_key("abc", variables)
    assert key.startswith("abc-")
    assert template_key("abc", {**variables, "HOME": "/home/grace", "OMP_NUM_THREADS": "4"}) == key
    assert template_key("abc", {**variables, "CUDA_VISIBLE_DEVICES": "1"}) != key
    assert template_key("abc", {"HOME": "/"}) == "abc"
