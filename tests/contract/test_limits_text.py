"""PROTOCOL.md and docs/limits.md state the numbers of :mod:`farcall_common.limits`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from farcall_common import limits

ROOT: Final = Path(__file__).parents[2]
#: Each sentence or row in which a page states limits, with their names where their values are.
STATED: Final = {
    "PROTOCOL.md": [
        "a handshake has {HANDSHAKE_S}, the first message after it {FIRST_MESSAGE_S} more",
        "more than {MAX_TRANSITIONS} of an attempt are ignored",
        "Limits: {MAX_FRAME_BYTES} a frame, {MAX_HEADER_BYTES} a header, {MAX_FRAMES} frames",
        "frames and {MAX_ENVELOPE_BYTES} an envelope.",
        "A result over {MAX_INLINE_BYTES} is uploaded",
        "an inline result over {MAX_INLINE_BYTES}",
        "`RESULT_TOO_LARGE` (above {MAX_PAYLOAD_BYTES}, unless the deployment sets another limit)",
        "A stream has at most {MAX_STREAM_GROUPS} groups.",
        "the last {OUTPUT_TAIL_BYTES} of each stream",
        "names up to {MAX_OUTPUT_TASKS}",
        "and never more than {MAX_OUTPUT_PIECE_BYTES}.",
        "{KEPT_OUTPUT_BYTES} by default and {MAX_KEPT_OUTPUT_BYTES} at most",
        "a buffer of text of at most {MAX_EXCEPTION_BYTES}",
    ],
    "docs/limits.md": [
        "of a function (the SDK sends functions of up to {MAX_FUNCTION_BYTES}, which fit one request)",
        "which fit one request) | {MAX_PAYLOAD_BYTES} |",
        "| bytes of a request | {MAX_REQUEST_BYTES} |",
        "where quotes, backslashes and line ends take two | {MAX_NESTED_REQUEST_BYTES} |",
        "takes an event of {MAX_LAMBDA_EVENT_BYTES} and sends an answer of {MAX_LAMBDA_ANSWER_BYTES}",
        "at most {MAX_FILES} files that its endpoint stages, each with a URL of {MAX_URL_CHARACTERS} characters",
        "The `size_bytes` of one is at most {MAX_FILE_BYTES}.",
        "A task reads at most {MAX_SOURCE_FILES} files of at most {MAX_SOURCES} [other endpoints]",
        "through the blob store in pieces of {MAX_FILE_PIECE_BYTES}",
        "One has at most {MAX_RELAYED_FILE_BYTES}, `FARCALL_MAX_RELAY_BYTES`",
        "| tasks that one request submits, reads or cancels | {MAX_TASKS_PER_REQUEST} |",
        "| tasks whose output one request reads | {MAX_OUTPUT_TASKS} |",
        "A request for output waits {OUTPUT_ANSWER_S} for the endpoints",
        "pieces of {MAX_OUTPUT_PIECE_BYTES} at most, and {MAX_OUTPUT_ANSWER_BYTES} in one answer",
        "| different blobs that one submit refers to | {MAX_BLOBS_PER_SUBMIT} |",
        "| different functions that one submit names | {MAX_FUNCTIONS_PER_SUBMIT} |",
        "| identities and groups that may read, or manage, one action of Globus Flows | {MAX_ACTION_PRINCIPALS} |",
        "| callees of all tasks of one submit together | {MAX_CALLEES_PER_SUBMIT} |",
        "over `FARCALL_MAX_INLINE_BYTES` ({MAX_INLINE_BYTES})",
        "| a handshake, from connecting to the CURVE key being known | {HANDSHAKE_S} |",
        "| from there to the first message | {FIRST_MESSAGE_S} |",
        "| bytes of a frame, and of a header | {MAX_FRAME_BYTES}, {MAX_HEADER_BYTES} |",
        "| bytes of a result that comes inline | {MAX_INLINE_BYTES} |",
        "| state changes of one attempt of a task that an agent reports | {MAX_TRANSITIONS} |",
        "| frames of a message | {MAX_FRAMES} |",
        "| bytes of an incomplete message | {MAX_ENVELOPE_BYTES} |",
        "| task groups of one result stream | {MAX_STREAM_GROUPS} |",
    ],
}
#: What the limits are computed with, and what follows from others.
NOT_LIMITS: Final = {"KIB", "MIB", "TASKS_PER_SUBMIT"}


def shown(name: str, value: float) -> str:
    """A limit as a page writes it, in the unit that ends its name."""
    if name.endswith("_S"):
        return f"{value:g} s"
    if name.endswith("_BYTES"):
        if value >= 2**40:
            return f"{value // 2**40} TiB"
        if value >= 2**30:
            return f"{value // 2**30} GiB"
        return f"{value // limits.MIB} MiB" if value % limits.MIB == 0 else f"{value // limits.KIB} KiB"
    return f"{value:,}"


ALL: Final = {
    name: value for name, value in vars(limits).items() if re.fullmatch("[A-Z_]+", name) and name not in NOT_LIMITS
}


@pytest.mark.parametrize(("page", "sentence"), [(page, each) for page, all_ in STATED.items() for each in all_])
def test_a_page_states_the_limit_of_the_code(page: str, sentence: str) -> None:
    text = " ".join((ROOT / page).read_text().split())

    assert sentence.format_map({name: shown(name, value) for name, value in ALL.items()}) in text


def test_every_limit_is_stated() -> None:
    named = {name for sentences in STATED.values() for each in sentences for name in re.findall(r"\{(\w+)\}", each)}

    assert set(ALL) == named
