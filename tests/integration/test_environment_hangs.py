"""Locations that are looked up, also on a file system that hangs: the manager and all other environments work."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farcall_common.environments import Environment
from farcall_common.graphs import Graph, Input, Stage, pack_graph
from farcall_common.task_options import Callee, TaskOptions
from farcall_endpoint.config.settings import EnvironmentSettings
from farcall_endpoint.environments import NotLocated
from farcall_endpoint.host.isolation import bubblewrap, landlock
from farcall_endpoint.manager.core.events import EnvironmentReady
from farcall_endpoint.manager.shell.worker_process import Confinement
from tests.support.endpoint import running_endpoint
from tests.support.environments import SUBMITTER, Node, running_node
from tests.support.hung_mount import HungMount, hung_mount
from tests.waiting import wait_until


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[HungMount]:
    with hung_mount(tmp_path / "hung") as mount:
        yield mount


def make_venv(prefix: Path) -> Environment:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
    return Environment(type="venv", location=str(prefix))


def answer() -> int:
    return 42


def is_looked_up(node: Node, environment: Environment) -> bool:
    node.serve()
    try:
        node.launcher.refusal(environment)
    except NotLocated:
        return False
    return True


@pytest.fixture(
    params=[False, pytest.param(True, marks=pytest.mark.skipif(bool(bubblewrap.missing()), reason="bwrap"))]
)
def node(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    settings = EnvironmentSettings(locations=(f"{tmp_path}/*",), fork=False)
    confinement = Confinement((), landlock=not landlock.missing(), bubblewrap=True) if request.param else None
    with running_node(tmp_path / "node", settings, confinement=confinement) as node:
        yield node


def test_other_environments_start_while_locations_hang(node: Node, hung: HungMount, tmp_path: Path) -> None:
    other = make_venv(tmp_path / "other")
    locations = [Environment(type="venv", location=f"{hung.directory}/{number}") for number in range(20)]
    for environment in locations:  # more than are prepared at once
        assert not is_looked_up(node, environment)
        node.launcher.prepare(environment)
    assert node.run(node.ready(other, submitter=SUBMITTER), answer, submitter=SUBMITTER) == 42
    assert not is_looked_up(node, locations[0])
    hung.fail()
    wait_until(lambda: is_looked_up(node, locations[0]))
    record = node.launcher.refusal(locations[0])
    assert record is None or "cannot read its location" in record.message


def test_a_location_that_hangs_after_its_check_holds_only_the_start_of_its_worker(node: Node, tmp_path: Path) -> None:
    environment, other = make_venv(tmp_path / "place/venv"), make_venv(tmp_path / "other")
    node.kill(node.ready(environment, submitter=SUBMITTER))
    with hung_mount(tmp_path / "place") as mount:
        for _ in range(3):
            with pytest.raises(NotLocated):
                node.launcher.launch(0, slot=0, submitter=SUBMITTER, environment=environment)
            node.serve()
        assert isinstance(node.prepare(other), EnvironmentReady)
        mount.fail()
        assert node.died(node.launch(environment, submitter=SUBMITTER))
    assert node.run(node.ready(environment, submitter=SUBMITTER), answer, submitter=SUBMITTER) == 42


def test_tasks_of_a_location_that_hangs_fail_and_the_others_go_on(tmp_path: Path, hung: HungMount) -> None:
    engine = {"isolation": "auto", "environments": {"start_limit": 2, "locations": [f"{tmp_path}/*"]}}
    with running_endpoint(tmp_path / "home", engine=engine, reachable=[tmp_path]) as endpoint:
        cloud = endpoint.cloud
        environment = Environment(type="venv", location=f"{hung.directory}/venv")
        waiting = [cloud.submit(answer, environment=environment, submitter=SUBMITTER) for _ in range(2)]
        cancelled = cloud.submit(answer, environment=environment, submitter=SUBMITTER)
        of_owner = cloud.submit(answer, environment=environment)
        assert [cloud.end(cloud.submit(answer)).value for _ in range(3)] == [42] * 3
        assert cloud.end(cloud.submit(answer, submitter=SUBMITTER)).value == 42
        cloud.cancel(cancelled)
        assert cloud.end(cancelled).error["code"] == "TASK_CANCELLED"
        for task in waiting:
            message = cloud.end(task).error["message"]
            assert f"{environment.location} has not answered for 2 s: does its file system hang?" in message
        message = cloud.end(of_owner).error["message"]
        assert "its preparation has taken longer than 2 s" in message

        def says_when_it_is_tried_again() -> bool:
            status = endpoint.directory.read_status()
            reported = cloud.reports[-1].detail.get("environments", [])
            return all("retry_at" in row for row in (*status.get("environments", [{}]), *(reported or [{}])))

        wait_until(says_when_it_is_tried_again)
        assert cloud.end(cloud.submit(answer)).value == 42


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A directory of this machine. What is mounted there later is there for an endpoint of an ordinary user, too."""
    directory = tmp_path / "place"
    directory.mkdir()
    if os.geteuid() != 0:
        yield directory
        return
    for options in (["--bind", directory], ["--make-shared"]):
        subprocess.run(["mount", *options, directory], check=True)
    yield directory
    subprocess.run(["umount", "--lazy", directory], check=True)


def test_an_endpoint_stops_while_a_worker_waits_for_a_location_that_hangs(tmp_path: Path, shared: Path) -> None:
    environment = make_venv(shared / "venv")
    environments = {"locations": [f"{tmp_path}/*"], "fork": False}
    engine = {"isolation": "auto", "environments": environments, "max_tasks_per_worker": 1}
    with running_endpoint(tmp_path / "home", engine=engine, reachable=[tmp_path]) as endpoint:
        cloud = endpoint.cloud

        def is_starting() -> bool:
            found = cloud.reports[-1].detail.get("environments") or [{"starting": 0}]
            return bool(found[0]["starting"])

        assert cloud.end(cloud.submit(answer, environment=environment, submitter=SUBMITTER)).value == 42
        with hung_mount(shared):
            cloud.submit(answer, environment=environment, submitter=SUBMITTER)
            wait_until(is_starting)
            assert cloud.end(cloud.submit(answer)).value == 42
            assert endpoint.stop() == 0
        assert "Traceback" not in endpoint.log()


def test_a_graph_in_several_environments_that_its_submitter_may_not_use_fails(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    stages = []
    for number in range(3):
        link = tmp_path / "open" / str(number)
        link.symlink_to(tmp_path)  # it is looked up before it is refused
        environment = Environment(type="venv", location=str(link))
        inputs = (Input(number - 1, (0,)),) if number else ()
        stages.append(Stage(0, "abs", inputs, options=TaskOptions(environment=environment)))
    engine = {"isolation": "auto", "environments": {"locations": [f"{tmp_path}/open/*"]}}
    with running_endpoint(tmp_path / "home", engine=engine, reachable=[tmp_path]) as endpoint:
        cloud = endpoint.cloud
        body, call = cloud.serializer.pack_function(abs), cloud.serializer.pack_call([-1])
        graph = pack_graph(Graph(tuple(stages), (call,) * 3, 2))
        callees = (Callee("id", hashlib.sha256(body).hexdigest()),)
        [task_id] = cloud.submit_raw(body, [graph], callees=callees, submitter=SUBMITTER)
        message = cloud.end(task_id).error["message"]
        assert "stage 0 (abs)" in message
        assert "leads to one that is not among those that the owner allows" in message
