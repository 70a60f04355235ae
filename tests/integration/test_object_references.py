"""References as arguments: of tasks, stages and calls of running tasks, in real workers and in a cloud in memory."""

from __future__ import annotations

import os
import pickle
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farcall_common
import farcall_endpoint
from farcall import ConfigurationError, Executor, ObjectGone, Reference, TaskFailed, chain, store
from farcall.testing import FakeCloud
from farcall_common import file_arguments, running
from farcall_common.objects import Directory, Memory, Store
from farcall_endpoint import Engine, Graph
from tests.support.worker import WorkerUnderTest, worker_under_test

ARRAY = np.arange(100_000.0)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(max_workers=2) as started:
        started.wait_ready()
        yield started


@pytest.fixture(params=["engine", "cloud"])
def executor(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "engine":
        yield request.getfixturevalue("engine")
    else:
        with FakeCloud() as cloud, cloud.client() as client, Executor(cloud.endpoint_id, client) as made:
            yield made


@pytest.fixture
def objects(tmp_path: Path) -> Store:
    return Store(Memory(tmp_path / "objects"))


def total(array: Any, *more: Any, scale: Any = 1) -> float:
    return float(sum(each.sum() for each in (array, *more)) * scale)


def kinds(*args: Any, **kwargs: Any) -> list[str]:
    return [type(each).__name__ for each in (*args, *kwargs.values())]


def put_there(path: str, number: int) -> Any:
    from farcall_common.objects import Memory, Store

    return Store(Memory(path)).put([number] * 3)


def add(first: list[int], second: list[int]) -> list[int]:
    return first + second


def length(values: list[int]) -> int:
    return len(values)


# -- values come in their place ----------------------------------------------------------------------------------------


def test_a_function_gets_the_value_of_a_reference(executor: Any, objects: Store) -> None:
    reference = objects.put(ARRAY)
    assert executor.submit(total, reference, reference, scale=objects.put(2)).result() == 4 * ARRAY.sum()
    assert list(executor.map(total, [reference] * 3)) == [ARRAY.sum()] * 3


def test_a_reference_within_an_argument_stays_one(executor: Any, objects: Store) -> None:
    reference = objects.put(ARRAY)
    assert executor.submit(kinds, [reference], reference, x={"a": reference}).result() == ["list", "ndarray", "dict"]
    assert executor.submit(lambda pair: pair[0].get().sum(), (reference, 1)).result() == ARRAY.sum()


def test_the_same_reference_twice_is_one_read(executor: Any, objects: Store) -> None:
    reference = objects.put(ARRAY, reads=1)
    assert executor.submit(lambda a, b, c: a is b is c, reference, reference, c=reference).result()
    assert not reference.exists()


def test_a_task_puts_and_others_get(executor: Any, tmp_path: Path) -> None:
    reference = executor.submit(put_there, str(tmp_path / "objects"), 7).result()
    assert isinstance(reference, Reference)
    assert reference.get() == [7] * 3
    assert executor.submit(length, reference).result() == 3


def test_an_object_that_is_gone_fails_its_task(executor: Any, objects: Store) -> None:
    reference = objects.put(ARRAY)
    reference.evict()
    with pytest.raises(TaskFailed, match="The value for argument 2 cannot be read: The object of") as caught:
        executor.submit(total, 1, reference).result()
    assert caught.value.record.code == "OBJECT_GONE"
    assert "Put it again" in caught.value.hint
    with pytest.raises(TaskFailed, match="argument 'scale'"):
        executor.submit(total, 1, scale=reference).result()
    assert executor.submit(length, [1]).result() == 1


def test_a_damaged_object_fails_its_task(executor: Any, objects: Store) -> None:
    reference = objects.put(ARRAY)
    assert isinstance(objects.connector, Memory)
    Path(objects.connector.path, reference.key.name).write_bytes(b"foreign bytes")
    with pytest.raises(TaskFailed, match="argument 1") as caught:
        executor.submit(total, reference).result()
    assert caught.value.record.code == "OBJECT_DAMAGED"


def test_a_store_that_this_worker_cannot_open_fails_its_task(executor: Any) -> None:
    reference: Reference[Any] = Reference(("k",), "no_such_package.Connector", {}, 1)
    with pytest.raises(TaskFailed, match=r"cannot be imported") as caught:
        executor.submit(total, reference).result()
    assert caught.value.record.code == "CONFIGURATION"


# -- stages and calls --------------------------------------------------------------------------------------------------


def test_stages_give_one_another_references(executor: Any, objects: Store, tmp_path: Path) -> None:
    path = str(tmp_path / "o")
    graph = Graph()
    joined = graph.call(add, graph.call(put_there, path, 1), graph.call(put_there, path, 2))
    assert executor.submit(graph, graph.call(add, joined, objects.put([9]))).result() == [1, 1, 1, 2, 2, 2, 9]
    assert executor.submit(chain(put_there, length), path, 3).result() == 3


def put_several(path: str, count: int) -> list[Any]:
    from farcall_common.objects import Memory, Store

    return [Store(Memory(path)).put([number] * number) for number in range(count)]


def test_elements_of_a_map_are_arguments(executor: Any, tmp_path: Path) -> None:
    graph = Graph()
    references = graph.call(put_several, str(tmp_path / "o"), 4)
    assert executor.submit(graph, graph.map(length, references)).result() == [0, 1, 2, 3]


def test_collected_references_stay_references(executor: Any, tmp_path: Path) -> None:
    graph = Graph()
    target = [graph.call(put_there, str(tmp_path / "o"), number) for number in range(3)]
    assert [each.get() for each in executor.submit(graph, target).result()] == [[0] * 3, [1] * 3, [2] * 3]


def test_calls_of_a_running_task_get_values(engine: Engine, objects: Store) -> None:
    def driver(references: list[Any]) -> list[float]:
        from farcall import current

        return list(current().map(total, references))

    assert engine.submit(driver, [objects.put(ARRAY * number) for number in range(5)]).result() == [
        ARRAY.sum() * number for number in range(5)
    ]


# -- the store of a task -----------------------------------------------------------------------------------------------


def test_a_store_that_a_task_chooses_ends_with_it(engine: Engine, tmp_path: Path) -> None:
    def choose(path: str) -> Any:
        from farcall import store

        store.configure(f"file://{path}")
        return store.put("here")

    def look() -> str:
        from farcall_common.objects.store import _chosen, default_store

        assert _chosen is not None
        try:
            return str(default_store())
        except Exception as error:  # noqa: BLE001 - whichever: it is not the store of the task before
            return type(error).__name__

    with Engine(max_workers=1) as one:
        assert one.submit(choose, str(tmp_path / "a")).result().get() == "here"
        assert str(tmp_path) not in one.submit(look).result()


def test_workers_without_references_do_nothing_for_them(tmp_path: Path) -> None:
    def loaded() -> bool:
        import sys

        return any(name.startswith("farcall_common.objects") for name in sys.modules)

    with worker_under_test(tmp_path) as worker:
        assert worker.values(loaded) == [False]


def bare_worker(tmp_path: Path) -> Any:
    """A worker where the SDK is not installed."""
    places = [str(Path(each.__file__).parent.parent) for each in (farcall_common, farcall_endpoint) if each.__file__]
    variables = {"PYTHONPATH": ":".join([*places, sysconfig.get_path("purelib")])}
    without_sdk = tmp_path / "python"
    without_sdk.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # no .pth files: packages that are linked
    without_sdk.chmod(0o755)
    return worker_under_test(tmp_path, variables=variables, python=str(without_sdk))


def test_the_store_is_there_without_the_sdk(tmp_path: Path) -> None:
    def use(path: str) -> list[Any]:
        import farcall
        from farcall import Reference, store  # type: ignore[attr-defined, unused-ignore]

        store.configure(f"file://{path}")
        reference = store.put([1, 2])
        return [store.get(reference), type(reference) is Reference, getattr(farcall, "__file__", None)]

    worker: WorkerUnderTest
    with bare_worker(tmp_path) as worker:
        assert worker.values(use, str(tmp_path / "objects")) == [[[1, 2], True, None]]


def test_tasks_of_an_endpoint_share_a_store(executor: Any) -> None:
    def simulate(seed: int) -> Any:
        import numpy

        from farcall import store

        array = numpy.frombuffer(store.buffer(800_000))
        array[:] = seed
        return store.put(array)

    def place() -> str:
        from farcall import store

        return str(store.default_store())

    references = list(executor.map(simulate, range(4)))
    assert list(executor.map(total, references)) == [100_000.0 * seed for seed in range(4)]
    [where] = {executor.submit(place).result() for _ in range(3)}
    assert where.endswith("objects'))")
    assert [each.get()[0] for each in references] == [0, 1, 2, 3]  # this process is on the node, too


class Task:
    """What the store needs of a running task."""

    def __init__(self, shared: Path, memory: Path | None) -> None:
        self.shared_dir = shared
        self.memory_dir = memory


@pytest.fixture
def in_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Task]:
    """This process as a worker that runs a task."""
    task = Task(tmp_path / "shared", tmp_path / "memory")
    monkeypatch.setattr(running, "_current", task)
    return task  # type: ignore[return-value]


def test_a_task_has_a_store(in_task: Task) -> None:
    reference = store.put(1)
    assert isinstance(store.default_store().connector, Memory)
    assert [path.name for path in (in_task.memory_dir / "objects").glob("[!.]*")] == [reference.key.name]  # type: ignore[operator]
    in_task.memory_dir = None
    reference = store.put(2)
    assert type(store.default_store().connector) is Directory
    assert [path.name for path in (in_task.shared_dir / "objects").glob("[!.]*")] == [reference.key.name]
    assert reference.get() == 2


def test_what_is_configured_is_used_in_a_task(in_task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_STORE", f"file://{tmp_path}/from%20variable")
    assert store.put(1).get() == 1
    assert (tmp_path / "from variable").is_dir()
    monkeypatch.setattr(store, "_chosen", None)
    store.configure(f"file://{tmp_path}/chosen")
    with store.lifetime() as lifetime:
        reference = lifetime.put(1)
        assert (tmp_path / "chosen" / reference.key.name).exists()
        assert store.exists(reference)
    assert not store.exists(reference)
    store.evict(store.put(2, group="g"))
    store.evict_group("g")
    assert len(store.buffer(10)) == 10
    assert not in_task.shared_dir.exists()


# -- the store of a program --------------------------------------------------------------------------------------------


def test_a_program_without_a_store_is_told_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FARCALL_STORE", raising=False)
    monkeypatch.setattr(store, "_chosen", None)
    with pytest.raises(ConfigurationError, match="no store") as caught:
        store.put(1)
    for word in ("store.configure", "FARCALL_STORE", "s3://", "valkey://", "file:///", "memory:"):
        assert word in caught.value.hint


@pytest.mark.parametrize("url", ["", "ftp://host", "file://relative", "memory://x", "/plain/path", "file:", "s3:x"])
def test_an_address_that_is_none(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_chosen", None)
    with pytest.raises(ConfigurationError):
        store.configure(url)


def test_memory_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_chosen", None)
    store.configure("memory:")
    with store.lifetime() as lifetime:
        reference = lifetime.put(ARRAY)
        np.testing.assert_equal(reference.get(), ARRAY)
        place = Path(f"/dev/shm/farcall-{os.getuid()}")
        assert (place / "objects" / reference.key.name).exists()
        assert place.stat().st_mode & 0o777 == 0o700


# -- objects of another endpoint ---------------------------------------------------------------------------------------

HERE, THERE = "00000000-0000-4000-8000-00000000000a", "00000000-0000-4000-8000-00000000000b"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reference[Any]:
    """A reference to an array that a task at another endpoint has put; of its directory only a copy is here."""
    monkeypatch.setenv("FARCALL_ENDPOINT_ID", THERE)
    reference = Store(Directory(tmp_path / "a directory")).put(ARRAY)
    monkeypatch.setenv("FARCALL_ENDPOINT_ID", HERE)
    (tmp_path / "a directory").rename(tmp_path / "copies")
    return reference


def listed(reference: Reference[Any], *, target: str = "") -> tuple[list[str], bytes]:
    with file_arguments.collecting(target=target) as found:
        data = pickle.dumps([reference, reference])
    return [url for url, *_ in found], data


def test_an_object_of_another_endpoint_is_listed_as_a_file_of_it(elsewhere: Reference[Any], tmp_path: Path) -> None:
    url = f"endpoint://{THERE}{tmp_path}/a%20directory/{elsewhere.key.name}"
    assert listed(elsewhere, target=HERE)[0] == [url]
    assert listed(elsewhere)[0] == [url]
    assert listed(elsewhere, target=THERE)[0] == []
    assert file_arguments.in_use()


def test_a_worker_reads_the_copy(elsewhere: Reference[Any], tmp_path: Path) -> None:
    urls: list[str] = []

    def place(file: Any) -> str:
        urls.append(file.url)
        return str(tmp_path / "copies" / file.name)

    expected, data = listed(elsewhere)
    with file_arguments.placed(place):
        reference, same = pickle.loads(data)
    assert set(urls) == set(expected)
    assert reference == same == elsewhere
    assert reference.exists()
    value = reference.get()
    assert np.array_equal(value, ARRAY)
    value[0] = -1  # each reader has its own
    assert reference.get()[0] == 0
    # What is passed on is the object, and not the copy.
    assert pickle.loads(pickle.dumps(reference)) == elsewhere
    (tmp_path / "copies" / elsewhere.key.name).unlink()
    with pytest.raises(ObjectGone):
        reference.get()


def test_an_object_of_another_endpoint_that_was_not_copied_says_so(elsewhere: Reference[Any]) -> None:
    with pytest.raises(ObjectGone, match=f"at endpoint {THERE}"):
        pickle.loads(pickle.dumps(elsewhere)).get()


def test_objects_with_counted_reads_stay_at_their_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_ENDPOINT_ID", THERE)
    objects = Store(Directory(tmp_path / "objects"))
    counted = objects.put(ARRAY, reads=2)
    assert listed(counted, target=HERE)[0] == []
    assert np.array_equal(pickle.loads(pickle.dumps(counted)).get(), ARRAY)
    monkeypatch.delenv("FARCALL_ENDPOINT_ID")
    assert listed(objects.put(ARRAY), target=HERE)[0] == []
