"""References to files: their checks, the list in front of a payload, and the paths that a task sees."""

from __future__ import annotations

import base64
import pickle
import zlib
from pathlib import Path, PurePosixPath
from typing import Any, Final, cast

import msgspec
import pytest

from farcall_common.errors import ConfigurationError, DeserializationError, InvalidRequest
from farcall_common.file_arguments import (
    PREFIX,
    File,
    NodePath,
    calling,
    collecting,
    has_files,
    local_name,
    place_of,
    placed,
    returning,
    shown,
    with_outputs,
    without_files,
)
from farcall_common.limits import MAX_FILES, MAX_URL_CHARACTERS
from farcall_common.payload import DATA_ONLY, Serializer
from farcall_common.payload.data import JSONData
from farcall_common.payload.framing import FILES_PREFIX, is_text, pack, pack_binary
from farcall_common.staged_files import MAX_LIST_BYTES, FileUse, pack_files, unpack_files, uses

SHA = "0" * 64
JSON: Final = JSONData(lossless=True)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("scan.h5", "Write file:///path for a file of the endpoint"),
        ("/data/scan.h5", "Write file:///data/scan.h5 for a file of the endpoint"),
        ("s4://lab/scan.h5", "unknown scheme. Write one of"),
        ("S3://lab/scan.h5", "Did you mean 's3'?"),
        ("file://~/scan.h5", "expected an absolute path, got 'file://~/scan.h5'. Write file:///path, without ~"),
        ("s3://lab", "names no file"),
        ("s3://lab/raw/", "Directories cannot be staged"),
        ("s3:///scan.h5", "names no bucket"),
        ("file://data/scan.h5", "file:///data/scan.h5"),
        ("http://host/scan.h5", "needs sha256"),
        ("s3://lab/" + MAX_URL_CHARACTERS * "x", "characters"),
    ],
)
def test_url_that_names_no_file_is_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match="url: ") as caught:
        File(url)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "rw"}, "mode: expected 'r' or 'w'"),
        ({"mode": "w", "sha256": SHA}, "to files that are read"),
        ({"sha256": "ABC"}, "64 hexadecimal digits"),
        ({"size_bytes": -1}, "0 to 281,474,976,710,656"),
        ({"size_bytes": 2**48 + 1}, "0 to 281,474,976,710,656"),
    ],
)
def test_invalid_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        File("s3://lab/scan.h5", **options)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        (Path("/data/scan.h5"), {}, "url: expected str, got PosixPath. Write 'file:///data/scan.h5' for"),
        (None, {}, "url: expected str, got NoneType. Write 'file:///path' for"),
        ("s3://lab/scan.h5", {"size_bytes": 2.0}, "size_bytes: expected int, got float"),
        ("s3://lab/scan.h5", {"size_bytes": "2"}, "size_bytes: expected int, got str"),
        ("s3://lab/scan.h5", {"sha256": b"0"}, "sha256: expected str, got bytes"),
    ],
)
def test_value_of_another_type_is_refused(url: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        File(url, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("url", ["https://host/x", "http://host/x", "endpoint://ep/x"])
def test_what_cannot_be_written_is_no_output(url: str) -> None:
    with pytest.raises(ValueError, match="cannot be written"):
        File(url, "w")


def test_file_has_a_path_only_in_its_task() -> None:
    scan = File("s3://lab/raw/scan7.h5")
    with pytest.raises(ConfigurationError, match="only in the task"):
        scan.open()
    with placed(lambda file: f"/staged/{file.mode}/{file.name}"):
        restored = pickle.loads(pickle.dumps(scan))
    assert (str(restored.path), restored.name, restored.mode) == ("/staged/r/scan7.h5", "scan7.h5", "r")
    again = pickle.loads(pickle.dumps(restored))  # in a process that the task has started
    assert again == restored != scan


def test_path_of_a_node_is_not_passed_on_to_calls_which_may_run_on_another_one() -> None:
    with placed(lambda file: NodePath(f"/node/{file.name}") if file.mode == "r" else f"/staged/w/{file.name}"):
        scan, mask = pickle.loads(pickle.dumps([File("s3://lab/scan.h5"), File("s3://lab/mask.h5", "w")]))
    assert str(pickle.loads(pickle.dumps(scan)).path) == "/node/scan.h5"  # in a process that the task has started
    with calling():
        passed = pickle.dumps([scan, mask])
    with placed(lambda file: f"/staged/{file.mode}/{file.name}"):
        there = pickle.loads(passed)
    assert [(str(each.path), each.mode) for each in there] == [("/staged/r/scan.h5", "r"), ("/staged/w/mask.h5", "w")]


@pytest.mark.parametrize(("paths", "path"), [(True, "/staged/w/mask.h5"), (False, None)])
def test_file_that_is_returned_is_one_to_read(paths: bool, path: str | None) -> None:
    with placed(lambda file: f"/staged/{file.mode}/{file.name}"):
        mask = pickle.loads(pickle.dumps(File("s3://lab/out/mask.h5", "w")))
    with returning(paths=paths):
        found = pickle.loads(pickle.dumps(mask))
    assert (found.url, found.mode, found._path) == ("s3://lab/out/mask.h5", "r", path)
    with collecting() as collected:  # a path is one of another endpoint
        again = pickle.loads(pickle.dumps(mask))
    assert (again._path, [*uses(collected)]) == (None, [FileUse("s3://lab/out/mask.h5", "w")])


class _Holder:
    def __init__(self, file: File) -> None:
        self.file = file


def test_files_are_found_wherever_they_are_in_the_arguments() -> None:
    arguments = ([File("s3://a/1")], {"k": _Holder(File("s3://a/2", sha256=SHA))}, File("s3://a/1"))
    with collecting() as found:
        pickle.dumps((arguments, with_outputs({"out": File("s3://a/3"), "outputs": {"x": (File("s3://a/4"),)}})))
    assert [(use.url, use.mode) for use in uses(found)] == [
        ("s3://a/1", "r"),
        ("s3://a/2", "r"),
        ("s3://a/3", "w"),
        ("s3://a/4", "w"),
    ]
    with collecting() as nothing:
        pass
    pickle.dumps(File("s3://a/1"))
    assert not nothing


def test_mode_that_was_given_stays() -> None:
    kwargs = with_outputs({"out": File("s3://a/1", "r"), "outputs": [File("s3://a/2", "w")], "other": File("s3://a/3")})
    assert [kwargs["out"].mode, kwargs["outputs"][0].mode, kwargs["other"].mode] == ["r", "w", "r"]


def test_list_travels_in_front_of_the_payload() -> None:
    uses = [FileUse("s3://lab/a", "r", 3, SHA), FileUse("s3://lab/b", "w")]
    payload = pack_files(uses, b"01\nrest\n")
    assert has_files(payload)
    read, rest = unpack_files(payload)
    assert (list(read), bytes(rest)) == (uses, b"01\nrest\n")
    assert pack_files([], b"01\nrest\n") == b"01\nrest\n"
    assert not has_files(b"01\nrest\n")


def test_number_of_files_is_limited() -> None:
    uses = [FileUse(f"s3://lab/{number}") for number in range(MAX_FILES)]
    assert len(unpack_files(pack_files(uses, b""))[0]) == MAX_FILES
    with pytest.raises(InvalidRequest, match="at most"):
        pack_files([*uses, FileUse("s3://lab/more")], b"")


def test_length_of_the_list_is_limited() -> None:
    name = "x" * (MAX_URL_CHARACTERS - 20)
    uses = [FileUse(f"s3://lab/{name}{number}") for number in range(MAX_FILES)]
    with pytest.raises(InvalidRequest, match="16,777,216 are taken"):
        pack_files(uses, b"")


def test_file_with_two_expectations_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="s3://lab/a is an argument with different"):
        pack_files([FileUse("s3://lab/a"), FileUse("s3://lab/a", "w"), FileUse("s3://lab/a", "r", 3)], b"")


def test_call_behind_the_list_needs_no_reading() -> None:
    for payload in (b"01\nrest", pack_files([FileUse("s3://lab/a")], b"01\nrest"), PREFIX + b"damaged\n01\nrest"):
        assert bytes(without_files(memoryview(payload))) == b"01\nrest"
    assert bytes(without_files(PREFIX + b"damaged")) == b""


def _packed(value: Any) -> bytes:
    return PREFIX + base64.b64encode(zlib.compress(msgspec.msgpack.encode(value))) + b"\n"


@pytest.mark.parametrize(
    "payload",
    [
        PREFIX,
        PREFIX + b"?\n",
        PREFIX + base64.b64encode(b"no zlib") + b"\n",
        _packed("text"),
        _packed([["", "r"]]),
        _packed([["s3://a/1", "x"]]),
        _packed([["s3://a/1", "r", -1]]),
        _packed([["s3://a/1", "r", None, "../../x"]]),
        _packed([["s3://a/" + MAX_URL_CHARACTERS * "x"]]),
        _packed([["s3://a/1"], ["s3://a/1", "w"], ["s3://a/1", "r", 3]]),
        _packed([[f"s3://a/{number}"] for number in range(MAX_FILES + 1)]),
        PREFIX + base64.b64encode(zlib.compress(bytes(MAX_LIST_BYTES + 1))) + b"\n",
    ],
    ids=range(12),
)
def test_list_of_an_attacker_is_refused(payload: bytes) -> None:
    with pytest.raises(DeserializationError):
        unpack_files(payload)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("s3://lab/raw/scan7.h5", "scan7.h5"),
        ("https://host/a/b%20c.txt?version=2#x", "b c.txt"),
        ("https://host/a/..%2f..%2fpasswd", ".._.._passwd"),
        ("s3://lab/..", "file"),
        ("s3://lab/a%00b", "a_b"),
        ("s3://lab/" + 300 * "é" + ".h5", 98 * "é" + ".h5"),
    ],
)
def test_local_name_is_one_of_a_directory_entry(url: str, name: str) -> None:
    found = local_name(url)
    assert found == name
    place = PurePosixPath(place_of("/staged", url, "w"))
    assert (place.name, place.parent.parent) == (name, PurePosixPath("/staged/w"))


def test_each_url_has_a_directory_of_its_own() -> None:
    urls = ["s3://lab/a/scan.h5", "s3://lab/b/scan.h5", "https://lab/a/scan.h5"]
    assert len({place_of("/staged", url, mode) for url in urls for mode in ("r", "w")}) == 6


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("s3://lab/raw/scan?7.h5", "s3://lab/raw/scan?7.h5"),
        ("https://user:secret@host/a?X-Amz-Signature=1#x", "https://host/a"),
        ("file:///data/x@y", "file:///data/x@y"),
        ("file:///a\n\x1b[1m", "file:///a??[1m"),
        ("s3://lab/" + 300 * "x", "s3://lab/" + 190 * "x" + "…"),
    ],
)
def test_shown_url_has_no_secret(url: str, text: str) -> None:
    assert shown(url) == text


def test_url_is_shown_on_one_short_line() -> None:
    assert shown("s3://lab/a\nb") == "s3://lab/a?b"
    assert len(shown("s3://lab/" + "x" * 500)) == 200


def test_file_travels_in_json_without_code() -> None:
    value = [1, {"files": [File("s3://lab/a", sha256=SHA), File("s3://lab/b", "w")]}]
    with collecting() as found:
        text = JSON.dump(value)
    assert [use.url for use in uses(found)] == ["s3://lab/a", "s3://lab/b"]
    with placed(lambda file: f"/staged/{file.mode}/{file.name}"):
        _, restored = cast("Any", JSON.load(text))
    assert [str(each.path) for each in restored["files"]] == ["/staged/r/a", "/staged/w/b"]
    assert restored["files"][0].sha256 == SHA
    with pytest.raises(ValueError, match="with a path"):
        JSON.dump(restored)


@pytest.mark.parametrize("key", ["__farcall_file__", "x"])
def test_text_that_looks_like_a_file_is_none(key: str) -> None:
    value = {key: ["s3://lab/a", None, None, None], "text": '"__farcall_file__"'}
    if key == "x":
        assert JSON.load(JSON.dump(value)) == value
    else:
        with pytest.raises(ValueError, match="stands for a file"):
            JSON.dump(value)


@pytest.mark.parametrize(
    "written", ["1", "[]", '["s3://lab/a"]', '["a",null,null,null]', '["s3://lab/a","x",null,null]', '{"a":1}']
)
def test_file_in_json_of_an_attacker_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        JSON.load(f'[{{"__farcall_file__":{written}}}]'.encode())


def test_serializer_prefers_json_for_files() -> None:
    buffer = Serializer().serialize([File("s3://lab/a")])
    assert buffer.startswith(b"11\n")
    assert Serializer(allowed=DATA_ONLY).deserialize(buffer) == [File("s3://lab/a")]


def test_payload_with_large_values_stays_binary() -> None:
    uses_ = [FileUse("s3://lab/a")]
    text, binary = pack([b"11\n[]"]), pack_binary([(b"f3\n", b"\xff")])
    assert (PREFIX, is_text(pack_files(uses_, text)), is_text(pack_files(uses_, binary))) == (FILES_PREFIX, True, False)
