"""Sealed calls of a client: seals calls to the keys of endpoints, opens their answers, and keeps what that needs.

An endpoint is trusted at its first use, as a host is by SSH: the fingerprint of its identity is kept in
``known_endpoints`` of Farcall's home directory, a line with its id for each endpoint. The user's secret, from which the
keys of all answers are derived, is ``sealing.secret`` there, or ``FARCALL_SEALING_SECRET``.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict

import msgspec

from farcall._endpoints import EndpointCache
from farcall_common.credentials import find_home, from_environment, read_settings
from farcall_common.errors import (
    ConfigurationError,
    EndpointIncompatible,
    EndpointKeyChanged,
    InvalidRequest,
    PayloadTooLarge,
    ResultRefused,
    SealInvalid,
)
from farcall_common.files import warn_if_shared, write_private
from farcall_common.limits import MAX_INLINE_BYTES, MAX_PAYLOAD_BYTES
from farcall_common.payload import Piece
from farcall_common.wire import StreamResult, TaskState

if TYPE_CHECKING:
    from farcall_common.sealing import SealingKey

SealMode = Literal["off", "offered", "required"]
_MODES: Final[tuple[SealMode, ...]] = ("off", "offered", "required")
_SECRET_VARIABLE: Final = "FARCALL_SEALING_SECRET"  # noqa: S105 - a name
_SEALED: Final = (b"fs\n", b"bs\n")

_SealedStream = TypedDict("_SealedStream", {"from": int, "next": int, "text": str})


class _SealedOutput(TypedDict):
    """The texts in an answer about output. Other keys are left out: they would replace those of the cloud's answer."""

    attempt: int
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
    return functools.cache(lambda: seal_mode(read_settings(find_home(environ)).get("sealed") or "off"))


def seal_mode(found: str) -> SealMode:
    """The mode of this name.

    :raises ConfigurationError: if there is none.
    """
    for mode in _MODES:
        if found == mode:
            return mode
    raise ConfigurationError(f"sealed is {found!r}", hint=f"It is one of {', '.join(_MODES)}.")


class KnownEndpoints:
    """The fingerprints of the endpoints that this user has sealed calls to. May be used from any thread."""

    def __init__(self, home: Path) -> None:
        self._path = home / "known_endpoints"
        self._lock = threading.Lock()

    def get(self, endpoint_id: str) -> str | None:
        """The fingerprint of an endpoint; None if it is new.

        :raises ConfigurationError: if the file cannot be read.
        """
        return self._read().get(endpoint_id)

    def put(self, endpoint_id: str, fingerprint: str) -> None:
        """Keep the fingerprint of an endpoint.

        :raises ConfigurationError: if the file cannot be read or written.
        """
        with self._lock:
            known = self._read() | {endpoint_id: fingerprint}
            try:
                write_private(self._path, "".join(f"{id_} {text}\n" for id_, text in known.items()).encode())
            except OSError as error:
                raise ConfigurationError(f"{self._path} cannot be written: {error.strerror}") from error

    def check(self, endpoint_id: str, found: str | None) -> None:
        """Compare the identity that an endpoint shows with the one that is kept; None: it shows none.

        :raises EndpointKeyChanged: if it is another one.
        """
        known = self.get(endpoint_id)
        if known is None or known == found:
            return
        shows = f"shows the identity {found}" if found else "offers no sealing key any more"
        raise EndpointKeyChanged(
            f"endpoint {endpoint_id} {shows}; this user knows it with {known}",
            hint="Another party may want to read your calls. Ask the endpoint's owner for the output of "
            "`farcall-endpoint fingerprint`; if the change is right, run "
            f"`farcall endpoints fingerprint {endpoint_id} --accept`.",
        )

    def forget(self, endpoint_id: str) -> None:
        """Treat an endpoint as new."""
        with self._lock:
            known = self._read()
            if known.pop(endpoint_id, None) is not None:
                write_private(self._path, "".join(f"{id_} {text}\n" for id_, text in known.items()).encode())

    def _read(self) -> dict[str, str]:
        try:
            lines = self._path.read_text().splitlines()
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{self._path} cannot be read: {error}") from error
        pairs = (line.split() for line in lines if not line.startswith("#"))
        return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


class Sealer:
    """Seals calls and opens answers. May be used from any thread.

    :param mode: provides that of calls that do not have their own; "required" also refuses results that are not sealed.
    """

    def __init__(
        self,
        endpoints: EndpointCache,
        *,
        mode: Callable[[], SealMode],
        home: Path | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._mode = mode
        self._endpoints = endpoints
        self._environ = environ
        self._home = find_home(environ) if home is None else home
        self.known: KnownEndpoints = KnownEndpoints(self._home)
        self._lock = threading.Lock()
        self._secret: bytes | None = None
        self._checked: dict[str, tuple[Mapping[str, Any], SealingKey]] = {}

    @property
    def mode(self) -> SealMode:
        """The mode of calls that do not have their own."""
        return self._mode()

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
            key=answer_key(self._user_secret(make=True), task_id=task_id),
            max_text_bytes=MAX_INLINE_BYTES,
            callees=[each.partition("@")[0] for each in callees],
        )
        if len(sealed) > MAX_PAYLOAD_BYTES:
            raise PayloadTooLarge(
                f"the arguments take {len(sealed)} bytes when sealed; the limit is {MAX_PAYLOAD_BYTES}"
            )
        return sealed

    def fingerprint(self, endpoint_id: str) -> str | None:
        """The fingerprint that the API reports now, whose signature is right; None if the endpoint has no key.

        :raises SealInvalid: if the signature is wrong.
        :raises FarcallError: if the API does not answer.
        """
        from farcall_common.sealing import SealingKey

        found = self._endpoints.sealing(endpoint_id)
        return None if found is None else SealingKey.verified(found, endpoint_id=endpoint_id).fingerprint

    def opened(self, result: StreamResult, data: Piece | None, *, must: bool) -> tuple[StreamResult, Piece | None]:
        """A result and its value, opened if they are sealed.

        :param must: whether the call was sealed, so that its value has to be.
        :raises SealInvalid: if a seal cannot be opened.
        :raises ResultRefused: for a value that is not sealed and must be.
        """
        changes: dict[str, Any] = {}
        if result.error is not None and (text := result.error.get("sealed")):
            opened = self._opened_record(text, "error", result.task_id)
            # The cloud knows better how a task ended, and what to do about it.
            said = {name: value for name in ("code", "hint") if (value := result.error.get(name))}
            changes["error"] = opened | said
        elif result.error is not None and (must or self.mode == "required"):
            # From the cloud, or an endpoint that could not open the call.
            changes["error"] = {**result.error, "exception_data": None}
        if text := result.details.get("sealed"):
            rest = {name: value for name, value in result.details.items() if name != "sealed"}
            changes["details"] = rest | self._opened_record(text, "details", result.task_id)
        if data is not None and result.state is TaskState.SUCCESS:
            data = self.opened_value(data, result.task_id, must=must)
        return msgspec.structs.replace(result, **changes) if changes else result, data

    def opened_output(self, task_id: str, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """An answer about the output of a task, opened if that is sealed. Output that must be sealed and is not is left
        out: the cloud could have written it.

        :raises SealInvalid: if it cannot be opened.
        """
        if text := answer.get("sealed"):
            return {**answer, **self._opened_record(text, "output", task_id, _SealedOutput)}
        return {**answer, "stdout": None, "stderr": None} if self.mode == "required" else answer

    def opened_value(self, data: Piece, task_id: str, *, must: bool) -> Piece:
        """A value, opened if it is sealed.

        :raises SealInvalid, ResultRefused: as :meth:`opened`.
        """
        if bytes(data[:3]) in _SEALED:
            return self._open(data, "result", task_id)
        if must or self.mode == "required":
            hint = "It is not from the endpoint, which seals the answers of sealed calls."
            if not must:
                hint = "If the call was not sealed, read its result with sealed='offered'."
            raise ResultRefused(f"the result of task {task_id} is not sealed", hint=hint)
        return data

    def _opened_record(self, text: object, part: str, task_id: str, kind: Any = dict[str, Any]) -> dict[str, Any]:
        opened = self._open(str(text).encode(), part, task_id)
        try:
            return dict(msgspec.json.decode(opened, type=kind))
        except msgspec.MsgspecError as error:
            raise SealInvalid(f"The {part} of task {task_id} is not a record.") from error

    def _open(self, data: Piece, part: str, task_id: str) -> memoryview:
        from farcall_common.sealing import Answer, answer_key, open_answer

        key = answer_key(self._user_secret(make=False), task_id=task_id)
        return open_answer(data, key, part=Answer(part), task_id=task_id)

    def _key_of(self, endpoint_id: str) -> SealingKey | None:
        found = self._endpoints.sealing(endpoint_id)
        if found is None:
            self.known.check(endpoint_id, None)
            return None
        checked = self._checked.get(endpoint_id)
        if checked is not None and checked[0] == found:
            return checked[1]
        from farcall_common.sealing import SealingKey

        key = SealingKey.verified(found, endpoint_id=endpoint_id)
        self.known.check(endpoint_id, key.fingerprint)
        if self.known.get(endpoint_id) is None:
            self.known.put(endpoint_id, key.fingerprint)
        self._checked[endpoint_id] = found, key
        return key

    def _user_secret(self, *, make: bool) -> bytes:
        """The user's secret.

        :param make: whether to make one if there is none.
        """
        with self._lock:
            if self._secret is None:
                self._secret = self._read_secret(make=make)
            return self._secret

    def _read_secret(self, *, make: bool) -> bytes:
        from farcall_common.sealing import decode_secret, encode_secret, new_secret

        path = self._home / "sealing.secret"
        source, text = _SECRET_VARIABLE, (self._environ.get(_SECRET_VARIABLE) or "").strip()
        if not text:
            source = str(path)
            try:
                text = path.read_text()
                warn_if_shared(path)
            except FileNotFoundError:
                if not make:
                    raise SealInvalid(
                        "The answer is sealed, and there is no secret to open it with.",
                        hint=f"Copy {path.name} from the machine that submitted the task to {path}, or set "
                        f"{_SECRET_VARIABLE} to its content.",
                    ) from None
                self._home.mkdir(parents=True, exist_ok=True, mode=0o700)
                try:
                    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                except FileExistsError:  # another process was faster
                    return self._read_secret(make=False)
                secret = new_secret()
                with os.fdopen(descriptor, "w") as file:
                    file.write(encode_secret(secret) + "\n")
                return secret
            except OSError as error:
                raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
        try:
            return decode_secret(text)
        except ValueError as error:
            raise ConfigurationError(f"{source} is not a sealing secret: {error}") from error
