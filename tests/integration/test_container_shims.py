"""Shifter, Singularity and podman-hpc: the argument contract, by strict shims. None of this ran on the real programs.

podman-hpc is a wrapper of Podman: its shim hands on to Podman itself.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farcall_common.environments import Environment
from farcall_endpoint.environments.runners.apptainer import ApptainerRunner
from farcall_endpoint.environments.runners.base import ImagePreparation, Mount, Runner, Start
from farcall_endpoint.environments.runners.oci import OciRunner
from farcall_endpoint.environments.runners.shifter import ShifterRunner
from tests.support.container_user import ContainerUser, podman_user
from tests.support.image_archive import write_archive
from tests.support.images import DEBIAN, image

pytestmark = pytest.mark.timeout(600)

_SEES = """
import json, os, sys
open("written", "w").write("by the container")
print(json.dumps({"directory": os.getcwd(), "variables": dict(os.environ), "arguments": sys.argv[1:],
                  "worker": os.listdir(os.environ["WORKER"]), "empty": os.environ.get("EMPTY")}))
"""


class Shims:
    """The shims on the search path of a user, with an image ``lab/sci:1``."""

    def __init__(self, user: ContainerUser) -> None:
        self.user = user
        self.home = str(user.home)
        programs, images = user.directory / "bin", user.directory / "shim-images"
        programs.mkdir()
        images.mkdir()
        (images / "lab_sci_1").symlink_to(user.images / DEBIAN)
        (user.home / "log").touch(mode=0o666)
        (user.home / "log").chmod(0o666)
        for name in ("shifter", "shifterimg", "singularity", "podman-hpc"):
            module = f"tests.support.shims.{name.replace('-', '_')}"
            script = f'export PYTHONPATH={user.directory}/repository\nexec {user.python} -m {module} "$@"\n'
            (programs / name).write_text(f"#!/bin/sh\n{script}")
            (programs / name).chmod(0o755)
        self.variables = {
            "PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin:/usr/sbin",
            "SHIM_LOG": str(user.home / "log"),
            "SHIM_IMAGES": str(images),
            "SHIM_SITE": self.home,
        }

    def run(self, command: list[str] | tuple[str, ...], **variables: str) -> tuple[int, str]:
        """The exit code and output of a command."""
        done = self.user.run(["env", *command], {**self.variables, **variables})
        return done.returncode, done.stdout

    def calls(self, program: str) -> list[list[str]]:
        """The arguments of each call of a program so far."""
        lines = map(json.loads, (self.user.home / "log").read_text().splitlines())
        return [line["arguments"] for line in lines if line["program"] == program]

    def prepare(self, runner: Runner, location: str, **variables: str) -> tuple[ImagePreparation, int, str]:
        """A preparation, and the exit code and output of its command."""
        cache = self.user.home / "cache"
        preparation = runner.prepare(Environment(type=runner.type, location=location), cache=cache)
        (command,) = preparation.commands
        return preparation, *self.run(command, **variables)


@pytest.fixture(scope="module")
def shims() -> Iterator[Shims]:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: sudo make setup-system")
    image(DEBIAN)
    with podman_user() as user:
        yield Shims(user)


def _sees(shims: Shims, runner: Runner, start_image: str, **changes: Any) -> dict[str, Any]:
    """What a program sees that is started with a worker's mounts."""
    worker, work = shims.user.directory_of(f"{runner.type}-worker"), shims.user.directory_of(f"{runner.type}-work")
    (worker / "code.py").touch()
    (worker / "run").mkdir()  # where a launcher mounts the directory of its socket
    run = shims.user.directory_of(f"{runner.type}-run")
    start = Start(
        start_image,
        ("/usr/bin/python3", "-I", "-S", "-c", _SEES, "an argument", "$(two)"),
        mounts=(
            Mount(str(worker), runner.worker_target),
            Mount(str(run), f"{runner.worker_target}/run"),
            Mount(str(work), str(work), writable=True),
        ),
        variables={"WORKER": runner.worker_target, "A": "1, '2'", "EMPTY": ""},
        directory=str(work),
        name=f"farcall-test-{os.getpid()}",
        **changes,
    )
    code, output = shims.run(runner.command(start), OUTSIDE="1")
    assert code == 0, output
    found: dict[str, Any] = json.loads(output)
    assert found["directory"] == str(work)
    assert (work / "written").read_text() == "by the container"
    assert found["arguments"] == ["an argument", "$(two)"]
    assert sorted(found["worker"]) == ["code.py", "run"]
    assert found["variables"]["A"] == "1, '2'"
    assert not found["empty"]
    assert "OUTSIDE" not in found["variables"]
    assert runner.stop(start) is None or shims.run(runner.stop(start) or [])[0] == 0
    return found


def test_shifter(shims: Shims) -> None:
    runner = ShifterRunner()
    preparation, code, output = shims.prepare(runner, "lab/sci:1")
    assert (code, preparation.image) == (0, "docker:lab/sci:1")
    assert "READY" in output
    assert shims.calls("shifterimg") == [["pull", "docker:lab/sci:1"], ["lookup", "docker:lab/sci:1"]]
    _sees(shims, runner, preparation.image)
    assert shims.calls("shifter")[-1][:2] == ["--image=docker:lab/sci:1", "--clearenv"]


def test_shifter_refuses(shims: Shims) -> None:
    runner = ShifterRunner()
    _, code, output = shims.prepare(runner, "lab/none:1")
    assert code == 1
    assert "status: FAILURE" in output
    assert "the image gateway has no docker:lab/none:1" in output
    _, code, output = shims.prepare(runner, "lab/sci:1", SHIM_NO_GATEWAY="1")
    assert code == 1
    assert "failed to contact the image gateway" in output
    for start, words in (
        (Start("docker:lab/none:1", ("true",)), "FAILED to lookup docker image lab/none:1"),
        (Start("docker:lab/sci:1", ("true",), options=("--privileged",)), "unrecognized option '--privileged'"),
        (Start("docker:lab/sci:1", ("true",), mounts=(Mount("/usr", "/etc/x"),)), "Invalid Volume Map"),
        (Start("docker:lab/sci:1", ("true",), mounts=(Mount(shims.home, "/new"),)), 'FAILED to find volume "to": /new'),
        (Start("docker:lab/sci:1", ("true",), mounts=(Mount("/usr", "/mnt"),)), 'volume "from": /usr'),
    ):
        code, output = shims.run(runner.command(start))
        assert code == 1
        assert words in output


def test_singularity(shims: Shims) -> None:
    runner = ApptainerRunner("singularity")
    preparation, code, output = shims.prepare(runner, "docker://lab/sci:1")
    assert code == 0, output
    assert Path(preparation.image).exists() or Path(preparation.image).is_symlink()
    _sees(shims, runner, preparation.image, network=False)
    of_directory = Start(str(shims.user.images / DEBIAN), ("true",), private_root=True)
    assert shims.run(runner.command(of_directory)) == (0, "")
    kinds = [call for call in shims.calls("singularity") if call[0] == "build"]
    assert [call[-1] for call in kinds] == ["docker://lab/sci:1"]
    assert ("--sandbox" in kinds[0]) == (stat.S_IMODE(Path("/dev/fuse").stat().st_mode) != 0o666), "as the user sees it"


def test_singularity_refuses(shims: Shims) -> None:
    runner = ApptainerRunner("singularity")
    _, code, output = shims.prepare(runner, "docker://lab/none:1")
    assert code == 255
    assert "manifest unknown" in output
    assert not list((shims.user.home / "cache").glob("*part-*"))
    for start, exit_code, words in (
        (Start("/nothing.sif", ("true",)), 255, "could not open image /nothing.sif"),
        (Start(str(shims.user.images / DEBIAN), ("true",), options=("--no-eval",)), 1, "unknown flag: --no-eval"),
    ):
        code, output = shims.run(runner.command(start))
        assert code == exit_code
        assert words in output


def test_podman_hpc(shims: Shims) -> None:
    runner = OciRunner("podman-hpc", python=shims.user.python)
    write_archive(shims.user.directory / "small.tar", image(DEBIAN), tag="lab/small:1")
    there, code, output = shims.prepare(OciRunner("podman"), f"docker-archive:{shims.user.directory}/small.tar")
    assert code == 0, output
    preparation, code, output = shims.prepare(runner, there.image)
    assert (code, output) == (0, ""), "it is not pulled"
    _sees(shims, runner, preparation.image)
    assert shims.run(runner.leftovers()) == (0, "")
    _, code, output = shims.prepare(runner, "127.0.0.1:1/lab/sci:1")
    assert code != 0
    assert "connection refused" in output
    assert "Pull failed." in output
    code, output = shims.run(runner.command(Start(preparation.image, ("true",), options=("--no-such-option",))))
    assert code == 125
    assert "unknown flag: --no-such-option" in output
