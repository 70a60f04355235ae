"""The Dockerfile of the endpoint, tested without docker: its commands run here, and what the chart starts in the image
runs in the environment that they make."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import uv
import yaml

from tests.support.chart import render
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
_DOCKERFILE = ROOT / "endpoint" / "Dockerfile"
_FORWARDER = ROOT / "forwarder_fargate" / "Dockerfile"


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]


def test_the_image_is_that_of_the_forwarder_by_digest() -> None:
    image = re.search(r"(?m)^FROM (\S+@sha256:\S+) AS build$", _FORWARDER.read_text(encoding="utf-8"))
    assert image is not None
    assert _lines(_DOCKERFILE)[0] == f"ARG PYTHON={image[1]}"


def test_the_image_runs_as_the_user_of_the_chart() -> None:
    lines = _lines(_DOCKERFILE)
    pod = render()["StatefulSet/lab"]["spec"]["template"]["spec"]["securityContext"]
    assert f"USER {pod['runAsUser']}:{pod['runAsGroup']}" in lines
    assert any(line.startswith(f"RUN useradd --uid {pod['runAsUser']} ") for line in lines)
    assert lines[-1] == 'ENTRYPOINT ["farcall-endpoint"]'


@pytest.mark.slow
def test_the_build_makes_an_environment_in_which_the_chart_starts_an_endpoint(tmp_path: Path) -> None:
    environment, context = tmp_path / "opt", tmp_path / "context"
    context.mkdir()
    for name in ("pyproject.toml", "uv.lock"):
        shutil.copy(ROOT / name, context)
    for project in ROOT.glob("*/pyproject.toml"):
        if project.parent.name in ("common", "endpoint"):
            shutil.copytree(project.parent, context / project.parent.name)
        else:
            (context / project.parent.name).mkdir()
            shutil.copy(project, context / project.parent.name)
    path = os.pathsep.join([str(Path(uv.find_uv_bin()).parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    commands = [line.removeprefix("RUN ") for line in _lines(_DOCKERFILE) if line.startswith("RUN ")]
    assert commands[0].startswith("pip install")  # uv, which is installed here
    for command in commands[1:-1]:  # the last one creates the user
        local = command.replace("/opt/farcall", str(environment))
        subprocess.run(
            ["sh", "-ec", local], check=True, cwd=context, env={**os.environ, "PATH": path}, timeout=3 * WAIT_S
        )

    objects = render(blocks={"pods": True})
    pod = objects["StatefulSet/lab"]["spec"]["template"]["spec"]
    home, mounted = tmp_path / "home", tmp_path / "etc"
    mounted.mkdir()
    (mounted / "config.yaml").write_text(objects["ConfigMap/lab"]["data"]["config.yaml"], encoding="utf-8")
    (configure,) = pod["initContainers"]
    image = {"PATH": f"{environment / 'bin'}{os.pathsep}{os.defpath}", "FARCALL_HOME": str(home)}
    given = {each["name"]: each["value"].replace("/var/lib/farcall", str(home)) for each in configure["env"]}
    script = [*configure["command"], configure["args"][0].replace("/etc/farcall", str(mounted))]
    for _ in range(2):  # and again after a restart
        subprocess.run(script, check=True, env={**image, **given}, capture_output=True)
    configured = yaml.safe_load((home / "endpoints" / "lab" / "config.yaml").read_text(encoding="utf-8"))
    assert configured["engine"]["provider"]["type"] == "KubernetesProvider"

    (agent,) = pod["containers"]
    probe = subprocess.run(agent["readinessProbe"]["exec"]["command"], env=image, capture_output=True, check=False)
    assert (probe.returncode, b"Initialized" in probe.stdout) == (1, True)
    # Neither a cloud nor a cluster is here: it reads all of its configuration, and ends at the first of them.
    start = ["farcall-endpoint", *agent["args"]]
    own = {**image, "HOME": str(home), "FARCALL_API_URL": "http://127.0.0.1:1", "FARCALL_TOKEN": "t"}
    started = subprocess.run(start, env=own, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert started.returncode in (69, 78), started.stderr
