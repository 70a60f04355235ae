"""Sealed payloads: a call that only its endpoint can open, and answers that only its submitter can open.

A call is encrypted with HPKE (RFC 9180: X25519, HKDF-SHA256, AES-256-GCM) to the sealing key of an endpoint, and bound
to the protocol, the endpoint, the function, the task and the time. The key of the answer travels inside of it, and is
derived from the user's secret and the id of the task, so that another process of the user can read the answer.

::

    buffer  = "fs" newline Base64(sealed)      small ones, which travel as text
            | "bs" newline sealed              larger ones, which travel through the blob store
    call    = version (1 byte) | kind of function (1) | key id (8) | epoch seconds (8)
            | HPKE(answer key | content key) | AES-256-GCM with the content key
            version 1 of a call, version 2 of (length (4) | functions that it calls, in MessagePack) and a call
    answer  = nonce (12) | AES-256-GCM

Bodies are in memory as a whole wherever they are handled (10 MiB at most), so that each is one AEAD message: none can
be truncated or reordered. HPKE wraps a key, not the call, because it copies; the body is encrypted in place.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import enum
import hashlib
import os
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import msgspec
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from farcall_common.errors import SealInvalid

SealMode = Literal["off", "offered", "required"]
SEAL_MODES: Final[tuple[SealMode, ...]] = ("off", "offered", "required")

CALL_LIFETIME_S: Final = 30 * 86400.0
"""An endpoint opens a call for so long after it was sealed: as long as a task may wait."""
CLOCK_TOLERANCE_S: Final = 600.0
SECRET_BYTES: Final = 32

_VERSION: Final = 1
_CALLING: Final = 2
"""The version of calls that call other functions. An endpoint that does not know it runs no such calls."""
_BY_ID, _BY_HASH = 0, 1
_HEAD: Final = struct.Struct(">BB8sQ")
_LENGTH: Final = struct.Struct(">I")
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
_FIRST_NONCE: Final = bytes(_NONCE_BYTES)
"""Nonce for a key that encrypts only one message."""
_WRAPPED_BYTES: Final = 32 + 2 * SECRET_BYTES + _TAG_BYTES
_TEXT, _BINARY = b"fs\n", b"bs\n"
_PREFIX_BYTES: Final = 3
_SUITE: Final = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)

Piece = bytes | memoryview


class Answer(enum.StrEnum):
    """The parts of an answer. One is never taken for another."""

    RESULT = "result"
    ERROR = "error"
    DETAILS = "details"
    OUTPUT = "output"


# -- keys --------------------------------------------------------------------------------------------------------------


class SealingKey(msgspec.Struct, frozen=True, kw_only=True):
    """The public sealing key of an endpoint, signed by the endpoint's identity. Bytes are Base64, ``created_at`` is
    epoch seconds."""

    identity: str
    key: str
    created_at: int
    signature: str

    @classmethod
    def verified(cls, data: Any, *, endpoint_id: str) -> SealingKey:
        """A key from JSON, whose signature is that of its identity for this endpoint.

        :raises SealInvalid: if it is not.
        """
        try:
            found = msgspec.convert(data, cls)
            statement = _statement(endpoint_id, _decode(found.key), found.created_at)
            Ed25519PublicKey.from_public_bytes(_decode(found.identity)).verify(_decode(found.signature), statement)
        except (msgspec.ValidationError, InvalidSignature, ValueError) as error:
            raise SealInvalid(f"The sealing key of endpoint {endpoint_id} is not signed by its identity.") from error
        return found

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the identity, in the form of OpenSSH."""
        return fingerprint(_decode(self.identity))

    def to_json(self) -> dict[str, Any]:
        """The key as an object."""
        return dict(msgspec.to_builtins(self))


def fingerprint(identity: bytes) -> str:
    """``SHA256:`` and the hash of a public identity key, in Base64 without padding."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(identity).digest()).decode().rstrip("=")


class _StoredKey(msgspec.Struct, frozen=True):
    secret: str
    created_at: int


class _StoredKeys(msgspec.Struct, frozen=True):
    identity: str
    keys: tuple[_StoredKey, ...]


@dataclasses.dataclass(frozen=True)
class SealingSecrets:
    """The private keys of an endpoint: its identity, and its sealing keys, newest first, with their epoch seconds."""

    identity: Ed25519PrivateKey
    keys: tuple[tuple[X25519PrivateKey, int], ...]

    @classmethod
    def new(cls, *, now: float) -> SealingSecrets:
        """A new identity with its first sealing key."""
        return cls(Ed25519PrivateKey.generate(), ()).rotated(now=now)

    def rotated(self, *, now: float) -> SealingSecrets:
        """With a new sealing key. A former key opens the calls that were sealed with it for as long as they live.

        The new key is younger than the former ones by its ``created_at``, also if the clock was set back: clients
        refuse an older one."""
        created_at = max(int(now), *(former_at + 1 for _, former_at in self.keys), 0)
        keys = ((X25519PrivateKey.generate(), created_at), *self.keys)
        return SealingSecrets(self.identity, tuple(SealingSecrets(self.identity, keys).usable(now=now)))

    def usable(self, *, now: float) -> Iterator[tuple[X25519PrivateKey, int]]:
        """The keys that open calls, newest first. A former key does so for the lifetime of a call after its
        replacement."""
        replaced_at = now
        for key, created_at in self.keys:
            if replaced_at >= now - CALL_LIFETIME_S - CLOCK_TOLERANCE_S:
                yield key, created_at
            replaced_at = created_at

    @classmethod
    def from_bytes(cls, data: bytes) -> SealingSecrets:
        """:raises ValueError: if these are not the bytes of :meth:`to_bytes`."""
        try:
            stored = msgspec.json.decode(data, type=_StoredKeys)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from error
        keys = tuple((X25519PrivateKey.from_private_bytes(_decode(k.secret)), k.created_at) for k in stored.keys)
        if not keys:
            raise ValueError("there is no sealing key")
        return cls(Ed25519PrivateKey.from_private_bytes(_decode(stored.identity)), keys)

    def to_bytes(self) -> bytes:
        """Return the keys as JSON, for a private file."""
        keys = tuple(_StoredKey(_encode(key.private_bytes_raw()), created_at) for key, created_at in self.keys)
        return msgspec.json.encode(_StoredKeys(_encode(self.identity.private_bytes_raw()), keys))

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the identity."""
        return fingerprint(self.identity.public_key().public_bytes_raw())

    def public(self, *, endpoint_id: str) -> SealingKey:
        """The newest sealing key, signed for this endpoint."""
        key, created_at = self.keys[0]
        raw = key.public_key().public_bytes_raw()
        return SealingKey(
            identity=_encode(self.identity.public_key().public_bytes_raw()),
            key=_encode(raw),
            created_at=created_at,
            signature=_encode(self.identity.sign(_statement(endpoint_id, raw, created_at))),
        )


def new_secret() -> bytes:
    """A new secret of a user."""
    return os.urandom(SECRET_BYTES)


def encode_secret(secret: bytes) -> str:
    """A user's secret as text."""
    return _encode(secret)


def decode_secret(text: str) -> bytes:
    """:raises ValueError: if the text is not that of a secret."""
    secret = _decode(text.strip())
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, and this one has {len(secret)}")
    return secret


def answer_key(secret: bytes, *, task_id: str) -> bytes:
    """The key of all answers of one task, from the secret of its submitter."""
    info = b"farcall answer key v1\0" + task_id.encode()
    return HKDF(algorithm=hashes.SHA256(), length=SECRET_BYTES, salt=None, info=info).derive(secret)


# -- calls -------------------------------------------------------------------------------------------------------------


def seal_call(
    call: Piece,
    *,
    to: SealingKey,
    endpoint_id: str,
    function: str,
    task_id: str,
    key: bytes,
    max_text_bytes: int,
    callees: Sequence[str] = (),
    now: float | None = None,
) -> bytes:
    """The buffer of a call, which one endpoint can open.

    :param function: the SHA-256 of the function's body in hex, or the id of the function.
    :param callees: likewise, the functions that it calls, in the order of the task's option.
    :param key: of the answer.
    :param max_text_bytes: largest buffer that is written as text.
    :param now: epoch seconds; None is now.
    """
    public = _decode(to.key)
    kind = _BY_HASH if _is_hash(function) else _BY_ID
    version = _CALLING if callees else _VERSION
    head = _HEAD.pack(version, kind, _key_id(public), int(time.time() if now is None else now))
    if callees:
        names = msgspec.msgpack.encode(callees)
        call = b"".join((_LENGTH.pack(len(names)), names, call))
    info = _call_info(head, endpoint_id, function, task_id)
    content_key = os.urandom(SECRET_BYTES)
    wrapped = _SUITE.encrypt(key + content_key, X25519PublicKey.from_public_bytes(public), info)
    sealed = _encrypted(call, content_key, _FIRST_NONCE, None, head=head + wrapped, max_text_bytes=max_text_bytes)
    return bytes(sealed)  # for the HTTP client


def open_call(
    buffer: Piece,
    secrets: SealingSecrets,
    *,
    endpoint_id: str,
    function_id: str,
    function_hash: str,
    task_id: str,
    callees: Sequence[tuple[str, str]] = (),
    now: float,
) -> tuple[memoryview, bytes]:
    """The call in a buffer, and the key of its answers.

    :param callees: id and hash of each function that the task is said to call.
    :raises SealInvalid: if it was changed, was sealed for another endpoint, function or task or with other callees, or
        its time is over.
    """
    sealed = _unframed(buffer)
    if len(sealed) < _HEAD.size + _WRAPPED_BYTES + _TAG_BYTES:
        raise SealInvalid("The sealed call is truncated.")
    head = bytes(sealed[: _HEAD.size])
    version, kind, key_id, sealed_at = _HEAD.unpack(head)
    if version not in (_VERSION, _CALLING):
        raise SealInvalid(
            f"The call is sealed with version {version}, and this endpoint opens {_VERSION} and {_CALLING}."
        )
    if sealed_at > now + CLOCK_TOLERANCE_S:
        raise SealInvalid("The call was sealed in the future.", hint="Set the clocks of both machines.")
    if sealed_at < now - CALL_LIFETIME_S:
        raise SealInvalid("The call was sealed too long ago.", hint="Submit the call again.")
    usable = secrets.usable(now=now)
    private = next((k for k, _ in usable if _key_id(k.public_key().public_bytes_raw()) == key_id), None)
    if private is None:
        raise SealInvalid(
            "The call was sealed with a key that the endpoint does not have, or replaced over 30 days ago.", hint=_AGAIN
        )
    info = _call_info(head, endpoint_id, function_hash if kind == _BY_HASH else function_id, task_id)
    try:
        keys = _SUITE.decrypt(sealed[_HEAD.size : _HEAD.size + _WRAPPED_BYTES], private, info)
        call = _decrypted(sealed[_HEAD.size + _WRAPPED_BYTES :], keys[SECRET_BYTES:], _FIRST_NONCE, None)
    except (InvalidTag, ValueError) as error:
        raise SealInvalid(
            "The sealed call was changed, or was sealed for another endpoint, function or task.", hint=_AGAIN
        ) from error
    names, call = _callees_of(call) if version == _CALLING else ((), call)
    if len(names) != len(callees) or any(
        name != (function_hash if _is_hash(name) else function_id)
        for name, (function_id, function_hash) in zip(names, callees, strict=True)
    ):
        raise SealInvalid("The functions that the call calls were exchanged.", hint=_AGAIN)
    return call, keys[:SECRET_BYTES]


def _callees_of(call: memoryview) -> tuple[Sequence[str], memoryview]:
    """The functions that a call names, and the call itself; the submitter may have written anything there."""
    try:
        end = _LENGTH.size + _LENGTH.unpack_from(call)[0]
        names = msgspec.msgpack.decode(call[_LENGTH.size : end], type=tuple[str, ...])
    except (struct.error, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SealInvalid("The sealed call is damaged.") from error
    return names, call[end:]


# -- answers -----------------------------------------------------------------------------------------------------------


def seal_answer(body: Piece, key: bytes, *, part: Answer, task_id: str, max_text_bytes: int) -> Piece:
    """The buffer of an answer, as text if that takes at most ``max_text_bytes``."""
    nonce = os.urandom(_NONCE_BYTES)
    return _encrypted(body, key, nonce, _answer_aad(part, task_id), head=nonce, max_text_bytes=max_text_bytes)


def open_answer(buffer: Piece, key: bytes, *, part: Answer, task_id: str) -> memoryview:
    """The answer in a buffer, in memory of its own.

    :raises SealInvalid: if it was changed, belongs to another task, or was sealed with another key.
    """
    sealed = _unframed(buffer)
    if len(sealed) < _NONCE_BYTES + _TAG_BYTES:
        raise SealInvalid(f"The sealed {part} of task {task_id} is truncated.")
    try:
        return _decrypted(sealed[_NONCE_BYTES:], key, bytes(sealed[:_NONCE_BYTES]), _answer_aad(part, task_id))
    except InvalidTag as error:
        raise SealInvalid(
            f"The {part} of task {task_id} cannot be opened: it was changed, or sealed with another secret.",
            hint="Read it with the secret of the user who submitted the task: sealing.secret in FARCALL_HOME, or "
            "FARCALL_SEALING_SECRET.",
        ) from error


def is_sealed(buffer: Piece | None) -> bool:
    """Whether a buffer is sealed, as far as its first bytes show."""
    return buffer is not None and bytes(buffer[:_PREFIX_BYTES]) in (_TEXT, _BINARY)


def is_sealed_text(buffer: Piece) -> bool:
    """Whether a buffer is sealed and text."""
    return bytes(buffer[:_PREFIX_BYTES]) == _TEXT


_AGAIN: Final = "Submit the call again: a retry by the API, or another task with the same payload, cannot be opened."


def _call_info(head: bytes, *fields: str) -> bytes:
    """Context that a sealed call is bound to. A length before each field makes different fields different bytes."""
    return b"farcall call v1\0" + head + _lengths(field.encode() for field in fields)


def _answer_aad(part: Answer, task_id: str) -> bytes:
    return b"farcall answer v1\0" + _lengths((part.encode(), task_id.encode()))


def _statement(endpoint_id: str, key: bytes, created_at: int) -> bytes:
    return b"farcall sealing key v1\0" + _lengths((endpoint_id.encode(), key, str(created_at).encode()))


def _lengths(fields: Any) -> bytes:
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)


def _is_hash(function: str) -> bool:
    return len(function) == 64 and "-" not in function


def _key_id(public: bytes) -> bytes:
    return hashlib.sha256(public).digest()[:8]


def _text_bytes(size: int) -> int:
    return _PREFIX_BYTES + 4 * ((size + 2) // 3)


def _encrypted(body: Piece, key: bytes, nonce: bytes, aad: bytes | None, *, head: bytes, max_text_bytes: int) -> Piece:
    """A head and a body behind it, encrypted: as text if that takes at most ``max_text_bytes``. A large body is copied
    once."""
    size = len(head) + len(body) + _TAG_BYTES
    if _text_bytes(size) <= max_text_bytes:
        return _TEXT + base64.b64encode(head + AESGCM(key).encrypt(nonce, bytes(body), aad))
    sealed = memoryview(bytearray(_PREFIX_BYTES + size))
    start = _PREFIX_BYTES + len(head)
    sealed[:start] = _BINARY + head
    AESGCM(key).encrypt_into(nonce, body, aad, sealed[start:])
    return sealed.toreadonly()


def _decrypted(sealed: Piece, key: bytes, nonce: bytes, aad: bytes | None) -> memoryview:
    """A body in memory of its own.

    :raises InvalidTag: if it was changed, or has another key.
    """
    opened = memoryview(bytearray(len(sealed) - _TAG_BYTES))
    AESGCM(key).decrypt_into(nonce, sealed, aad, opened)
    return opened


def _unframed(buffer: Piece) -> memoryview:
    prefix = bytes(buffer[:_PREFIX_BYTES])
    if prefix == _BINARY:
        return memoryview(buffer)[_PREFIX_BYTES:]
    if prefix != _TEXT:
        raise SealInvalid("The bytes are not sealed.")
    text = bytes(buffer[_PREFIX_BYTES:])
    try:
        sealed = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise SealInvalid("The sealed bytes are damaged.") from error
    if base64.b64encode(sealed) != text:  # one form of each seal: unused bits are zero
        raise SealInvalid("The sealed bytes are damaged.")
    return memoryview(sealed)


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode(text: str) -> bytes:
    """:raises ValueError: if it is not Base64."""
    return base64.b64decode(text, validate=True)
