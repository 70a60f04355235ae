"""Text of endpoints reaches no terminal with control characters."""

from __future__ import annotations

import json
import re
import traceback
from typing import Any

import pytest

from farcall import TaskFailed, Why
from farcall.cli import _output
from farcall_common.console import show_fields, show_table
from farcall_common.errors import ErrorRecord, original_of
from farcall_common.payload import task_error
from farcall_common.plain_text import PlainStream, escaped, is_plain_line, plain

TITLE = "\x1b]0;stolen\x07"
HOSTILE = [TITLE, "\x1b[2J", "\x9b2J", "\x00", "\x7f", "\x08", "\u202e", "\u2066", "\u2028", "\ud800", "\x0c", "\x85"]
INVISIBLE = ["\u061c", "\u200b", "\u200e", "\u200f", "\u2060", "\u206a", "\ufeff", "\ufff9", "\U000e0041"]


def is_harmless(text: str) -> bool:
    text = re.sub(r"\x1b\[(0|1|31)m", "", text)  # styles of our own
    return all(each in "\n\t" or each.isprintable() for each in text) and bool(text.encode())


@pytest.mark.parametrize("hostile", HOSTILE + INVISIBLE)
def test_control_characters_are_written_out(hostile: str) -> None:
    shown = plain(f"a{hostile}b\tc\nd")
    assert is_harmless(shown)
    assert shown.startswith("a\\")
    assert shown.endswith("b\tc\nd")
    assert is_plain_line(shown.replace("\t", "").replace("\n", ""))
    assert not is_plain_line(f"a{hostile}b")


def test_text_without_them_stays() -> None:
    text = "Größe: 5 µm\t✓ 日本語 \U0001f600\n\u05d0\u05d1"
    assert plain(text) == text
    assert plain("50%\r100%\r\n\x1b[1;31mred\x1b[0m") == "50%\n100%\nred"


@pytest.mark.parametrize("hostile", HOSTILE[:-3] + HOSTILE[-2:])
def test_an_error_prints_none_of_them(hostile: str) -> None:
    fields: dict[str, Any] = dict.fromkeys(
        ("message", "hint", "traceback", "stdout_tail", "stderr_tail"), f"<{hostile}>"
    )
    record = ErrorRecord("TASK_FAILED", reasons=(hostile,), builtin_type="KeyError", endpoint_id=hostile, **fields)
    error = task_error(record, expected=TaskFailed, load_original=lambda: ValueError("original"))
    assert is_harmless("".join(traceback.format_exception(error)))
    assert is_harmless("".join(traceback.format_exception(original_of(error))))
    assert error.record == record  # programs see what the endpoint sent
    assert is_harmless(str(Why("t", "ENDPOINT_PROBLEM", hostile, "received", state_age_s=0.0)))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_commands_show_none_of_them(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    error = TaskFailed(f"no {TITLE}")
    error.add_note(TITLE)
    _output.show_error(error, as_json=False)
    _output.show_error(TaskFailed("no \x9b2J\x7f"), as_json=True)
    show_table(("name",), [(TITLE,), ("\x9b2J",)])
    show_fields({"problem": TITLE})
    _output.show_json({"text": "\x9b2J\x7f\u202e"})
    _output.show_line("\x9b2J")
    _output.write([{"error": {"message": "\x9b"}, "name": TITLE}], ("error", "name"), as_json=False)
    said = capsys.readouterr()
    assert is_harmless(said.out)
    assert is_harmless(said.err)
    assert "stolen" in said.out


def test_values_and_output_are_plain_on_a_terminal_and_whole_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for is_terminal in (True, False):
        monkeypatch.setattr("sys.stdout.isatty", lambda is_terminal=is_terminal: is_terminal)
        _output.show_value(TITLE)
        _output.show_text(TITLE)
        shown = capsys.readouterr().out
        assert is_harmless(shown) == is_terminal
        assert (shown == f"{TITLE}\n" * 2) != is_terminal


def test_json_keeps_its_value() -> None:
    value = {"a\x9b": ["\x7f", "\u202e\x1b", "\u2028", *INVISIBLE]}
    text = escaped(json.dumps(value, ensure_ascii=False))
    assert is_harmless(text)
    assert json.loads(text) == value


def test_output_of_a_program_is_plain_in_whatever_pieces_it_comes() -> None:
    output = f"Größe\t\u202e{TITLE}\n日本語\x9b".encode() + b"\xff"
    for size in (1, 2, 3, len(output)):
        stream = PlainStream()
        pieces = [output[at : at + size] for at in range(0, len(output), size)]
        text = b"".join(map(stream.write, [*pieces, b""])).decode()
        assert text == "Größe\t\\u202e\\x1b]0;stolen\\x07\n日本語\\x9b\\xff"
