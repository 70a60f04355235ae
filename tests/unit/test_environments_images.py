"""Commands of Apptainer, Singularity, Podman, podman-hpc, Docker and Shifter, as lines that a person can read."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Final

import pytest

from farcall_common.environments import Environment
from farcall_endpoint.environments.runners.apptainer import ApptainerRunner
from farcall_endpoint.environments.runners.base import Mount, Runner, Start
from farcall_endpoint.environments.runners.oci import OciRunner
from farcall_endpoint.environments.runners.shifter import ShifterRunner

_START: Final = Start(
    image="IMAGE",
    command=("/usr/bin/python3", "-I", "/run/farcall/worker/boot.py", "/run/farcall/socket/s"),
    mounts=(Mount("/cache/worker", "/run/farcall/worker"), Mount("/home/lea/work", "/home/lea/work", writable=True)),
    variables={"OMP_NUM_THREADS": "4"},
    directory="/home/lea/work",
    options=("--of=owner",),
    name="farcall-7-3",
)
_BARE: Final = Start("IMAGE", ("python3",))
_APPTAINER: Final = ApptainerRunner("apptainer")
_SINGULARITY: Final = ApptainerRunner("singularity")
_LIMITS: Final = {"nofile": (1024, 20_000), "nproc": (9000, 9000)}
_PODMAN: Final = OciRunner("podman", python="PYTHON", limits=_LIMITS)
_PODMAN_HPC: Final = OciRunner("podman-hpc", python="PYTHON", limits=_LIMITS)
_DOCKER: Final = OciRunner("docker", user="1001:100")
_SHIFTER: Final = ShifterRunner()

_COMMANDS: Final[dict[str, tuple[Runner, Start, str]]] = {
    "apptainer": (
        _APPTAINER,
        _START,
        """
        env APPTAINERENV_OMP_NUM_THREADS=4
        apptainer --silent exec --cleanenv --pid --ipc --no-mount cwd --no-home --no-eval
        --bind /cache/worker:/run/farcall/worker:ro --bind /home/lea/work:/home/lea/work:rw --pwd /home/lea/work
        --of=owner IMAGE /usr/bin/python3 -I /run/farcall/worker/boot.py /run/farcall/socket/s
        """,
    ),
    "apptainer, of another submitter, without network": (
        _APPTAINER,
        dataclasses.replace(_BARE, private_root=True, network=False),
        """
        apptainer --silent exec --containall --no-mount hostfs,bind-paths --bind /etc/hosts:/etc/hosts:ro --no-home
        --no-eval --net --network none --pwd / IMAGE python3
        """,
    ),
    "apptainer with accelerators": (
        _APPTAINER,
        dataclasses.replace(_BARE, accelerators=("0",)),
        "apptainer --silent exec --cleanenv --pid --ipc --no-mount cwd --no-home --no-eval --nv --pwd / IMAGE python3",
    ),
    "singularity with accelerators of AMD": (
        _SINGULARITY,
        dataclasses.replace(_BARE, accelerators=("0",), amd=True, variables={"A": "b, c"}),
        """
        env 'SINGULARITYENV_A=b, c'
        singularity --silent exec --cleanenv --pid --ipc --no-mount cwd --no-home --rocm --pwd / IMAGE python3
        """,
    ),
    "podman": (
        _PODMAN,
        _START,
        """
        PYTHON -I -S -c ADOPT podman --log-level error run --rm --pull never --log-driver none --no-healthcheck
        --name farcall-7-3 --label farcall.container=farcall-7-3 --network host --read-only --user 0:0 --cap-drop ALL
        --security-opt no-new-privileges --security-opt label=disable --cgroups disabled
        --image-volume ignore --ulimit nofile=1024:20000 --ulimit nproc=9000:9000
        --mount type=bind,source=/cache/worker,target=/run/farcall/worker,readonly
        --mount type=bind,source=/home/lea/work,target=/home/lea/work --env OMP_NUM_THREADS=4
        --workdir /home/lea/work --of=owner --entrypoint /usr/bin/python3 IMAGE
        -I /run/farcall/worker/boot.py /run/farcall/socket/s
        """,
    ),
    "podman with a directory, without network": (
        _PODMAN,
        dataclasses.replace(_BARE, image="/images/sci", network=False),
        """
        PYTHON -I -S -c ADOPT podman --log-level error run --rm --pull never --log-driver none --no-healthcheck
        --network none --read-only --user 0:0 --cap-drop ALL --security-opt no-new-privileges
        --security-opt label=disable --cgroups disabled --image-volume ignore
        --ulimit nofile=1024:20000 --ulimit nproc=9000:9000 --workdir /
        --entrypoint python3 --no-hosts --rootfs /images/sci:O
        """,
    ),
    "podman with two accelerators": (
        _PODMAN,
        dataclasses.replace(_BARE, accelerators=("0,1",)),
        """
        PYTHON -I -S -c ADOPT podman --log-level error run --rm --pull never --log-driver none --no-healthcheck
        --network host --read-only --user 0:0 --cap-drop ALL --security-opt no-new-privileges
        --security-opt label=disable --cgroups disabled --image-volume ignore
        --ulimit nofile=1024:20000 --ulimit nproc=9000:9000
        --device nvidia.com/gpu=0 --device nvidia.com/gpu=1 --workdir / --entrypoint python3 IMAGE
        """,
    ),
    "podman-hpc with accelerators of AMD": (
        _PODMAN_HPC,
        dataclasses.replace(_BARE, accelerators=("0",), amd=True),
        """
        PYTHON -I -S -c ADOPT podman-hpc run --rm --pull never --log-driver none --no-healthcheck
        --network host --read-only --user 0:0 --cap-drop ALL --security-opt no-new-privileges
        --security-opt label=disable --cgroups disabled --image-volume ignore
        --ulimit nofile=1024:20000 --ulimit nproc=9000:9000
        --device /dev/kfd --device /dev/dri --group-add keep-groups --workdir / --entrypoint python3 IMAGE
        """,
    ),
    "docker": (
        _DOCKER,
        dataclasses.replace(_START, accelerators=("0", "1"), network=False),
        """
        docker run --rm --pull never --log-driver none --no-healthcheck
        --name farcall-7-3 --label farcall.container=farcall-7-3 --network none --read-only --user 1001:100
        --cap-drop ALL --security-opt no-new-privileges --security-opt label=disable
        --tmpfs /run:rw,exec,nosuid,nodev,mode=1777 --tmpfs /tmp:rw,exec,nosuid,nodev,mode=1777
        --tmpfs /var/tmp:rw,exec,nosuid,nodev,mode=1777 --gpus '"device=0,1"'
        --mount type=bind,source=/cache/worker,target=/run/farcall/worker,readonly
        --mount type=bind,source=/home/lea/work,target=/home/lea/work --env OMP_NUM_THREADS=4
        --workdir /home/lea/work --of=owner --entrypoint /usr/bin/python3 IMAGE
        -I /run/farcall/worker/boot.py /run/farcall/socket/s
        """,
    ),
    "shifter": (
        _SHIFTER,
        dataclasses.replace(
            _START,
            mounts=(Mount("/cache/worker", "/mnt"), Mount("/scratch/lea", "/scratch/lea", writable=True)),
            variables={"OMP_NUM_THREADS": "4", "EMPTY": ""},
        ),
        """
        shifter --image=IMAGE --clearenv --volume=/cache/worker:/mnt:ro --env=OMP_NUM_THREADS=4
        --workdir=/home/lea/work --of=owner --
        /usr/bin/python3 -I /run/farcall/worker/boot.py /run/farcall/socket/s
        """,
    ),
}


@pytest.mark.parametrize("name", _COMMANDS)
def test_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # else programs that this machine has are named by their paths
    runner, start, expected = _COMMANDS[name]
    command = runner.command(start)
    if "-c" in command[:4]:
        assert "PR_SET" not in command[4]
        assert "execvp" in command[4]
        command[4] = "ADOPT"
    assert command == shlex.split(expected)


@pytest.mark.parametrize(
    ("runner", "location", "image", "programs", "what"),
    [
        (_APPTAINER, "/images/sci.sif", "/images/sci.sif", [], ""),
        (_APPTAINER, "/images/sci", "/images/sci", [], ""),
        (
            _APPTAINER,
            "docker://lab/sci:1",
            "/cache/apptainer-988e8dda6ec2532bcfae87d1fe7af581",
            ["apptainer", "docker://lab/sci:1"],
            "apptainer is converting the image",
        ),
        (
            _SINGULARITY,
            "oras://lab/sci:1",
            "/cache/singularity-6989c3984c11eeb01cc9814ba4fc4592",
            ["singularity", "oras://lab/sci:1"],
            "singularity is converting the image",
        ),
        (_PODMAN, "lab/sci:1", "lab/sci:1", ["podman", "lab/sci:1"], "podman is pulling the image"),
        (_PODMAN, "docker://lab/sci:1", "lab/sci:1", ["podman", "lab/sci:1"], "podman is pulling the image"),
        (
            _PODMAN,
            "docker://--root=/",
            "docker://--root=/",
            ["podman", "docker://--root=/"],
            "podman is pulling the image",
        ),
        (_PODMAN, "/images/sci", "/images/sci", [], ""),
        (
            _PODMAN,
            "oci-archive:/images/sci.tar",
            "localhost/farcall-5e7428ad82c3e13a36164749241b6113:latest",
            ["podman", "oci-archive:/images/sci.tar"],
            "podman is loading the image",
        ),
        (_PODMAN_HPC, "lab/sci:1", "lab/sci:1", ["podman-hpc", "lab/sci:1"], "podman-hpc is pulling the image"),
        (_DOCKER, "lab/sci:1", "lab/sci:1", ["docker", "lab/sci:1"], "docker is pulling the image"),
        (_SHIFTER, "lab/sci:1", "docker:lab/sci:1", ["docker:lab/sci:1"], "shifter is pulling the image"),
        (_SHIFTER, "custom:lab/sci:1", "custom:lab/sci:1", ["custom:lab/sci:1"], "shifter is pulling the image"),
    ],
)
def test_preparation(runner: Runner, location: str, image: str, programs: list[str], what: str) -> None:
    found = runner.prepare(Environment(type=runner.type, location=location), cache=Path("/cache"))
    assert (found.image, found.what) == (image, what)
    assert len(found.commands) == bool(programs)
    for command in found.commands:
        assert command[:2] == ("sh", "-c")
        assert set(programs) <= set(command[3:])
        assert location.removeprefix("docker://") not in command[2], "what users wrote is no part of a script"


def test_each_image_has_a_name_of_its_own_in_the_cache() -> None:
    locations = [f"docker://lab/sci:{tag}" for tag in range(100)]
    images = {
        runner.prepare(Environment(type=runner.type, location=location), cache=Path("/cache")).image
        for location in locations
        for runner in (_APPTAINER, _SINGULARITY)
    }
    assert len(images) == 200


@pytest.mark.parametrize(
    ("runner", "location", "path"),
    [
        (_APPTAINER, "/images/sci.sif", "/images/sci.sif"),
        (_APPTAINER, "docker-archive:/home/lea/sci.tar:sci:1", "/home/lea/sci.tar"),
        (_APPTAINER, "docker-archive:///home/lea/sci.tar", "/home/lea/sci.tar"),
        (_APPTAINER, "docker://lab/sci:1", ""),
        (_PODMAN, "/images/sci", "/images/sci"),
        (_PODMAN, "oci:/home/lea/sci:1", "/home/lea/sci"),
        (_PODMAN, "lab/sci:1", ""),
        (_DOCKER, "lab/sci:1", ""),
        (_SHIFTER, "docker:lab/sci:1", ""),
    ],
)
def test_the_path_that_a_location_names(
    runner: ApptainerRunner | OciRunner | ShifterRunner, location: str, path: str
) -> None:
    assert runner.node_path(location) == path


@pytest.mark.parametrize(
    ("runner", "changes", "words"),
    [
        (_APPTAINER, {"mounts": (Mount("/a,b", "/c"),)}, "apptainer cannot mount /a,b"),
        (_PODMAN, {"mounts": (Mount("/a", '/b"'),)}, 'podman cannot mount /b"'),
        (_SHIFTER, {"mounts": (Mount("/a:b", "/c"),)}, "shifter cannot mount /a:b"),
        (_SHIFTER, {"network": False}, "shifter cannot keep a container from the network"),
        (_SHIFTER, {"private_root": True}, "shifter shows the node's directories to every container"),
    ],
)
def test_what_a_technology_cannot_do_is_refused(runner: Runner, changes: dict[str, object], words: str) -> None:
    with pytest.raises(OSError, match=words):
        runner.command(dataclasses.replace(_BARE, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("runner", [_APPTAINER, _SINGULARITY, _PODMAN, _PODMAN_HPC, _DOCKER, _SHIFTER])
def test_a_program_that_is_not_installed_is_missing(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert runner.missing() == f"{runner.type}: the program {runner.type} is not installed"


def test_the_daemon_of_docker_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\necho '\033[31mCannot connect to the Docker daemon\033[0m' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert _DOCKER.missing() == "docker: Cannot connect to the Docker daemon"
    program.write_text("#!/bin/sh\nexit 3\n")
    assert _DOCKER.missing() == "docker: exit code 3"
    program.write_text("#!/bin/sh\n")
    assert _DOCKER.missing() == ""


def test_root_without_a_capability_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "apptainer"
    words = "ERROR  : Requesting capability set 0x1 while permitted capability set is 0x0"
    program.write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    hint = "as root, it takes CAP_SYS_RESOURCE: an endpoint of an ordinary user works"
    assert _APPTAINER.missing() == f"apptainer: {words} ({hint})"
