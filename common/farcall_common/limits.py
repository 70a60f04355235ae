"""Limits of the protocol and of the REST API that more than one package uses.

A deployment can change some of them; ``docs/limits.md`` names the variables, and these are the defaults. Limits of one
package are in that package. Outside of :mod:`farcall_common.wire`, because workers and ``import farcall`` need these
numbers without the protocol.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

# -- connections: PROTOCOL.md, section 1 -------------------------------------------------------------------------------

#: From connecting to a known CURVE key, and from there to the first message.
HANDSHAKE_S: Final = 10.0
FIRST_MESSAGE_S: Final = 10.0

# -- envelopes: PROTOCOL.md, section 2 ---------------------------------------------------------------------------------

MAX_FRAME_BYTES: Final = 16 * MIB
MAX_HEADER_BYTES: Final = 8 * MIB
MAX_FRAMES: Final = 10_000
#: All frames of one envelope together.
MAX_ENVELOPE_BYTES: Final = 64 * MIB

# -- history: PROTOCOL.md, section 4 -----------------------------------------------------------------------------------

#: Transitions of one attempt of a task that an agent may report: two for each of 100 starts, three for each of 100
#: retries.
MAX_TRANSITIONS: Final = 500

# -- user bytes: PROTOCOL.md, sections 4, 6 and 7 ----------------------------------------------------------------------

#: A payload or result that travels with its task; larger ones go through the blob store.
MAX_INLINE_BYTES: Final = 64 * KIB
#: A payload, a function or a result, inline or as a blob.
MAX_PAYLOAD_BYTES: Final = 10 * MIB
#: The end of each stream of a task's output that is reported with it.
OUTPUT_TAIL_BYTES: Final = 4 * KIB
#: The end of each stream of a task's output that its endpoint keeps for a while, and the most that a task may request.
KEPT_OUTPUT_BYTES: Final = 16 * KIB
MAX_KEPT_OUTPUT_BYTES: Final = MIB
#: A piece of a stream of output, and the tasks of one request for output.
MAX_OUTPUT_PIECE_BYTES: Final = 64 * KIB
MAX_OUTPUT_TASKS: Final = 100
#: Output in one answer. As JSON, and sealed, it may take eight times as much.
MAX_OUTPUT_ANSWER_BYTES: Final = 512 * KIB
#: How long the API waits for the endpoints.
OUTPUT_ANSWER_S: Final = 3.0
#: The exception itself in an error record, as a buffer.
MAX_EXCEPTION_BYTES: Final = 16 * KIB
#: Files of a task that its endpoint stages, the length of the URL of one, and its size. The sum of all sizes must fit
#: into an integer of MessagePack.
MAX_FILES: Final = 10_000
MAX_URL_CHARACTERS: Final = 2048
MAX_FILE_BYTES: Final = 2**48
#: Endpoints whose files a task reads, and such files of a task; the size of one, and a piece of it.
MAX_SOURCES: Final = 20
MAX_SOURCE_FILES: Final = 1000
MAX_RELAYED_FILE_BYTES: Final = 1024 * MIB
MAX_FILE_PIECE_BYTES: Final = 8 * MIB

# -- result streams: PROTOCOL.md, section 5 ----------------------------------------------------------------------------

MAX_STREAM_GROUPS: Final = 10_000

# -- requests to the REST API: docs/limits.md --------------------------------------------------------------------------

MAX_REQUEST_BYTES: Final = 4 * MIB
#: AWS's limits of an event and of an answer of a Lambda function, in which a body is text inside JSON
#: (:mod:`farcall_common.nested_json`). API Gateway passes more.
MAX_LAMBDA_EVENT_BYTES: Final = 6_291_456
MAX_LAMBDA_ANSWER_BYTES: Final = 6_291_556
#: A request's body as text inside its event; the rest is for path, headers and caller.
MAX_NESTED_REQUEST_BYTES: Final = MAX_LAMBDA_EVENT_BYTES - 64 * KIB
#: A function, as JSON: it is registered in one request, and the rest is for its name, description and metadata.
MAX_FUNCTION_BYTES: Final = MAX_REQUEST_BYTES * 7 // 8
#: Tasks that one request submits, reads or cancels.
MAX_TASKS_PER_REQUEST: Final = 10_000
#: Different blobs that one submit refers to: each takes a request to the blob store.
MAX_BLOBS_PER_SUBMIT: Final = 1000
#: Different functions that one submit names: each takes a permission check.
MAX_FUNCTIONS_PER_SUBMIT: Final = 1000
#: Identities and groups that may read, or manage, one action of Globus Flows.
MAX_ACTION_PRINCIPALS: Final = 100
#: Functions that the tasks of one submit may call, summed over the tasks: each task has a list of its own in the queue.
MAX_CALLEES_PER_SUBMIT: Final = 100_000
#: So many tasks stay within the three limits above, whatever their functions and arguments are.
TASKS_PER_SUBMIT: Final = min(MAX_TASKS_PER_REQUEST, MAX_BLOBS_PER_SUBMIT, MAX_FUNCTIONS_PER_SUBMIT)
