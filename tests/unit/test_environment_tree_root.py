"""Layout of a container's root over a directory tree."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_endpoint.host.tree_root import (
    DIRECTORY,
    FILE,
    LINK,
    MOST_ENTRIES,
    OTHER,
    Entry,
    bubblewrap_arguments,
    bubblewrap_targets,
    layout,
    read_directory,
)

Tree = Mapping[str, Any]
"""Names of a directory: a tree below, a text that is where a link leads, or one of the other kinds."""

USUAL: Tree = {"usr": {"bin": {}}, "bin": ("usr/bin",), "etc": {"hosts": FILE, "resolv.conf": FILE}, "run": {}}


def reader(tree: Tree) -> Any:
    def read(path: str) -> dict[str, Entry]:
        place: Any = tree
        for name in filter(None, path.split("/")):
            place = place[name]
        return {name: entry(value) for name, value in place.items()}

    return read


def entry(value: Any) -> Entry:
    if isinstance(value, Mapping):
        return DIRECTORY, ""
    return (LINK, value[0]) if isinstance(value, tuple) else (value, "")


def words(tree: Tree, targets: Mapping[str, str]) -> str:
    return " ".join(bubblewrap_arguments("/tree", layout(reader(tree), targets)))


def test_a_tree_with_a_place_for_everything_is_bound_whole() -> None:
    assert words(USUAL, {"/run": DIRECTORY, "/etc/hosts": FILE}) == "--ro-bind /tree/ /"


def test_only_directories_that_lack_a_place_are_taken_apart() -> None:
    assert words(USUAL, {"/run/farcall": DIRECTORY, "/etc/hosts": FILE}) == (
        "--symlink usr/bin /bin --ro-bind /tree/etc /etc --dir /run --ro-bind /tree/usr /usr"
    )
    tree = {"run": {"lock": {}, "lockfile": FILE, "farcalls": ("lock",)}}
    assert words(tree, {"/run/farcall/run": DIRECTORY}) == (
        "--dir /run --symlink lock /run/farcalls --ro-bind /tree/run/lock /run/lock "
        "--ro-bind /tree/run/lockfile /run/lockfile"
    )


@pytest.mark.parametrize("value", [("/oldroot/etc",), ("..",), FILE, OTHER])
def test_what_is_no_directory_gives_way_to_a_mount(value: Any) -> None:
    for target in ("/home", "/home/alice", "/home/alice/work"):
        assert words({"home": value, "srv": {}}, {target: DIRECTORY}) == "--ro-bind /tree/srv /srv"
    assert words({"home": {"alice": value}}, {"/home/alice/work": DIRECTORY}) == "--dir /home"


def test_a_file_is_mounted_over_a_file_only() -> None:
    values: list[Any] = [("/oldroot/etc/hosts",), {}, OTHER]
    for value in values:
        assert words({"etc": {"hosts": value, "group": FILE}}, {"/etc/hosts": FILE}) == (
            "--dir /etc --ro-bind /tree/etc/group /etc/group"
        )


def test_pipes_sockets_and_devices_are_left_out() -> None:
    assert words({"pipe": OTHER, "file": FILE}, {"/new": DIRECTORY}) == "--ro-bind /tree/file /file"


def test_a_directory_with_too_many_entries_is_refused() -> None:
    with pytest.raises(ValueError, match="/home has more than 2,000 entries"):
        words({"home": {f"u{number}": {} for number in range(MOST_ENTRIES + 1)}}, {"/home/alice": DIRECTORY})


def test_names_that_look_like_options_stay_names() -> None:
    assert layout(reader({"--bind": {}, "-x": ("--dev",)}), {"/new": DIRECTORY}) == [
        ("bind", "/--bind", ""),
        ("link", "/-x", "--dev"),
    ]


NAMES = st.sampled_from("abc")
TREES = st.recursive(
    st.one_of(st.just(FILE), st.just(OTHER), st.tuples(st.sampled_from(["/", "..", "a", "/b"]))),
    lambda inner: st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)


@given(
    tree=st.dictionaries(NAMES, TREES, max_size=3),
    targets=st.dictionaries(
        st.lists(NAMES, min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts)),
        st.sampled_from([DIRECTORY, FILE]),
        max_size=4,
    ),
)
def test_every_mount_has_a_place_without_links(tree: Tree, targets: Mapping[str, str]) -> None:
    """Nothing on the way to a mount is a link, or of the wrong kind; and all else of the tree is shown."""
    steps = {path: step for step, path, _ in layout(reader(tree), targets)}
    for target, kind in targets.items():
        place: Any = tree
        shown = "/" in steps
        parts = target.strip("/").split("/")
        for number, name in enumerate(parts):
            path = "/" + "/".join(parts[: number + 1])
            place = place.get(name) if isinstance(place, Mapping) else None
            shown = shown or (path in steps and steps[path] == "bind")
            last = number == len(parts) - 1
            assert path not in steps or steps[path] != "link"
            if shown:
                assert entry(place)[0] == (kind if last else DIRECTORY)
    for name, value in tree.items():
        path = f"/{name}"
        if value != OTHER and not any(target == path or target.startswith(f"{path}/") for target in targets):
            assert "/" in steps or path in steps


def test_targets_of_bubblewraps_arguments(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    arguments = [
        *("--unshare-pid", "--dev", "/dev", "--tmpfs", "/tmp/", "--bind", str(tmp_path), "/a/../b"),
        *("--ro-bind", str(tmp_path / "file"), "//etc/hosts", "--ro-bind-try", str(tmp_path / "none"), "/none"),
        *("--", "program", "--tmpfs", "/no"),
    ]
    expected = {"/dev": DIRECTORY, "/tmp": DIRECTORY, "/b": DIRECTORY, "/etc/hosts": FILE}
    assert bubblewrap_targets(arguments) == expected


def test_a_directory_is_read_without_following_links(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("directory")
    assert read_directory(str(tmp_path))("/") == {
        "directory": (DIRECTORY, ""),
        "file": (FILE, ""),
        "link": (LINK, "directory"),
    }
