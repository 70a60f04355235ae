"""Environments: tasks run in images, Python prefixes and packages that they name, and never outside of them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jupyter_client.manager import start_new_kernel

import farcall
from farcall_local.deployment import Deployment
from farcall_local.endpoint import LocalEndpoint
from tests.support.endpoint.ordinary_endpoint import OrdinaryEndpoint
from tests.support.images import DEBIAN, WITHOUT_PYTHON, image
from tests.waiting import WAIT_S, wait_until


def where() -> dict[str, str]:
    """What the environment of a task looks like from inside."""
    import os
    import sys

    return {
        "prefix": sys.prefix,
        "root": " ".join(sorted(os.listdir("/"))),  # noqa: PTH208 - it travels without this module's imports
        "pid": str(os.getpid()),
        "endpoint": os.environ.get("FARCALL_ENDPOINT_ID", ""),
    }


def answer_of_package() -> int:
    import farcall_test_package  # type: ignore[import-not-found]

    return int(farcall_test_package.ANSWER)


def readable(path: str) -> bool:
    from pathlib import Path

    try:
        Path(path).read_bytes()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of packages: a directory with one tiny wheel."""
    directory = tmp_path_factory.mktemp("index")
    name = "farcall_test_package-1.2-py3-none-any.whl"
    files = {
        "farcall_test_package.py": "ANSWER = 42\n",
        "farcall_test_package-1.2.dist-info/METADATA": (
            "Metadata-Version: 2.1\nName: farcall-test-package\nVersion: 1.2\n"
        ),
        "farcall_test_package-1.2.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files["farcall_test_package-1.2.dist-info/RECORD"] = "".join(f"{path},,\n" for path in files)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    (directory / name).write_bytes(content.getvalue())
    return directory


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python prefix of a user, without any package."""
    directory = tmp_path_factory.mktemp("prefix") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True, timeout=WAIT_S)
    return directory


@pytest.fixture(scope="module")
def sites(
    cloud: Deployment, tmp_path_factory: pytest.TempPathFactory, wheels: Path, prefix: Path
) -> Iterator[LocalEndpoint]:
    """An endpoint of ada's with two workers, which everybody may use."""
    home = tmp_path_factory.mktemp("environments")
    endpoint = OrdinaryEndpoint(
        "environments",
        home=home,
        environment=cloud.environment("ada"),
        owned=[wheels, prefix],
        reachable=[image(DEBIAN)],
    )
    endpoint.configure()
    (endpoint.directory / "config.yaml").write_text(
        "engine:\n"
        "  max_workers_per_node: 2\n"
        f"  readable_paths: [{image(DEBIAN)}]\n"
        "  environments:\n"
        f"    index_url: {wheels}\n"
    )
    headers = {"Authorization": f"Bearer {cloud.tokens['ada']}"}
    with endpoint, httpx.Client(base_url=cloud.api_url, headers=headers, timeout=WAIT_S, trust_env=False) as web:
        assert web.put(f"/v3/endpoints/{endpoint.endpoint_id}", json={"public": True}).status_code == 200
        yield endpoint


@pytest.fixture
def executor(client: farcall.Client, sites: LocalEndpoint) -> Iterator[farcall.Executor]:
    with farcall.Executor(sites.endpoint_id, client=client) as running:
        yield running


def test_a_task_runs_in_a_root_file_system_of_its_own(client: farcall.Client, executor: farcall.Executor) -> None:
    name = "debian-tree"
    client.register_container(str(image(DEBIAN)), "bubblewrap", name)
    try:
        inside = executor.options(container=name).submit(where).result(WAIT_S)
        outside = executor.submit(where).result(WAIT_S)
    finally:
        client.delete_container(name)
    assert inside["prefix"] == "/usr"
    assert inside["root"] != outside["root"]
    assert outside["prefix"] == sys.prefix


def test_a_task_runs_in_a_prefix(executor: farcall.Executor, prefix: Path) -> None:
    found = executor.options(environment={"type": "venv", "location": str(prefix)}).submit(where).result(WAIT_S)
    assert found["prefix"] == str(prefix)


def test_a_notebook_finds_its_environment_warm_after_a_restart_of_its_kernel(
    cloud: Deployment, sites: LocalEndpoint, prefix: Path, tmp_path: Path
) -> None:
    setting_up = f"""
import farcall
client = farcall.Client()
client.register_container({str(prefix)!r}, "venv", "notebook")
executor = farcall.Executor({sites.endpoint_id!r}, client=client, container="notebook")
def where():
    import os, sys
    return sys.prefix, os.getpid()
"""
    ask = f"print(*executor.submit(where).result({WAIT_S}))"
    own = {"HOME": str(tmp_path), "JUPYTER_CONFIG_DIR": str(tmp_path), "IPYTHONDIR": str(tmp_path / "ipython")}
    manager, client = start_new_kernel(env={**os.environ, **cloud.environment("ada"), **own}, cwd=str(tmp_path))
    said: list[str] = []

    def hear(message: dict[str, Any]) -> None:
        content = message["content"]
        said.append(content.get("text") or "".join(content.get("traceback", ())))

    try:
        for cell in (setting_up, ask, ask):
            client.execute_interactive(cell, output_hook=hear, timeout=WAIT_S)
        manager.restart_kernel(now=True)  # by SIGKILL
        client.wait_for_ready(WAIT_S)
        for cell in (setting_up, ask):
            client.execute_interactive(cell, output_hook=hear, timeout=WAIT_S)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    answers = "".join(said).split("\n")
    assert answers[0].split()[0] == str(prefix)
    assert answers == [answers[0]] * 3 + [""], "one warm worker"


def test_requirements_are_installed(executor: farcall.Executor) -> None:
    with_package = executor.options(requirements=["farcall-test-package==1.*"])
    assert with_package.submit(answer_of_package).result(WAIT_S) == 42
    with pytest.raises(farcall.TaskFailed) as failed:
        executor.options(requirements=["farcall-no-such-package"]).submit(answer_of_package).result(WAIT_S)
    assert failed.value.record.code == "REQUIREMENTS_FAILED"
    assert "farcall-no-such-package" in str(failed.value)


def test_a_function_keeps_its_environment_for_others_who_run_it(
    client: farcall.Client, other_client: farcall.Client, sites: LocalEndpoint
) -> None:
    name = "debian-of-function"
    client.register_container(str(image(DEBIAN)), "bubblewrap", name)
    function_id = client.register_function(where, container=name, public=True)
    client.delete_container(name)
    task_id = other_client.run(endpoint_id=sites.endpoint_id, function_id=function_id)
    assert other_client.get_result(task_id, wait_s=WAIT_S)["prefix"] == "/usr"


def test_an_image_that_cannot_run_python_fails_its_tasks_and_no_others(executor: farcall.Executor) -> None:
    bad = executor.options(environment={"type": "bubblewrap", "location": str(image(WITHOUT_PYTHON))})
    with pytest.raises(farcall.TaskFailed) as failed:
        bad.submit(where).result(WAIT_S)
    assert failed.value.record.code == "ENVIRONMENT_WITHOUT_PYTHON"
    assert executor.submit(where).result(WAIT_S)["prefix"] == sys.prefix


def test_another_submitter_reaches_nothing_of_the_owner_through_an_environment(
    other_client: farcall.Client, sites: LocalEndpoint
) -> None:
    secret = sites.directory / "endpoint.json"
    with farcall.Executor(sites.endpoint_id, client=other_client) as theirs:
        for environment in (
            {"type": "bubblewrap", "location": str(sites.directory)},
            {"type": "venv", "location": str(sites.directory)},
        ):
            with pytest.raises(farcall.TaskFailed) as failed:
                theirs.options(environment=environment).submit(readable, "/endpoint.json").result(WAIT_S)
            assert failed.value.record.code == "CONTAINER_UNSUPPORTED"
        image_of_all = theirs.options(environment={"type": "bubblewrap", "location": str(image(DEBIAN))})
        assert image_of_all.submit(readable, str(secret)).result(WAIT_S) is False
        assert image_of_all.submit(readable, "/etc/os-release").result(WAIT_S) is True


def test_status_shows_what_is_warm_and_prewarm_makes_it(
    executor: farcall.Executor, sites: LocalEndpoint, prefix: Path
) -> None:
    executor.options(environment={"type": "venv", "location": str(prefix)}).submit(where).result(WAIT_S)
    sites.command("prewarm", sites.name, f"venv:{prefix}", "--count", "1")

    def warm() -> bool:
        facts = json.loads(sites.command("status", sites.name, "--json"))
        return any(
            each["environment"] == f"venv:{prefix}" and each["warm"] >= 1 for each in facts.get("environments", [])
        )

    wait_until(warm)
    sites.command("prewarm", sites.name, f"venv:{prefix}", "--count", "0")
    with pytest.raises(Exception, match="no-such-environment"):
        sites.command("prewarm", sites.name, "no-such-environment")
