"""Fair share: at an endpoint with two users, neither's backlog delays the other's single task."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import farcall
from farcall_common.wire import TaskState
from farcall_endpoint.manager.core.workers import TURN_S
from farcall_local.deployment import Deployment
from tests.support.endpoint.ordinary_endpoint import OrdinaryEndpoint
from tests.waiting import WAIT_S, wait_until

BACKLOG = 4000


def started(directory: str) -> int:
    """How many tasks of the backlog have started."""
    return len(os.listdir(directory))  # noqa: PTH208 - it travels without this module's imports


def short(directory: str, number: int) -> None:
    with open(f"{directory}/{number}", "w"):  # noqa: PTH123
        time.sleep(0.005)


def until_released(directory: str, number: int, released: str) -> None:
    """Run until one of the files ``released`` can be taken away: each ends one task."""
    with open(f"{directory}/{number}", "w"):  # noqa: PTH123
        while not any(_taken(f"{released}/{name}") for name in os.listdir(released)):  # noqa: PTH208
            time.sleep(0.01)


def _taken(path: str) -> bool:
    try:
        os.unlink(path)  # noqa: PTH108
    except FileNotFoundError:
        return False
    return True


@pytest.fixture(params=["auto", "none"])
def isolation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def shared(cloud: Deployment, tmp_path: Path, directory: str, released: Path, isolation: str) -> Iterator[str]:
    """The id of an endpoint of ada's with two workers, which everybody may use."""
    environment = cloud.environment("ada")
    endpoint = OrdinaryEndpoint("fair", home=tmp_path / "ada", environment=environment, owned=[tmp_path])
    endpoint.configure()
    (endpoint.directory / "config.yaml").write_text(
        f"engine:\n  max_workers_per_node: 2\n  isolation: {isolation}\n  readable_paths: [{directory}]\n"
    )
    headers = {"Authorization": f"Bearer {cloud.tokens['ada']}"}
    with endpoint, httpx.Client(base_url=cloud.api_url, headers=headers, timeout=WAIT_S, trust_env=False) as web:
        assert web.put(f"/v3/endpoints/{endpoint.endpoint_id}", json={"public": True}).status_code == 200
        yield endpoint.endpoint_id


@pytest.fixture
def directory(tmp_path: Path) -> str:
    (tmp_path / "started").mkdir()
    return str(tmp_path / "started")


@pytest.fixture
def released(tmp_path: Path) -> Path:
    (tmp_path / "released").mkdir()
    return tmp_path / "released"


def _submit(client: farcall.Client, endpoint_id: str, function_id: str, calls: list[tuple[object, ...]]) -> list[str]:
    batch = client.create_batch()
    for arguments in calls:
        batch.add(function_id, args=arguments)
    answer = client.batch_run(endpoint_id, batch)
    return [str(task_id) for task_ids in answer["tasks"].values() for task_id in task_ids]


def test_a_single_task_overtakes_a_backlog_of_short_ones(
    shared: str, directory: str, isolation: str, client: farcall.Client, other_client: farcall.Client
) -> None:
    backlog = _submit(client, shared, client.register_function(short), [(directory, n) for n in range(BACKLOG)])
    count = other_client.register_function(started)
    warm = other_client.run(directory, endpoint_id=shared, function_id=count)
    other_client.get_result(warm, wait_s=WAIT_S)
    passed = []
    for _ in range(5):
        before = started(directory)
        task_id = other_client.run(directory, endpoint_id=shared, function_id=count)
        passed.append(other_client.get_result(task_id, wait_s=WAIT_S) - before)
    assert before < BACKLOG - 500, "the backlog was over before it was passed"
    # What ran during a submit, what was prefetched, and, if submitters are apart, what the other worker runs while one
    # starts for the single task; without turns, up to all of them.
    assert sorted(passed)[2] < (150 if isolation == "none" else 500), passed
    client.cancel_many(backlog)


def test_a_single_task_is_next_after_running_long_ones(
    shared: str, directory: str, released: Path, client: farcall.Client, other_client: farcall.Client
) -> None:
    """Both workers run tasks of a backlog that also uses up the credit, for longer than a turn. The end of one lets the
    single task in."""
    calls: list[tuple[object, ...]] = [(directory, number, str(released)) for number in range(40)]
    backlog = _submit(client, shared, client.register_function(until_released), calls)
    wait_until(lambda: started(directory) == 2)
    began = max(path.stat().st_mtime for path in Path(directory).iterdir())
    wait_until(lambda: time.time() > began + TURN_S)
    count = other_client.register_function(started)
    task_id = other_client.run(directory, endpoint_id=shared, function_id=count)
    wait_until(lambda: other_client.get_task(task_id).state is TaskState.WAITING_FOR_NODES)
    assert started(directory) == 2
    (released / "one").touch()
    assert other_client.get_result(task_id, wait_s=WAIT_S) == 2
    client.cancel_many(backlog)


def test_tasks_with_a_target_do_not_wait_for_long_ones_of_their_submitter(
    shared: str, directory: str, released: Path, client: farcall.Client
) -> None:
    """Not in the queue, although the long ones have used up the credit, and not for their workers."""
    calls: list[tuple[object, ...]] = [(directory, number, str(released)) for number in range(40)]
    backlog = _submit(client, shared, client.register_function(until_released), calls)
    wait_until(lambda: started(directory) == 2)
    count = client.register_function(started, qos=farcall.QoS(target_ms=60_000))
    urgent = _submit(client, shared, count, [(directory,)] * 10)
    assert [client.get_result(task_id, wait_s=WAIT_S) for task_id in urgent] == [2] * 10
    client.cancel_many(backlog)
