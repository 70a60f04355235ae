"""The wheels, installed into empty environments outside the clone: each alone, all together, on each Python that this
machine has, and as a new user uses them.

``FARCALL_ALL_PYTHONS=1`` (`make test-wheels`) runs all of it on each Python; without it, those other than this one only
start the programs and run a function.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from farcall_infra.bundles import ARM64, FORWARDER, LAMBDAS
from farcall_infra.release import this_release
from tests.docs.pages import DOCS, Page, follow
from tests.support.wheels import THIS_PYTHON, Installation, NoWheel, build_wheels, find_python, install
from tests.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.timeout(1200)  # a minute on a good machine

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
WHOLE = PYTHONS if os.environ.get("FARCALL_ALL_PYTHONS") else (THIS_PYTHON,)

#: wheel with extras -> packages that must import, module by module.
PUBLISHED = {
    "farcall-common": ["farcall_common.errors", "farcall_common.wire"],
    "farcall-common[payload]": ["farcall_common.payload"],
    "farcall-common[store]": ["farcall_common.store"],
    "farcall": ["farcall"],
    "farcall[globus]": ["farcall_common.globus"],
    "farcall-endpoint[globus]": ["farcall_endpoint.files.movers.globus"],
    "farcall[otel]": ["farcall._tracing"],
    "farcall-endpoint": ["farcall_endpoint"],
    "farcall-local": ["farcall_local"],
    "farcall-analytics": ["farcall_analytics"],
}

IMPORT_ALL = """
import importlib, pkgutil, sys
# What needs an extra is named to be imported.
of_extras = {
    "farcall_endpoint.files.globus_login", "farcall_endpoint.files.movers.globus",
    "farcall_endpoint.files.movers.globus_documents",
    "farcall_endpoint.files.movers.globus_records",
}
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(getattr(package, "__path__", ()), name + "."):
        if module.name.endswith((".__main__", ".env")) or ".versions." in module.name:
            continue
        if module.name not in of_extras:
            importlib.import_module(module.name)
"""

RUN_A_FUNCTION = """
from farcall_endpoint import Engine

with Engine(max_workers=1) as engine:
    print(engine.submit(lambda number: {"square": number * number}, 12).result())
"""

RELEASE = """
from farcall_infra.bundles import ARM64, FORWARDER, LAMBDAS
from farcall_infra.release import this_release

print(this_release(), LAMBDAS.digest(ARM64), FORWARDER.digest(ARM64))
"""

BUNDLE = """
import sys
from pathlib import Path

from farcall_infra.bundles import FORWARDER, HOST

FORWARDER.build(Path("bundle"), platform=HOST)
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheels(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module", params=WHOLE)
def everything(request: pytest.FixtureRequest, wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return _install(str(request.param), tmp_path_factory.mktemp("everything") / "user", wheels, "farcall[all]")


def _install(version: str, directory: Path, wheels: Path, *requirements: str) -> Installation:
    python = find_python(version)
    if python is None:
        pytest.skip(f"this machine has no Python {version}")
    try:
        return install(directory, wheels, *requirements, python=python)
    except NoWheel as error:
        pytest.skip(f"a dependency has no wheel for Python {version}: {error}")


@pytest.mark.parametrize("requirement", sorted(PUBLISHED))
def test_an_isolated_install_imports(requirement: str, wheels: Path, tmp_path: Path) -> None:
    """A dependency that is not declared fails here."""
    alone = install(tmp_path / "user", wheels, requirement)
    alone.run("python", "-W", "error", "-c", IMPORT_ALL, *PUBLISHED[requirement])


@pytest.mark.parametrize("version", [version for version in PYTHONS if version not in WHOLE])
def test_the_wheels_work_on_other_pythons(version: str, wheels: Path, tmp_path: Path) -> None:
    user = _install(version, tmp_path / "user", wheels, "farcall", "farcall-endpoint")
    _starts(user)


def test_programs_start(everything: Installation) -> None:
    _starts(everything)
    assert "cloud" in everything.run("farcall", "--help").stdout


def _starts(user: Installation) -> None:
    assert "Commands" in user.run("farcall", "--help").stdout
    assert "Commands" in user.run("farcall-endpoint", "--help").stdout
    assert "0.1.0" in user.run("farcall", "version").stdout
    assert user.run("python", "-W", "error", "-c", RUN_A_FUNCTION).stdout == "{'square': 144}\n"


def test_the_site_templates_are_in_the_wheel_of_the_endpoint(everything: Installation) -> None:
    listed = everything.run("farcall-endpoint", "configure", "here", "--template", "list").stdout
    assert [path.stem for path in (DOCS / "endpoint" / "sites").glob("*.yaml") if path.stem not in listed] == []


def test_wheels_have_the_licence_and_a_description(everything: Installation) -> None:
    site = next(everything.directory.glob("venv/lib/python*/site-packages"))
    found = sorted(site.glob("farcall*.dist-info"))
    assert len(found) == 7
    for each in found:
        assert (each / "licenses" / "LICENSE").stat().st_size > 10_000
        metadata = (each / "METADATA").read_text(encoding="utf-8")
        assert "Description-Content-Type: text/markdown" in metadata
        assert "\n# " in metadata
        for line in metadata.splitlines():
            if line.startswith("Requires-Dist: farcall-"):
                assert "==0.1.0" in line


def test_the_cloud_commands_work_without_a_clone(everything: Installation) -> None:
    cost = json.loads(everything.run("farcall", "cloud", "cost", "--profile", "hobby", "--json").stdout)
    assert 20 < cost["idle_usd"] < 35
    printed = everything.run("farcall", "cloud", "profiles").stdout
    (everything.folder / "my-profiles.toml").write_text(printed, encoding="utf-8")
    # Without an account and, in this environment, without the CDK's command line.
    options = ("-c", "profiles=my-profiles.toml", "-c", "database.authorities=", "--region", "eu-central-1", "--json")
    doctor = everything.run("env", "FARCALL_CDK=absent", "farcall", "cloud", "doctor", *options, status=1)
    outcomes = {finding["what"]: finding for finding in json.loads(doctor.stdout)}
    assert outcomes["Node"]["outcome"] == "fine"
    assert outcomes["CDK command line"]["outcome"] == "failed"
    assert "aws configure" in outcomes["credentials"]["hint"]


def test_a_deployment_from_wheels_is_that_of_the_clone(everything: Installation) -> None:
    ours = f"{this_release()} {LAMBDAS.digest(ARM64)} {FORWARDER.digest(ARM64)}"
    assert everything.run("python", "-c", RELEASE).stdout.strip() == ours
    everything.run("python", "-c", BUNDLE)
    everything.run("env", "PYTHONPATH=bundle", "python", "-S", "-c", "import farcall_forwarder.__main__")


# -- a new user --------------------------------------------------------------------------------------------------------

SCRIPT = """\
import sys

from farcall import Executor


def wait_for(path, number):
    import pathlib
    import time

    pathlib.Path(f"{path}.{number}").touch()
    while not pathlib.Path(path).exists():
        time.sleep(0.05)
    return number * number


if __name__ == "__main__":
    with Executor("here") as executor:
        futures = [executor.submit(wait_for, sys.argv[1], number) for number in range(3)]
        print(executor.task_group_id, flush=True)
        print([future.result() for future in futures])
"""

LATER = """\
import sys

from farcall import Executor

with Executor("here") as executor:
    print([future.result() for future in executor.reload_tasks(sys.argv[1])])
"""

OFFLINE = """\
from farcall import Executor

future = Executor("off").submit(pow, 2, 10)
message = ""
while "offline" not in message:  # the reason is known after some seconds
    try:
        future.result(timeout=0.2)
    except TimeoutError as error:
        message = str(error)
print(message)
future.cancel()
"""


@pytest.fixture
def new_user(everything: Installation) -> Iterator[Installation]:
    yield everything
    for name in ("here", "off"):
        everything.run("sh", "-c", f"farcall-endpoint stop {name} || true")
    everything.run("farcall", "local", "down")


def test_the_first_day_of_a_new_user(new_user: Installation) -> None:
    """The tutorial, and before its last step what goes wrong on a first day."""
    tutorial = Page.read(DOCS / "tutorial.md")
    last = next(number for number, block in enumerate(tutorial.blocks) if "farcall local down" in block.body)
    assert follow(tutorial.blocks[:last], folder=new_user.folder, environment=new_user.environment) >= 5

    typo = new_user.run("farcall", "run", "hello.py:hello", "world", "-e", "hree", status=66)
    assert "there is no endpoint named 'hree'" in typo.stderr
    refused = new_user.run("farcall", "run", "hello.py:hello", "1", "2", status=65)
    assert "hello() takes 1 positional argument but 2 were given; it is called as hello(name" in refused.stderr
    (new_user.folder / "fails.py").write_text("def divide(number):\n    return 1 / number\n")
    failed = new_user.run("farcall", "run", "fails.py:divide", "0", status=1)
    assert "ZeroDivisionError: division by zero" in failed.stderr
    assert "return 1 / number" in failed.stderr
    _an_endpoint_that_is_off(new_user)
    _a_script_that_is_interrupted(new_user)

    follow(tutorial.blocks[last:], folder=new_user.folder, environment=new_user.environment)
    wait_until(lambda: not list(new_user.processes()), "the end of all processes of the user")


def _an_endpoint_that_is_off(user: Installation) -> None:
    user.run("farcall-endpoint", "configure", "off")
    user.run("farcall-endpoint", "start", "off", "--detach")
    user.run("farcall-endpoint", "stop", "off")
    waiting = user.start("farcall", "run", "hello.py:hello", "world", "-e", "off")
    assert waiting.stderr is not None
    assert waiting.stderr.readline().startswith("Waiting: Endpoint off has been offline since ")
    waiting.send_signal(signal.SIGINT)
    waiting.send_signal(signal.SIGINT)
    waiting.communicate(timeout=WAIT_S)
    ended = user.run("farcall", "run", "hello.py:hello", "world", "-e", "off", "--timeout", "1", status=75)
    assert "Endpoint off has been offline since " in ended.stderr
    (user.folder / "offline.py").write_text(OFFLINE, encoding="utf-8")
    assert "Endpoint off has been offline since " in user.run("python", "offline.py").stdout


def _a_script_that_is_interrupted(user: Installation) -> None:
    (user.folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    (user.folder / "later.py").write_text(LATER, encoding="utf-8")
    script = user.start("python", "script.py", str(user.folder / "go"))
    assert script.stdout is not None
    group = script.stdout.readline().strip()
    # Python misses a Ctrl-C that comes in the instant in which it begins to wait.
    wait_until((user.folder / "go.0").exists, "a task that runs")
    script.send_signal(signal.SIGINT)
    _, errors = script.communicate(timeout=WAIT_S)
    assert f"3 tasks will continue; press Ctrl-C again to cancel now. Later: `farcall groups wait {group}`" in errors
    assert script.returncode not in (0, 1), "a shell sees that it was interrupted"
    (user.folder / "go").touch()
    assert user.run("python", "later.py", group).stdout == "[0, 1, 4]\n"
    user.run("farcall", "groups", "wait", group)
