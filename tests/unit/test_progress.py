"""Progress of a task: what is kept of what others wrote, and how it is shown."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_common.progress import MAX_TEXT, Progress, clean_progress, clean_text, read_progress

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("progress", "shown"),
    [
        (Progress(3), "3"),
        (Progress(3, 10), "3 of 10 (30 %)"),
        (Progress(999, 1000, "fitting"), "999 of 1000 (99 %): fitting"),
        (Progress(0.25, 1.0), "0.25 of 1 (25 %)"),
        (Progress(29, 100), "29 of 100 (29 %)"),
        (Progress(0.57, 1.0), "0.57 of 1 (57 %)"),
        (Progress(99.99999, 100), "99.99999 of 100 (99 %)"),
        (Progress(12_345_678_901, 53_687_091_200), "12345678901 of 53687091200 (22 %)"),
        (Progress(1e300, 1.5e300), "1e+300 of 1.5e+300 (66 %)"),
        (Progress(12, 10), "12 of 10"),
        (Progress(1, 0), "1 of 0"),
        (Progress(2, text="loading"), "2: loading"),
    ],
)
def test_progress_is_shown_in_words(progress: Progress, shown: str) -> None:
    assert str(progress) == shown


@pytest.mark.parametrize("done", [None, "3", True, math.nan, math.inf, -math.inf, 10**400, [1], b"1"])
def test_what_is_no_finite_number_is_no_progress(done: Any) -> None:
    assert clean_progress(done, 1, "", NOW) is None
    kept = clean_progress(1, done, "t", NOW)
    assert kept == Progress(1, None, "t", NOW)


def test_a_text_is_one_line_of_limited_length_without_control_characters() -> None:
    assert clean_text("a\x1b[31mb\r\nc\t\x00d \u202egpj\ud800") == "a [31mb c d gpj"
    assert clean_text("é" * 10_000) == "é" * MAX_TEXT
    assert clean_text("\n \t") == ""


def test_instants_that_make_no_sense_become_the_reader_s() -> None:
    assert read_progress({"done": 1, "at": NOW - 60}, now=NOW) == Progress(1, at=NOW - 60)
    assert read_progress({"done": 1, "at": 1e300}, now=NOW) == Progress(1, at=NOW)
    assert read_progress({"done": 1}, now=NOW) == Progress(1, at=NOW)
    assert read_progress({"done": 1}) is None


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("done", "total", "text", "at"), values)) | values)
def test_whatever_a_peer_writes_is_json_of_limited_size(value: Any) -> None:
    progress = read_progress(value, now=NOW)
    if progress is None:
        return
    text = json.dumps(progress.to_json(), allow_nan=False)
    assert len(text) < 8 * MAX_TEXT
    assert read_progress(json.loads(text), now=NOW) == progress
    assert str(progress).isprintable()
