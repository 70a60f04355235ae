"""Environments of tasks: what there can be, and what they share."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from farcall_common.environments import (
    IMAGES,
    MAX_BYTES,
    OF_REGISTRIES,
    PREFIXES,
    TREES,
    TYPES,
    UV,
    Environment,
    requirement_problem,
)
from farcall_common.task_options import TaskOptions

SIF = {"type": "apptainer", "location": "/images/sci.sif"}


@pytest.mark.parametrize("type_", TYPES)
def test_every_type_has_a_valid_form(type_: str) -> None:
    location = {"location": "python:3.12-slim" if type_ in OF_REGISTRIES else "/opt/env"}
    fields = {"requirements": ["polars==1.*"]} if type_ == UV else location
    made = Environment.of({"type": type_, **fields})
    assert Environment.of(made) == made == msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Environment)
    assert {*IMAGES, *TREES, *PREFIXES, UV} == set(TYPES)


@pytest.mark.parametrize(
    ("type_", "location"),
    [
        ("apptainer", "docker-archive:/images/sci.tar"),
        ("apptainer", "oras://registry.example/sci:1"),
        ("podman", "oci:/images/sci:1"),
        ("docker", "registry.example:5000/sci@sha256:0"),
        ("shifter", "docker:lab/sci:1"),
    ],
)
def test_references_of_each_technology_are_taken(type_: str, location: str) -> None:
    assert Environment.of({"type": type_, "location": location}).location == location


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"type": "aptainer", "location": "x"}, "Did you mean 'apptainer'"),
        ({"type": "docker"}, "takes a location"),
        ({"type": "uv"}, "requirements"),
        ({"type": "uv", "requirements": ["a"], "location": "x"}, "no location"),
        (SIF | {"requirements": ["numpy"]}, "type apptainer takes no requirements"),
        ({"location": "/images/x", "type": ""}, "its type is missing"),
        (SIF | {"requirements": "numpy"}, "Expected `array`"),
        ({"type": "uv", "requirements": ["-r /etc/passwd"]}, "dash"),
        ({"type": "uv", "requirements": [" --index-url=http://evil numpy"]}, "dash"),
        ({"type": "uv", "requirements": ["numpy --hash=x"]}, "dash"),
        ({"type": "uv", "requirements": [" "]}, "empty requirement"),
        ({"type": "uv", "requirements": ["numpy\n-e /home/victim"]}, "control"),
        ({"type": "uv", "requirements": ["p" * 290] * 20}, f"{MAX_BYTES} bytes"),
        ({"type": "docker", "location": "--privileged"}, "dash"),
        ({"type": "docker", "location": "python:3.12\x1b[2J"}, "control"),
        ({"type": "docker", "location": "python:\ud800"}, "control"),
        (SIF | {"name": "safe\u202egnp"}, "control"),
        (SIF | {"name": "safe\u2066"}, "control"),
        ({"type": "docker", "location": " python"}, "spaces"),
        ({"type": "apptainer", "location": "/shared/../home/victim/x.sif"}, "'..'"),
        ({"type": "conda", "location": "base"}, "conda env list"),
        ({"type": "venv", "location": "~/env"}, "absolute path"),
        ({"type": "bubblewrap", "location": "rootfs"}, "absolute path"),
        (
            SIF | {"location": "python:3.12-slim"},
            "a URI \\(docker://NAME\\) or an absolute path of the endpoint's nodes",
        ),
        (SIF | {"location": "sci.sif", "type": "singularity"}, "not 'sci.sif'"),
        ({"type": "docker", "location": "/images/sci.sif"}, "apptainer for a file"),
        ({"type": "shifter", "location": "./sci"}, "takes a reference \\(NAME:TAG\\), not"),
        ({"type": "podman", "location": "./sci"}, "a reference \\(NAME:TAG\\) or an absolute path"),
        (SIF | {"preload": ["os; import evil"]}, "preload"),
        (SIF | {"preload": ["os\n"]}, "preload"),
        (SIF | {"preload": ["a"] * 101}, "100 modules"),
        (SIF | {"name": "x" * 101}, "100 characters"),
        (SIF | {"image": "x"}, "no field 'image'"),
        (SIF | {"locations": "x"}, "Did you mean 'location'"),
        (SIF | {"type": 5}, "Expected `str`"),
    ],
)
def test_impossible_environment_is_refused_with_the_reason(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Environment.of(wrong)


@pytest.mark.parametrize("wrong", ["sci", 5, ["apptainer"]])
def test_only_a_mapping_is_an_environment(wrong: Any) -> None:
    with pytest.raises(TypeError, match="container"):
        Environment.of(wrong)


def test_key_is_that_of_what_runs_in_the_same_workers() -> None:
    one = Environment.of(SIF | {"name": "sci"})
    assert one.key == Environment.of(SIF).key == Environment.of(SIF | {"preload": None}).key
    others: list[dict[str, Any]] = [
        SIF | {"preload": []},
        SIF | {"preload": ["numpy"]},
        SIF | {"type": "singularity"},
        SIF | {"location": "/b"},
    ]
    assert len({one.key, *(Environment.of(each).key for each in others)}) == 5
    # Tasks of other releases wait in queues with it, and PROTOCOL.md says how it is made.
    assert one.key == "3bcf26159e2a68543b58801676330a23"
    assert (one.label, Environment.of(SIF).label) == ("sci", "apptainer:/images/sci.sif")
    assert len(Environment.of({"type": "uv", "requirements": ["package"] * 90}).label) < 100


def test_tasks_of_requirements_have_an_environment() -> None:
    options = TaskOptions.of(requirements=["polars==1.*"])
    assert options.environment == Environment(type="uv", requirements=("polars==1.*",))
    body = options.to_json()
    assert body["environment"] == {"type": "uv", "requirements": ["polars==1.*"]}
    # An API that knows no environments looks for a container of this name.
    assert body["container"] == options.environment.reference


class FormerOptions(msgspec.Struct):
    """Options as a release reads them that knows no environments."""

    container: str | None = None


def test_release_that_knows_no_environments_still_sees_that_there_is_one() -> None:
    for environment, container in ((Environment.of(SIF), "c-1"), (Environment.of(SIF), "")):
        options = TaskOptions().within(environment, container=container)
        former = msgspec.msgpack.decode(msgspec.msgpack.encode(options), type=FormerOptions)
        assert former.container == (container or environment.reference)


def test_environment_that_was_named_last_is_the_one() -> None:
    named = TaskOptions.of(container="sci")
    packed = named.changed(requirements=("numpy",))
    assert (packed.container, packed.environment) == (None, Environment(type="uv", requirements=("numpy",)))
    assert packed.changed(container="sci") == named
    assert packed.changed(environment=SIF).environment == Environment.of(SIF)
    assert packed.changed(walltime_s=5).environment == packed.environment
    nones: list[dict[str, Any]] = [{"requirements": None}, {"requirements": []}, {"environment": None}]
    for none in nones:
        assert packed.changed(**none) == TaskOptions()
    assert named.changed(requirements=None) == named
    assert named.changed(container=None) == TaskOptions()


@pytest.mark.parametrize(
    "both", [{"container": "a", "environment": SIF}, {"environment": SIF, "requirements": ["numpy"]}]
)
def test_task_has_one_environment(both: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="one environment"):
        TaskOptions.of(**both)


@pytest.mark.parametrize("wrong", ["numpy", b"numpy", 5])
def test_requirements_are_a_list(wrong: Any) -> None:
    with pytest.raises(TypeError, match="requirements: expected a list"):
        TaskOptions.of(requirements=wrong)


@pytest.mark.parametrize(
    "requirement",
    [
        *("numpy", "polars==1.*", "scipy >= 1.11, < 2", "requests[socks,security]>=2", "zope.interface", "a1"),
        *("x~=1.4.2", "x===1.0+local", "x!=1.5", "x (>=1,<2)", "torch==2.4.0+cu121", "ruamel_yaml"),
        'tomli>=2; python_version < "3.11"',
        "pywin32 ; sys_platform == 'win32' and platform_machine != 'arm64'",
    ],
)
def test_names_with_versions_are_taken(requirement: str) -> None:
    assert requirement_problem(requirement) == ""


@pytest.mark.parametrize(
    "requirement",
    [
        *("./here", "/etc", "../x", ".", "a/b", "package.whl", "package-1.0.tar.gz", "~/x", "C:\\x"),
        *("x @ https://example.org/x.whl", "https://example.org/x.whl", "git+https://example.org/x", "file:///etc"),
        *(
            "-r requirements.txt",
            "--index-url=https://example.org",
            "-e .",
            "-c x",
            "x --no-binary x",
            "x @ file:///etc",
        ),
        *("", " ", "x y", "x==", "==1", "x;", "x\nx", "x\n--index-url=y", "x[", "x[]", "x==1;import os;/etc"),
    ],
)
def test_everything_else_is_refused(requirement: str) -> None:
    assert "is refused: a requirement is the name of a package" in requirement_problem(requirement)


def test_a_refused_requirement_makes_no_environment() -> None:
    with pytest.raises(ValueError, match="is refused: a requirement is the name of a package"):
        Environment.of({"type": "uv", "requirements": ["polars", "git+https://example.org/x"]})


def test_many_spaces_are_checked_at_once() -> None:
    before = time.monotonic()
    assert requirement_problem("x" + " " * 100_000 + "!")
    assert time.monotonic() - before < 1.0
