"""Which environments tasks of other submitters than the owner may name."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from farcall_common.environments import Environment
from farcall_endpoint.config.settings import EnvironmentSettings
from farcall_endpoint.environments.prepare import access
from farcall_endpoint.environments.prepare.access import Place, Refused, confinement_of, locate, mounted_by_others

ANY = EnvironmentSettings()


def of(type_: str, location: str) -> Environment:
    return Environment(type=type_, location=location)


def refusal(
    environment: Environment, settings: EnvironmentSettings, *, readable: Collection[str], node_path: str = ""
) -> str:
    """Why tasks of other submitters may not use an environment; empty if they may."""
    try:
        locate(environment, settings, readable=readable, node_path=node_path)
    except Refused as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("type_", "location"),
    [
        ("podman", "python:3.12"),
        ("podman", "docker.example.org:5000/group/image-name:1.2@sha256:" + "0" * 64),
        ("docker", "docker://python"),
        ("apptainer", "docker://python:3.12"),
        ("apptainer", "oras://host.example.org/path/image:tag"),
        ("shifter", "docker:ubuntu:24.04"),
    ],
)
def test_images_of_registries_are_allowed_but_with_shifter(type_: str, location: str) -> None:
    assert bool(refusal(of(type_, location), ANY, readable=[])) == (type_ == "shifter")


@pytest.mark.parametrize(
    "location",
    [
        *(
            "docker-archive:/home/owner/image.tar",
            "dir:/home/owner",
            "oci:layout",
            "oci-archive:x",
            "file:///etc/passwd",
        ),
        *("containers-storage:x", "docker-daemon:x:y", "image.sif/../../x", "./image.sif", "~/image.sif", "sif:x"),
        *("docker://dir:x", "docker://containers-storage:x", "docker:oci:x"),
        *("http://169.254.169.254/latest", "localimage:x", "a b", "$HOME", "python:3.12\u0000"),
    ],
)
def test_other_ways_to_name_a_file_are_not(location: str) -> None:
    assert refusal(of("podman", location), ANY, readable=["/"])


def test_paths_that_they_may_read(tmp_path: Path) -> None:
    (tmp_path / "open" / "venv").mkdir(parents=True)
    (tmp_path / "closed" / "venv").mkdir(parents=True)
    (tmp_path / "open" / "link").symlink_to(tmp_path / "closed" / "venv")
    readable = [str(tmp_path / "open")]
    assert not refusal(of("venv", f"{tmp_path}/open/venv"), ANY, readable=readable)
    for name in ("closed/venv", "open/link", "open/missing", "open/../closed/venv"):
        assert refusal(of("venv", f"{tmp_path}/{name}"), ANY, readable=readable), name


@pytest.mark.parametrize("location", ["/proc/1/root", "/proc/self/cwd", "/sys", "/dev/shm"])
def test_no_paths_of_the_kernel(location: str) -> None:
    assert refusal(of("bubblewrap", location), ANY, readable=["/", "/proc", "/sys", "/dev"])


def test_the_file_that_a_reference_names_is_what_counts() -> None:
    """A runner knows what its references mean."""
    environment = of("podman", "python:3.12")
    assert refusal(environment, ANY, readable=[], node_path="relative")
    assert refusal(environment, ANY, readable=["/usr"], node_path="/etc")
    assert not refusal(environment, ANY, readable=["/usr"], node_path="/usr/bin")


def test_patterns_of_the_owner() -> None:
    settings = EnvironmentSettings(locations=("/sw/images/*", "docker://registry.example.org/*"))
    assert not refusal(of("apptainer", "/sw/images/a.sif"), settings, readable=[])
    assert not refusal(of("apptainer", "docker://registry.example.org/a"), settings, readable=[])
    for location in ("/sw/other.sif", "docker://python", "/sw/images/../../home/owner"):
        assert refusal(of("apptainer", location), settings, readable=["/"]), location


def test_patterns_of_the_owner_are_of_what_links_lead_to(tmp_path: Path) -> None:
    for name in ("store/a", "store/b", "home"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "images").symlink_to(tmp_path / "store")  # the owner's
    (tmp_path / "store" / "mine").symlink_to(tmp_path / "home")
    (tmp_path / "store" / "other").symlink_to("a")
    settings = EnvironmentSettings(locations=(f"{tmp_path}/images/[abmo]*",))
    for name, is_allowed in (("a", True), ("other", True), ("b", True), ("mine", False)):
        environment = of("bubblewrap", f"{tmp_path}/images/{name}")
        assert bool(refusal(environment, settings, readable=[])) != is_allowed, name
    for pattern in ("*", f"{tmp_path}/images/mine", f"docker-archive:{tmp_path}/images/*"):
        location = f"{tmp_path}/images/mine" if pattern[0] != "d" else f"docker-archive:{tmp_path}/images/a"
        settings = EnvironmentSettings(locations=(pattern,))
        node_path = location.removeprefix("docker-archive:")
        assert not refusal(of("podman", location), settings, readable=[], node_path=node_path), pattern


def test_links_of_others_in_a_pattern_are_not_followed(tmp_path: Path) -> None:
    """Who may write beside the owner's part of a pattern may not choose where it leads."""
    (tmp_path / "home").mkdir()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "images").symlink_to(tmp_path)
    for pattern, name in (("images/*", "images/home"), ("images", "images")):
        settings = EnvironmentSettings(locations=(f"{tmp_path}/open/{pattern}",))
        environment = of("bubblewrap", f"{tmp_path}/open/{name}")
        assert "leads to one" in refusal(environment, settings, readable=[])
        (tmp_path / "open").chmod(0o755)
        assert not refusal(environment, settings, readable=[])
        (tmp_path / "open").chmod(0o777)


def test_what_only_the_owner_can_replace_is_fixed(tmp_path: Path) -> None:
    image = tmp_path / "images" / "a"
    image.mkdir(parents=True)
    settings = EnvironmentSettings(locations=("*",), binds=(f"{tmp_path}/scratch", f"{tmp_path}:/other:ro"))

    def found(path: Path) -> Place | None:
        return locate(of("bubblewrap", str(path)), settings, readable=[], writable=[f"{tmp_path}/work"])

    assert found(image) == Place(str(image), is_fixed=True)
    (tmp_path / "link").symlink_to(image)
    assert found(tmp_path / "link") == Place(str(image), is_fixed=True)
    for name in ("scratch", "work", "farcall-temporary-1"):  # where tasks write
        (tmp_path / name / "a").mkdir(parents=True)
        assert found(tmp_path / name / "a") == Place(f"{tmp_path}/{name}/a", is_fixed=False)
    (tmp_path / "images").chmod(0o775)
    assert found(image) == Place(str(image), is_fixed=False)
    (tmp_path / "images").chmod(0o1777)
    assert found(image) == Place(str(image), is_fixed=True)
    assert found(tmp_path / "missing") == Place(f"{tmp_path}/missing", is_fixed=False)


def test_what_a_user_s_program_serves_as_a_file_system_is_not_fixed() -> None:
    options = {
        "/scratch/my\\040images": "rw,user_id=1001,allow_other",
        "/cvmfs": "ro,user_id=0",
        "/own": "rw,user_id=7",
    }
    lines = [
        f"{number} 27 0:48 / {path} rw - fuse.sshfs evil {each}"
        for number, (path, each) in enumerate(options.items(), 36)
    ]
    lines.append("30 27 0:1 / /plain rw - ext4 /dev/vda rw")
    assert mounted_by_others(lines, user=7) == {"/scratch/my images"}


def test_nothing_is_looked_up_where_a_program_of_others_serves_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = tmp_path / "served"
    (served / "venv").mkdir(parents=True)
    (tmp_path / "link").symlink_to("served/venv")
    (tmp_path / "own").mkdir()
    looked_up: list[str] = []

    def lstat(path: str, real: Callable[[str], os.stat_result] = os.lstat) -> os.stat_result:
        looked_up.append(str(path))
        return real(path)

    readable = [str(tmp_path)]
    assert not refusal(of("venv", f"{tmp_path}/link"), ANY, readable=readable)
    monkeypatch.setattr(access, "mounted_by_others", lambda *_, **__: {str(served)})
    monkeypatch.setattr(os, "lstat", lstat)
    for location in (f"{served}", f"{served}/venv", f"{tmp_path}/link"):
        assert "another user's program serves" in refusal(of("venv", location), ANY, readable=readable)
    assert not refusal(of("venv", f"{tmp_path}/own"), ANY, readable=readable)
    assert looked_up
    assert not [path for path in looked_up if path.startswith(str(served))]


def test_links_without_an_end_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert "too many links" in refusal(of("venv", f"{tmp_path}/a"), ANY, readable=[str(tmp_path)])


def test_where_an_image_is_mounted_for_a_confined_runner() -> None:
    def mounts(place: Place | None, *readable: str) -> tuple[bool, list[str]]:
        command = confinement_of(readable, "venv", image="/site/link", place=place)
        options = command[: command.index("--dev")]
        at = [index for index, word in enumerate(options) if word == "/site/link"]
        return "opened" in command, options[at[-1] - 2 : at[-1] + 1] if at else []

    assert mounts(None) == (False, ["--ro-bind-try", "/site/link", "/site/link"])
    assert mounts(Place("/sw/a", is_fixed=True)) == (False, ["--ro-bind-try", "/sw/a", "/site/link"])
    assert mounts(Place("/sw/a", is_fixed=False)) == (True, ["--ro-bind-fd", "9", "/site/link"])
    assert mounts(Place("/site/a", is_fixed=False), "/site") == (False, []), "it is looked up in the view"


def test_the_default_environment_is_for_all() -> None:
    settings = EnvironmentSettings(default=of("venv", "/home/owner/venv"))
    assert not refusal(of("venv", "/home/owner/venv"), settings, readable=[])
    assert refusal(of("venv", "/home/owner/other"), settings, readable=[])


@pytest.mark.parametrize("requirement", ["polars==1.*", "numpy", "a[b,c]>=1,<2", "x; python_version<'3.13'"])
def test_packages_by_name(requirement: str) -> None:
    assert not refusal(Environment(type="uv", requirements=(requirement,)), ANY, readable=[])


@pytest.mark.parametrize("requirement", ["./here", "/home/owner/x", "a @ file:///home/owner/a", "git+https://x/y"])
def test_packages_by_address(requirement: str) -> None:
    assert refusal(Environment(type="uv", requirements=(requirement,)), ANY, readable=[])
