"""Sealed calls of a client: seals calls to the keys of endpoints, opens their answers, and keeps what that needs.

An endpoint is trusted at its first use, as a host is by SSH: the fingerprint of its identity is kept in
``known_endpoints`` of Farcall's home directory, and the age of its newest sealing key. The user's secret, from which
the keys of all answers are derived, is ``sealing.secret`` there, or ``FARCALL_SEALING_SECRET``. Ids of sealed calls
have a mark of this secret (:func:`farcall_common.wire.has_mark`); ``sealed_tasks`` there has the exceptions.

Of a sealed call, only what is under the seal is the endpoint's. The rest is the service's word: the client keeps
numbers of it and says so where it shows them, and reads nothing of it as a value.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import logging
import os
import re
import shlex
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict

import msgspec

from farcall._details import SealedDetails
from farcall._endpoints import EndpointCache
from farcall_common.credentials import find_home, from_environment, known_home, read_settings
from farcall_common.errors import (
    ConfigurationError,
    EndpointIncompatible,
    EndpointKeyChanged,
    ErrorRecord,
    InvalidRequest,
    PayloadTooLarge,
    ResultRefused,
    SealInvalid,
    TaskDeadLettered,
    TaskFailed,
)
from farcall_common.files import make_directory, warn_if_shared, write_private
from farcall_common.forks import fork_safe_lock
from farcall_common.graphs import MAX_STATES, STAGES, STATES, VALUES
from farcall_common.limits import MAX_INLINE_BYTES, MAX_PAYLOAD_BYTES
from farcall_common.payload import Piece
from farcall_common.progress import PROGRESS
from farcall_common.staging import FILES, STAGING, read_staging
from farcall_common.wire import StreamResult, TaskState, has_mark, new_task_id

if TYPE_CHECKING:
    from farcall_common.sealing import SealingKey

SealMode = Literal["off", "offered", "required"]
_MODES: Final[tuple[SealMode, ...]] = ("off", "offered", "required")
#: Tasks whose ids say another thing about seals than their calls.
_EXCEPTIONS_FILE: Final = "sealed_tasks"
_SECRET_FILE: Final = "sealing.secret"  # noqa: S105 - a name
_SECRET_VARIABLE: Final = "FARCALL_SEALING_SECRET"  # noqa: S105 - a name
_SEALED: Final = (b"fs\n", b"bs\n")
_SAYS: Final = "the service says so, the endpoint has not signed it"
#: What is kept of an error that is not sealed and must be, beside its text: facts, not values and texts of the task.
_FACTS: Final = ("fault", "retryable", "retry_after_s", "attempt", "endpoint_id", "retries_used")
#: Details that are not numbers, or of which the endpoint seals more than numbers.
_NOT_NUMBERS: Final = (STAGES, VALUES, PROGRESS, STAGING, FILES)
_MOST_NAME: Final = 64
_DIGITS: Final = re.compile(r"[0-9a-f]{4,32}")

_logger = logging.getLogger("farcall")

_SealedStream = TypedDict("_SealedStream", {"from": int, "next": int, "text": str})


class _SealedOutput(TypedDict):
    """The texts in an answer about output. Other keys are left out: they would replace those of the cloud's answer."""

    attempt: int
    complete: bool
    stdout: _SealedStream
    stderr: _SealedStream


def default_mode(given: str | None, *, environ: Mapping[str, str] = os.environ) -> Callable[[], SealMode]:
    """Provides the mode that is given, else that of ``FARCALL_SEALED``, else ``sealed`` in ``config.toml``, which is
    read when it is needed, else "off".

    :raises ConfigurationError: if there is no such mode.
    """
    if found := given or from_environment("sealed", environ):
        mode = seal_mode(found)
        return lambda: mode
    return functools.cache(lambda: seal_mode(read_settings(known_home(environ)).get("sealed") or "off"))


def seal_mode(found: str) -> SealMode:
    """The mode of this name.

    :raises ConfigurationError: if there is none.
    """
    for mode in _MODES:
        if found == mode:
            return mode
    raise ConfigurationError(f"sealed is {found!r}", hint=f"It is one of {', '.join(_MODES)}.")


class _Lines:
    """Lines of a file that several processes write. May be used from any thread.

    :param home: the directory of the file; None: there is none, and nothing can be written.
    """

    def __init__(self, home: Path | None, name: str) -> None:
        self._home = home
        self._name = name
        self._known: tuple[object, dict[str, str]] = None, {}

    @property
    def path(self) -> Path:
        """The path of the file.

        :raises ConfigurationError: without a home directory.
        """
        return (self._home or find_home({})) / self._name

    def read(self) -> dict[str, str]:
        """The second word of each line by the first one; the last line with a word counts.

        :raises ConfigurationError: if the file cannot be read.
        """
        if self._home is None:
            return {}
        try:
            found = self.path.stat()
            state = found.st_ino, found.st_mtime_ns, found.st_size
            if self._known[0] != state:
                pairs = (line.split() for line in self.path.read_text().splitlines() if not line.startswith("#"))
                self._known = state, {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
            return self._known[1]
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{self.path} cannot be read: {error}") from error

    def write(self, lines: Mapping[str, str]) -> None:
        """Replace the lines.

        :raises ConfigurationError: if the file cannot be written.
        """
        try:
            write_private(self.path, b"".join(_line(name, text) for name, text in lines.items()))
        except OSError as error:
            raise ConfigurationError(f"{self.path} cannot be written: {error.strerror}") from error

    def append(self, name: str, text: str) -> None:
        """Add a line.

        :raises OSError: if the file cannot be written.
        """
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            file.write(_line(name, text))


def _line(name: str, text: str) -> bytes:
    """A line of two words.

    :raises ConfigurationError: if one is empty or more than a word: the service could add lines of its own.
    """
    if [name] != name.split() or [text] != text.split():
        raise ConfigurationError(
            f"{name!r} with {text!r} is not an entry: expected two words",
            hint="Name the endpoint or task by its whole id.",
        )
    return f"{name} {text}\n".encode()


class KnownEndpoints:
    """The fingerprints of the endpoints that this user has sealed calls to, and the ages of their newest sealing keys.
    May be used from any thread.

    ::

        ID FINGERPRINT
        ID:newest-key EPOCH_SECONDS         a line of its own
        name:NAME ID                        the endpoint that a name meant first, quoted as in a URL
    """

    def __init__(self, home: Path | None) -> None:
        self._lines = _Lines(home, "known_endpoints")
        self._lock = fork_safe_lock()

    def get(self, endpoint_id: str) -> str | None:
        """The fingerprint of an endpoint; None if it is new.

        :raises ConfigurationError: if the file cannot be read.
        """
        return self._lines.read().get(endpoint_id)

    def newest(self, endpoint_id: str) -> int:
        """Epoch seconds at which the newest sealing key of an endpoint was made, as far as known; else 0.

        :raises ConfigurationError: if the file cannot be read.
        """
        text = self._lines.read().get(_newest_key(endpoint_id), "")
        return int(text) if text.isdecimal() else 0

    def meaning(self, name: str) -> str | None:
        """The endpoint that a name meant when a call was sealed to it first; None if it is new.

        :raises ConfigurationError: if the file cannot be read.
        """
        return self._lines.read().get(_name_key(name))

    def put(self, endpoint_id: str, fingerprint: str, *, created_at: int, names: Iterable[str] = ()) -> None:
        """Keep the fingerprint of an endpoint, when its sealing key was made, and that these names mean it.

        :raises ConfigurationError: if the file cannot be read or written.
        """
        with self._lock:
            known = {endpoint_id: fingerprint, _newest_key(endpoint_id): str(created_at)}
            known |= {_name_key(name): endpoint_id for name in names}
            self._lines.write(self._lines.read() | known)

    def check(self, endpoint_id: str, found: str | None, *, created_at: int = 0) -> None:
        """Compare what an endpoint shows with what is kept: its identity, None if it shows none, and the age of its
        sealing key.

        :raises EndpointKeyChanged: if the identity is another one, or the key older than one that it had.
        """
        known = self.get(endpoint_id)
        if known is None:
            return
        accept = f"`farcall endpoints fingerprint {endpoint_id} --accept`"
        if known != found:
            shows = f"shows the identity {found}" if found else "offers no sealing key any more"
            raise EndpointKeyChanged(
                f"endpoint {endpoint_id} {shows}; this user knows it with {known}",
                hint="Another party may want to read your calls. Ask the endpoint's owner for the output of "
                f"`farcall-endpoint fingerprint`; if the change is right, run {accept}.",
            )
        if created_at < (newest := self.newest(endpoint_id)):
            raise EndpointKeyChanged(
                f"endpoint {endpoint_id} shows a sealing key of {_utc(created_at)}, which it has replaced; expected "
                f"the one of {_utc(newest)}, or a newer one",
                hint="Another party may have a key that was replaced, and want to read your calls. Ask the endpoint's "
                "owner. If its files came from a backup, `farcall-endpoint fingerprint NAME --rotate` and a restart "
                f"make a new key; to accept the old one, run {accept}.",
            )

    def check_name(self, name: str, endpoint_id: str) -> None:
        """Compare the endpoint that a name means now, by the word of the service, with what is kept.

        :raises EndpointKeyChanged: if the name meant another endpoint.
        """
        known = self.meaning(name)
        if known is None and _DIGITS.fullmatch(name):  # digits of an endpoint that is known by its id, or by fewer
            ids = [each for each in self._lines.read() if each.replace("-", "").startswith(name)]
            known = endpoint_id if endpoint_id in ids or not ids else ids[0].partition(":")[0]
        if known is not None and known != endpoint_id:
            what = f"the name {name!r} means" if name else "the only endpoint is"
            raise EndpointKeyChanged(
                f"{what} endpoint {endpoint_id} now; this user has sealed calls to {known} by it",
                hint="Another party may want to read your calls. Name the endpoint by its id; or, if the change is "
                f"right, run `farcall endpoints fingerprint {shlex.quote(name) or endpoint_id} --accept`.",
            )

    def forget(self, endpoint_id: str, *, names: Iterable[str] = ()) -> None:
        """Treat an endpoint as new, and these names."""
        with self._lock:
            known = self._lines.read()
            gone = {endpoint_id, _newest_key(endpoint_id), *map(_name_key, names)}
            if not gone.isdisjoint(known):
                self._lines.write({name: text for name, text in known.items() if name not in gone})


def _name_key(name: str) -> str:
    return f"name:{urllib.parse.quote(name, safe='')}"


def _newest_key(endpoint_id: str) -> str:
    return f"{endpoint_id}:newest-key"


def _utc(at: int) -> str:
    try:
        return dt.datetime.fromtimestamp(at, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return str(at)


class Sealer:
    """Seals calls and opens answers. May be used from any thread.

    :param mode: provides that of calls that do not have their own; "required" also refuses results that are not sealed.
    :param meanings: returns the names by which the user has named an endpoint.
    """

    def __init__(
        self,
        endpoints: EndpointCache,
        *,
        mode: Callable[[], SealMode],
        meanings: Callable[[str], Collection[str]] = lambda _: (),
        home: Path | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._mode = mode
        self._meanings = meanings
        self._endpoints = endpoints
        self._environ = environ
        self._home = known_home(environ) if home is None else home
        self.known: KnownEndpoints = KnownEndpoints(self._home)
        self._exceptions = _Lines(self._home, _EXCEPTIONS_FILE)
        self._lock = fork_safe_lock()
        self._secret: bytes | None = None
        self._checked: dict[str, tuple[Mapping[str, Any], SealingKey]] = {}

    @property
    def mode(self) -> SealMode:
        """The mode of calls that do not have their own."""
        return self._mode()

    def new_task_id(self, mode: SealMode | None, *, endpoint_id: str | None) -> str:
        """The id of a new task: with a mark if its call will be sealed, as far as that is known without a request.

        :param endpoint_id: None if the endpoint is not known yet.
        :raises ConfigurationError: if calls must be sealed, and there is no secret and none can be made.
        """
        mode = mode or self.mode
        if mode == "off":
            return new_task_id()
        try:
            if mode == "offered" and endpoint_id is not None and self._opens_no_seals(endpoint_id):
                return new_task_id()
            return new_task_id(self._user_secret())
        except ConfigurationError:
            if mode == "required":
                raise
            return new_task_id()  # the submit reports the error, if the call is sealed

    def was_sealed(self, task_id: str) -> bool:
        """Whether the call of a task was sealed, by what this user has kept of it: not by the word of the cloud.
        Without the user's secret, that is not known, and the answer is no.

        :raises ConfigurationError: if the secret or the exceptions cannot be read.
        """
        with self._lock:
            secret = self._secret = self._secret or self._read_secret()
        if secret is None:
            return False
        exception = self._exceptions.read().get(task_id)
        return exception == "sealed" if exception else has_mark(task_id, secret)

    def may_be_completed(self, task_id: str) -> bool:
        """Whether the service's word is enough that the first digits of a task's id mean this one. It could name a
        task that was not sealed in the place of one that was: not where seals matter, and there is a secret.

        :raises ConfigurationError: as :meth:`was_sealed`.
        """
        return self.mode == "off" or self.was_sealed(task_id) or self._secret is None

    def must_be_sealed(self, task_id: str, sealed: bool | None) -> bool:
        """Whether answers about a task are read only if they are sealed.

        :param sealed: whether its call was; None if this process does not know it.
        """
        return self.mode == "required" or (self.was_sealed(task_id) if sealed is None else sealed)

    def seal(
        self,
        payload: bytes,
        *,
        mode: SealMode | None,
        endpoint_id: str,
        function: str,
        task_id: str,
        callees: Sequence[str] = (),
        sources: Sequence[str] = (),
    ) -> bytes:
        """A call as it is sent: sealed, or as it is if the mode is "off", or "offered" and the endpoint has no key.

        :param task_id: of :meth:`new_task_id`. If its mark turns out to be wrong, that is written down.
        :param function: the SHA-256 of its body in hex, or its id, with or without a version.
        :param callees: likewise, the functions that it calls.
        :param sources: the endpoints whose files it reads.
        :raises EndpointIncompatible: if the endpoint opens no sealed calls, and they are required.
        :raises EndpointKeyChanged: if the endpoint shows another identity than before.
        :raises InvalidRequest: if it would be sealed and reads files of other endpoints.
        :raises PayloadTooLarge: if it is too large when sealed.
        :raises FarcallError: if the API cannot be asked for the key.
        """
        mode = mode or self.mode
        if mode == "off":
            return payload
        key = self._key_of(endpoint_id)
        if key is None:
            if mode == "required":
                raise EndpointIncompatible(
                    f"endpoint {endpoint_id} opens no sealed calls",
                    hint="Ask its owner to set `sealed: offered`, or submit with sealed='offered'.",
                )
            self._note(task_id, sealed=False)
            return payload
        if sources:
            raise InvalidRequest(
                "The call is sealed, and files of other endpoints would not be: they pass through the deployment.",
                hint="Submit it with sealed='off', or put the files into an object store.",
            )
        from farcall_common.sealing import answer_key, seal_call

        sealed = seal_call(
            payload,
            to=key,
            endpoint_id=endpoint_id,
            function=function.partition("@")[0],
            task_id=task_id,
            key=answer_key(self._user_secret(), task_id=task_id),
            max_text_bytes=MAX_INLINE_BYTES,
            callees=[each.partition("@")[0] for each in callees],
        )
        if len(sealed) > MAX_PAYLOAD_BYTES:
            raise PayloadTooLarge(
                f"the arguments take {len(sealed)} bytes when sealed; the limit is {MAX_PAYLOAD_BYTES}"
            )
        self._note(task_id, sealed=True)
        return sealed

    def reported(self, endpoint_id: str) -> SealingKey | None:
        """The sealing key that the API reports now, whose signature is right; None if the endpoint has none.

        :raises SealInvalid: if the signature is wrong.
        :raises FarcallError: if the API does not answer.
        """
        from farcall_common.sealing import SealingKey

        found = self._endpoints.sealing(endpoint_id)
        return None if found is None else SealingKey.verified(found, endpoint_id=endpoint_id)

    def opened(
        self, result: StreamResult, data: Piece | None, *, sealed: bool | None
    ) -> tuple[StreamResult, Piece | None]:
        """A result and its value, opened if they are sealed. Of what must be sealed and is not, numbers are left, and
        the text of an error, which says that it is the service's word.

        :param sealed: as of :meth:`must_be_sealed`.
        :raises SealInvalid: if a seal cannot be opened.
        :raises ResultRefused: for a value that is not sealed and must be.
        """
        must = self.must_be_sealed(result.task_id, sealed)
        changes: dict[str, Any] = {}
        if result.error is not None and (text := result.error.get("sealed")):
            changes["error"] = self._opened_error(text, result.task_id)
            if result.error.get("code") == TaskDeadLettered.code:  # the service makes one of the last failed attempt
                hint = " ".join(filter(None, (changes["error"].get("hint"), _said(result.error.get("hint")))))
                changes["error"] |= {"code": TaskDeadLettered.code, "hint": hint}
        elif result.error is not None and must:
            changes["error"] = unsigned_error(result.error)
        if text := result.details.get("sealed"):
            numbers = {name: each for name, each in _numbers(result.details).items() if name not in _NOT_NUMBERS}
            changes["details"] = SealedDetails(self._opened_record(text, "details", result.task_id), numbers)
        elif must:
            changes["details"] = unsigned_details(result.details)
        if data is not None and result.state is TaskState.SUCCESS:
            data = self.opened_value(data, result.task_id, sealed=must)
        return msgspec.structs.replace(result, **changes) if changes else result, data

    def opened_output(self, task_id: str, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """An answer about the output of a task, opened if that is sealed. Output that must be sealed and is not is left
        out: the cloud could have written it.

        :raises SealInvalid: if it cannot be opened.
        """
        if text := answer.get("sealed"):
            return {**answer, **self._opened_record(text, "output", task_id, _SealedOutput)}
        if not self.must_be_sealed(task_id, None):
            return answer
        has_text = any((answer.get(stream) or {}).get("text") for stream in ("stdout", "stderr"))
        is_unproved = has_text or (answer.get("complete") and not answer.get("reason"))
        return {**answer, "stdout": None, "stderr": None, **({"reason": "NOT_SEALED"} if is_unproved else {})}

    def opened_value(self, data: Piece, task_id: str, *, sealed: bool | None) -> Piece:
        """A value, opened if it is sealed.

        :raises SealInvalid, ResultRefused: as :meth:`opened`.
        """
        if bytes(data[:3]) in _SEALED:
            return self._open(data, "result", task_id)
        self.check_signed(f"the result of task {task_id}", task_id, sealed=sealed, signed=False)
        return data

    def check_signed(self, what: str, task_id: str, *, sealed: bool | None, signed: bool) -> None:
        """Refuse a value that was not under the seal of its task and must be.

        :raises ResultRefused: with ``what`` as its subject.
        """
        if signed or not self.must_be_sealed(task_id, sealed):
            return
        raise ResultRefused(
            f"{what} is not sealed; expected a seal of the endpoint",
            hint="The service may have exchanged it: the endpoint seals its answers to sealed calls. Submit the call "
            "again; if the call was not sealed, read its result with sealed='offered', and with the file "
            f"{_EXCEPTIONS_FILE} of the machine that submitted it.",
        )

    def shown(self, task: dict[str, Any]) -> dict[str, Any]:
        """An entry of the API about a task as it may be shown without opening it: of a sealed call without texts of
        the service, but for that of an error, which is marked."""
        if not self.must_be_sealed(str(task.get("task_id")), None):
            return task
        known = {name: each for name, each in task.items() if name not in (*_NOT_NUMBERS, "details", "error")}
        facts = unsigned_details({name: task[name] for name in (STAGES, PROGRESS, STAGING) if task.get(name)})
        error = task.get("error")
        return {**known, **facts, **({"error": unsigned_error(error)} if isinstance(error, Mapping) else {})}

    def _opened_error(self, text: object, task_id: str) -> dict[str, Any]:
        found = self._opened_record(text, "error", task_id)
        try:
            return ErrorRecord.from_json(found).to_json()
        except (KeyError, ValueError, TypeError) as error:
            raise SealInvalid(f"The error of task {task_id} is not an error record.") from error

    def _opened_record(self, text: object, part: str, task_id: str, kind: Any = dict[str, Any]) -> dict[str, Any]:
        opened = self._open(str(text).encode(), part, task_id)
        try:
            return dict(msgspec.json.decode(opened, type=kind))
        except msgspec.MsgspecError as error:
            raise SealInvalid(f"The {part} of task {task_id} is not a record.") from error

    def _open(self, data: Piece, part: str, task_id: str) -> memoryview:
        from farcall_common.sealing import Answer, answer_key, open_answer

        with self._lock:
            secret = self._secret = self._secret or self._read_secret()
        if secret is None:
            place = "the home directory" if self._home is None else self._home
            raise SealInvalid(
                "The answer is sealed, and there is no secret to open it with.",
                hint=f"Copy {_SECRET_FILE} from the machine that submitted the task to {place}, or set "
                f"{_SECRET_VARIABLE} to its content.",
            )
        return open_answer(data, answer_key(secret, task_id=task_id), part=Answer(part), task_id=task_id)

    def _key_of(self, endpoint_id: str) -> SealingKey | None:
        names = self._meanings(endpoint_id)
        for name in names:
            self.known.check_name(name, endpoint_id)
        found = self._endpoints.sealing(endpoint_id)
        if found is None:
            self.known.check(endpoint_id, None)
            return None
        known = self._checked.get(endpoint_id)
        if known is not None and known[0] == found:
            key = known[1]
        else:
            from farcall_common.sealing import SealingKey

            key = SealingKey.verified(found, endpoint_id=endpoint_id)
        self.known.check(endpoint_id, key.fingerprint, created_at=key.created_at)
        is_new = any(self.known.meaning(name) is None for name in names) or self.known.get(endpoint_id) is None
        if is_new or self.known.newest(endpoint_id) < key.created_at:
            self.known.put(endpoint_id, key.fingerprint, created_at=key.created_at, names=names)
        self._checked[endpoint_id] = found, key
        return key

    def _opens_no_seals(self, endpoint_id: str) -> bool:
        """Whether a call to an endpoint will be sent as it is in the mode "offered"."""
        return self._endpoints.opens_no_seals(endpoint_id) and self.known.get(endpoint_id) is None

    def _note(self, task_id: str, *, sealed: bool) -> None:
        """Write down whether a call was sealed, unless its id says so.

        :raises ConfigurationError: if that cannot be written, and the call is sealed.
        """
        if self.was_sealed(task_id) == sealed:
            return
        try:
            self._exceptions.append(task_id, "sealed" if sealed else "open")
        except OSError as error:
            problem = f"{self._exceptions.path} cannot be written: {error.strerror}"
            if sealed:
                raise ConfigurationError(problem) from error
            _logger.warning("%s. The result of task %s is read by this process only.", problem, task_id)

    def _user_secret(self) -> bytes:
        """The user's secret, which is made if there is none.

        :raises ConfigurationError: if it cannot be read or made.
        """
        with self._lock:
            if self._secret is None:
                self._secret = self._read_secret() or self._make_secret()
            return self._secret

    def _read_secret(self) -> bytes | None:
        """The user's secret; None if there is none.

        :raises ConfigurationError: if it cannot be read.
        """
        source, text = _SECRET_VARIABLE, (self._environ.get(_SECRET_VARIABLE) or "").strip()
        if not text:
            if self._home is None:
                return None
            path = self._home / _SECRET_FILE
            source = str(path)
            try:
                text = path.read_text()
                warn_if_shared(path)
            except FileNotFoundError:
                return None
            except OSError as error:
                raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
        from farcall_common.sealing import decode_secret

        try:
            return decode_secret(text)
        except ValueError as error:
            raise ConfigurationError(f"{source} is not a sealing secret: {error}") from error

    def _make_secret(self) -> bytes:
        from farcall_common.sealing import encode_secret, new_secret

        home = self._home or find_home(self._environ)
        path, secret = home / _SECRET_FILE, new_secret()
        try:
            make_directory(home, mode=0o700)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(encode_secret(secret) + "\n")
        except FileExistsError:  # another process was faster
            return self._read_secret() or self._make_secret()
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
        return secret


def without_seal(result: StreamResult) -> StreamResult:
    """Part of a result of a sealed call that can be shown although it cannot be opened."""
    error = None if result.error is None else unsigned_error(result.error)
    return msgspec.structs.replace(result, error=error, details=unsigned_details(result.details))


def unsigned_details(details: Mapping[str, Any]) -> SealedDetails:
    """Part of details that must be sealed and are not, which can be shown: numbers, and states out of fixed lists."""
    found = {name: each for name, each in _numbers(details).items() if name not in (STAGES, VALUES, FILES)}
    rows = details.get(STAGES)
    if isinstance(rows, list):
        states = (row for row in rows[:MAX_STATES] if isinstance(row, Mapping) and str(row.get("state")) in STATES)
        found[STAGES] = [{**_numbers(row), "name": "", "state": str(row["state"])} for row in states]
    if staging := read_staging(details.get(STAGING)):
        found[STAGING] = dataclasses.replace(staging, url="", problem="").to_json()
    return SealedDetails({}, found)


def unsigned_error(error: Mapping[str, Any]) -> dict[str, Any]:
    """Part of an error that must be sealed and is not: its text, marked, and facts."""
    kept = {name: error[name] for name in _FACTS if isinstance(error.get(name), bool | int | float | str)}
    message, code = str(error.get("message", "")).removesuffix("."), str(error.get("code"))
    named = {"code": code if code.isidentifier() else TaskFailed.code, "message": f"{message} ({_SAYS})"}
    return {**kept, **named, "hint": _said(error.get("hint"))}


def _said(hint: object) -> str:
    return f"The service's hint: {hint}" if hint else ""


def _numbers(values: Mapping[Any, Any], *, depth: int = 2) -> dict[str, Any]:
    """The numbers of details, and those inside of mappings there."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(name, str) or not name.isidentifier() or len(name) > _MOST_NAME:
            continue
        if isinstance(value, int | float):
            found[name] = value
        elif isinstance(value, Mapping) and depth and (inside := _numbers(value, depth=depth - 1)):
            found[name] = inside
    return found
