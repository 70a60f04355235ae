"""Files that nodes copy from one another, on real processes: an agent with several managers, which are killed."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from farcall_common.environments import Environment
from farcall_common.file_arguments import File
from farcall_common.wire import TaskState, new_id
from tests.support.endpoint import EndpointProcess, running_endpoint
from tests.support.file_calls import submit
from tests.support.file_servers import WebServer
from tests.support.images import DEBIAN, image
from tests.waiting import wait_until

PROVIDER = {"type": "LocalProvider", "init_blocks": 3, "min_blocks": 3, "max_blocks": 3}
DATA = bytes(range(256)) * 40_000


@pytest.fixture
def web() -> Iterator[WebServer]:
    server = WebServer()
    yield server
    server.close()


def start(endpoint: EndpointProcess, web: WebServer, node_dir: Path, /, **files: Any) -> None:
    """With copies on nodes, and ``s3://lab`` at the web server, open to all."""
    config = yaml.safe_load(endpoint.directory.config_file.read_text())
    options = {"endpoint": web.url, "access_key_id": "a", "secret_access_key": "b", "region": "x"}
    storages = [
        {"url": "s3://lab", "options": options, "submitters": "*", "write": True},
        {"url": web.url, "submitters": "*"},
    ]
    node_dir.mkdir()
    config["files"] = {"storages": storages, "node_cache": 1, "node_dir": str(node_dir), **files}
    endpoint.directory.config_file.write_text(yaml.safe_dump(config))
    endpoint.start()
    wait_until(lambda: endpoint.directory.read_status().get("workers") == 3, "three workers")


@pytest.fixture
def endpoint(tmp_path: Path, web: WebServer) -> Iterator[EndpointProcess]:
    with running_endpoint(tmp_path / "home", workers=1, start=False, engine={"provider": PROVIDER}) as endpoint:
        start(endpoint, web, tmp_path / "nodes")
        yield endpoint


def look(source: File, seconds: float) -> tuple[str, str, int]:
    """The path of a file, its SHA-256, and the pid of the manager; a task that takes so long."""
    import hashlib
    import os
    import time

    time.sleep(seconds)
    digest = hashlib.sha256(source.path.read_bytes()).hexdigest()
    return str(source.path), digest, os.getppid()


def copy(source: File, out: File) -> str:
    with source.open("rb") as file, out.open("wb") as written:
        written.write(file.read()[:10])
    return str(out.path)


def spoil(source: File) -> str:
    source.path.chmod(0o600)
    with source.open("r+b") as file:
        file.write(b"spoiled")
    return str(source.path)


def call_with_file(source: File) -> tuple[str, str]:
    from farcall import current

    def path_of(given: Any) -> str:
        given.path.read_bytes()
        return str(given.path)

    called = current().submit(path_of, source).result()
    return str(source.path), str(called)


def source(web: WebServer, path: str = "/data", content: bytes = DATA) -> File:
    web.files.setdefault(path, content)
    return File(web.url + path, sha256=hashlib.sha256(content).hexdigest())


def values(endpoint: EndpointProcess, task_ids: list[str]) -> list[Any]:
    ends = list(endpoint.cloud.ends(task_ids))
    assert [each.state for each in ends] == [TaskState.SUCCESS] * len(task_ids), [each.error for each in ends]
    return [each.value for each in ends]


def test_each_node_has_one_copy_and_the_source_is_read_once(
    endpoint: EndpointProcess, web: WebServer, tmp_path: Path
) -> None:
    given, nodes = source(web), tmp_path / "nodes"
    seen = values(endpoint, [submit(endpoint, look, given, 0.1) for _ in range(30)])
    assert {digest for _, digest, _ in seen} == {given.sha256}
    assert all(Path(path).is_relative_to(nodes) and Path(path).name == "data" for path, _, _ in seen)
    assert len({manager for _, _, manager in seen}) == 3
    assert web.requests["GET", "/data"] == 1
    assert len(list(nodes.glob(f"*/owner/copies/{given.sha256}"))) == 3
    wait_until(lambda: not list(nodes.glob("*/owner/tasks/*")), "the links of all tasks are removed")
    endpoint.stop()
    assert list(nodes.iterdir()) == []


def test_outputs_are_in_the_endpoints_directory_and_calls_read_its_copy(
    endpoint: EndpointProcess, web: WebServer, tmp_path: Path
) -> None:
    [written] = values(endpoint, [submit(endpoint, copy, source(web), File("s3://lab/out", "w"))])
    assert Path(written).is_relative_to(endpoint.directory.path)
    assert web.stored["/lab/out"] == DATA[:10]
    [(path, called)] = values(endpoint, [submit(endpoint, call_with_file, source(web))])
    assert Path(path).is_relative_to(tmp_path / "nodes")
    assert Path(called).is_relative_to(endpoint.directory.path)


def test_a_copy_that_a_task_has_spoiled_is_not_used_again(endpoint: EndpointProcess, web: WebServer) -> None:
    given = source(web)
    [spoiled] = values(endpoint, [submit(endpoint, spoil, given)])
    seen = values(endpoint, [submit(endpoint, look, given, 0.1) for _ in range(9)])
    assert {digest for _, digest, _ in seen} == {given.sha256}
    assert spoiled not in {path for path, _, _ in seen}
    assert "were changed by tasks" in endpoint.log()


def test_a_task_goes_to_the_node_that_has_its_file(endpoint: EndpointProcess, web: WebServer) -> None:
    for number in range(3):
        given = source(web, f"/{number}", DATA + bytes([number]))
        first = values(endpoint, [submit(endpoint, look, given, 0.0)])
        for _ in range(4):  # all nodes are free each time
            again = values(endpoint, [submit(endpoint, look, given, 0.0)])
            assert again[0][2] == first[0][2]


def test_a_killed_manager_is_no_source_any_more(endpoint: EndpointProcess, web: WebServer, tmp_path: Path) -> None:
    given = source(web)
    values(endpoint, [submit(endpoint, look, given, 0.1) for _ in range(9)])
    for process in endpoint.managers()[:2]:
        process.kill()
    waiting = [submit(endpoint, look, given, 0.1) for _ in range(20)]
    assert {digest for _, digest, _ in values(endpoint, waiting)} == {given.sha256}
    wait_until(lambda: endpoint.directory.read_status().get("workers") == 3, "new managers")
    seen = values(endpoint, [submit(endpoint, look, given, 0.2) for _ in range(12)])
    assert all(Path(path).is_relative_to(tmp_path / "nodes") for path, _, _ in seen)
    assert web.requests["GET", "/data"] == 1
    wait_until(lambda: len(list((tmp_path / "nodes").iterdir())) == 3, "what they left is removed")


def test_a_file_that_no_node_has_room_for_is_read_from_the_endpoints_directory(tmp_path: Path, web: WebServer) -> None:
    with running_endpoint(tmp_path / "home", workers=1, start=False, engine={"provider": PROVIDER}) as endpoint:
        start(endpoint, web, tmp_path / "nodes", node_cache=0.001)
        for path, digest, _ in values(endpoint, [submit(endpoint, look, source(web), 0.0) for _ in range(5)]):
            assert Path(path).is_relative_to(endpoint.directory.path)
            assert digest == source(web).sha256
        assert endpoint.log().count("reads its files from the endpoint's directory") <= 3  # one line for each node
        status = endpoint.directory.read_status
        wait_until(lambda: status().get("tasks_without_node_copies") == 5, "the status counts them")
        assert "need more than 1,000,000 bytes" in status()["node_copies_problem"]


def test_a_node_without_the_directory_keeps_no_copies_and_says_so(tmp_path: Path, web: WebServer) -> None:
    with running_endpoint(tmp_path / "home", workers=1, start=False, engine={"provider": PROVIDER}) as endpoint:
        start(endpoint, web, tmp_path / "nodes", node_dir=str(tmp_path / "missing"))
        [(path, _, _)] = values(endpoint, [submit(endpoint, look, source(web), 0.0)])
        assert Path(path).is_relative_to(endpoint.directory.path)
        assert "this node keeps no copies of files" in endpoint.log()


def test_without_node_cache_no_node_keeps_copies(tmp_path: Path, web: WebServer) -> None:
    with running_endpoint(tmp_path / "home", workers=1) as endpoint:
        [(path, _, _)] = values(endpoint, [submit(endpoint, look, source(web), 0.0)])
        assert Path(path).is_relative_to(endpoint.directory.path)
        [manager] = endpoint.managers()
        assert "--node-cache" not in manager.cmdline()
        assert [each for each in manager.net_connections("inet") if each.status == "LISTEN"] == []


@pytest.mark.parametrize(
    ("isolation", "technology"),
    [("landlock", ""), ("bubblewrap", ""), ("process", ""), ("bubblewrap", "venv"), ("bubblewrap", "bubblewrap")],
)
def test_a_submitter_reads_its_copies_and_those_of_no_other_one(
    tmp_path: Path, web: WebServer, isolation: str, technology: str
) -> None:
    options = environment_options(technology)
    location = options["environment"].location if options else "/usr"
    engine = {"provider": PROVIDER, "isolation": isolation, "readable_paths": [location]}
    nodes = tmp_path / "home" / "nodes"
    with running_endpoint(tmp_path / "home", workers=1, start=False, engine=engine) as endpoint:
        start(endpoint, web, nodes)
        given, (ann, bob) = source(web), (new_id(), new_id())
        [(path, digest, _)] = values(endpoint, [submit(endpoint, look, given, 0.0, submitter=ann, **options)])
        assert digest == given.sha256
        assert Path(path).is_relative_to(nodes)
        [copy_of_ann] = nodes.glob(f"*/*/copies/{given.sha256}")
        other = str(copy_of_ann)
        trials = [submit(endpoint, try_to_read, given, other, submitter=bob, **options) for _ in range(9)]
        tried = values(endpoint, trials)
        expected = {"read"} if isolation == "process" else {"FileNotFoundError", "PermissionError"}
        assert {outcome for outcome, _ in tried} <= expected
        assert {own for _, own in tried} == {len(DATA)}
        assert len(list(nodes.glob(f"*/*/copies/{given.sha256}"))) > 1


def environment_options(technology: str) -> dict[str, Any]:
    """Of a task in an environment, or in none."""
    if not technology:
        return {}
    location = sys.prefix if technology == "venv" else str(image(DEBIAN))
    return {"environment": Environment(type=technology, location=location)}


def test_the_owners_tasks_in_a_container_read_copies_of_their_node(
    endpoint: EndpointProcess, web: WebServer, tmp_path: Path
) -> None:
    options = environment_options("bubblewrap")
    [(path, digest, _)] = values(endpoint, [submit(endpoint, look, source(web), 0.0, **options)])
    assert Path(path).is_relative_to(tmp_path / "nodes")
    assert digest == source(web).sha256


def try_to_read(given: File, other: str) -> tuple[str, int]:
    own = len(given.path.read_bytes())
    try:
        with open(other, "rb") as file:  # noqa: PTH123
            file.read()
    except OSError as error:
        return type(error).__name__, own
    return "read", own
