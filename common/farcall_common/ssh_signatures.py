"""SSH signatures of functions (SSHSIG, OpenSSH's PROTOCOL.sshsig), and ``allowed_signers`` files of ssh-keygen(1)."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import datetime as dt
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from farcall_common.errors import ConfigurationError, FunctionNotSigned

NAMESPACE: Final = "farcall-function"
"""A signature for another purpose, such as a Git commit, does not count."""

PrivateKey: TypeAlias = ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
_PublicKey: TypeAlias = ed25519.Ed25519PublicKey | ec.EllipticCurvePublicKey | rsa.RSAPublicKey
_KEY_KINDS: Final = (ed25519.Ed25519PublicKey, ec.EllipticCurvePublicKey, rsa.RSAPublicKey)

_MAGIC: Final = b"SSHSIG"
_VERSION: Final = 1
_BEGIN: Final = "-----BEGIN SSH SIGNATURE-----"
_END: Final = "-----END SSH SIGNATURE-----"
_LINE: Final = 70
_MIN_RSA_BITS: Final = 2048
_DIGESTS: Final = {b"sha256": hashlib.sha256, b"sha512": hashlib.sha512}
_RSA_HASHES: Final = {b"rsa-sha2-256": hashes.SHA256(), b"rsa-sha2-512": hashes.SHA512()}
_CURVES: Final = {
    "secp256r1": (b"nistp256", hashes.SHA256()),
    "secp384r1": (b"nistp384", hashes.SHA384()),
    "secp521r1": (b"nistp521", hashes.SHA512()),
}

_TOKEN: Final = re.compile(r'(?:"(?:\\"|[^"])*"|[^"\s])+')
_OPTION: Final = re.compile(r'([A-Za-z-]+)(?:="((?:\\"|[^"])*)")?(?:,|$)')
_KEY_TYPE: Final = re.compile(r"(?:ssh-|ecdsa-sha2-|sk-)[a-z0-9@.-]+")
_TIMES: Final = {8: "%Y%m%d", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}


def statement(name: str, function_hash: str) -> bytes:
    """Message that a signature of a function signs, a line of JSON: its name, and the SHA-256 of its body in hex."""
    return json.dumps({"farcall_function": 1, "name": name, "sha256": function_hash}).encode() + b"\n"


def sign(message: bytes, key: PrivateKey) -> str:
    """The signature of a message, as ``ssh-keygen -Y sign -n farcall-function`` writes it."""
    signed = _signed_data(message, NAMESPACE.encode(), b"", b"sha512")
    match key:
        case ed25519.Ed25519PrivateKey():
            algorithm, signature = b"ssh-ed25519", key.sign(signed)
        case ec.EllipticCurvePrivateKey():
            curve, digest = _CURVES[key.curve.name]
            r, s = decode_dss_signature(key.sign(signed, ec.ECDSA(digest)))
            algorithm, signature = b"ecdsa-sha2-" + curve, _mpint(r) + _mpint(s)
        case _:
            algorithm = b"rsa-sha2-512"
            signature = key.sign(signed, padding.PKCS1v15(), _RSA_HASHES[algorithm])
    parts = (public_blob(key), NAMESPACE.encode(), b"", b"sha512", _string(algorithm) + _string(signature))
    blob = _MAGIC + _VERSION.to_bytes(4, "big") + b"".join(map(_string, parts))
    text = base64.b64encode(blob).decode()
    return "\n".join([_BEGIN, *(text[at : at + _LINE] for at in range(0, len(text), _LINE)), _END, ""])


def public_blob(key: PrivateKey) -> bytes:
    """The public part of a key, as SSH encodes it."""
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return base64.b64decode(line.split()[1])


@dataclasses.dataclass(frozen=True)
class Signer:
    """A line of an ``allowed_signers`` file. ``valid_after`` and ``valid_before`` are epoch seconds."""

    principals: str
    key_blob: bytes
    namespaces: str | None = None
    valid_after: float | None = None
    valid_before: float | None = None

    def problem(self, *, now: float) -> str:
        """Why a signature of this signer does not count now; empty if it does."""
        if self.namespaces is not None and not _matches(NAMESPACE, self.namespaces):
            return f"its signer may not sign functions, but {self.namespaces}"
        if self.valid_after is not None and now < self.valid_after:
            return "the key of its signer is not valid yet"
        if self.valid_before is not None and now > self.valid_before:
            return "the key of its signer has expired"
        return ""


class AllowedSigners:
    """The signers whose functions an endpoint runs.

    :param signers: any line of a key that is valid lets it sign.
    """

    def __init__(self, signers: Sequence[Signer]) -> None:
        self._signers = tuple(signers)

    def __len__(self) -> int:
        return len(self._signers)

    @classmethod
    def parse(cls, text: str, *, source: str) -> AllowedSigners:
        """Read the text of a file that ``source`` names.

        :raises ConfigurationError: with the line, if one is not understood.
        """
        signers = []
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip() and not line.lstrip().startswith("#"):
                try:
                    signers.append(_signer(line))
                except ValueError as error:
                    raise ConfigurationError(
                        f"{source}, line {number}: {error}.", hint="ssh-keygen(1), ALLOWED SIGNERS, has the format."
                    ) from error
        return cls(signers)

    def verify(self, message: bytes, armored: str) -> Sequence[Signer]:
        """The signers, by the lines of their key, who have signed a message. Whether they may is
        :meth:`Signer.problem`.

        :raises FunctionNotSigned: if it is no signature, or one for another message, or of a key that is not here.
        """
        try:
            return self._verify(message, armored)
        except (ValueError, InvalidSignature, UnsupportedAlgorithm) as error:
            reason = str(error) or "it belongs to another body or another name"
            raise FunctionNotSigned(f"The signature of the function does not count: {reason}.") from error

    def _verify(self, message: bytes, armored: str) -> Sequence[Signer]:
        version, rest = _opened(armored)
        if version != _VERSION:
            raise ValueError(f"version {version} of SSH signatures is unknown")
        key_blob, namespace, reserved, digest, signature = _strings(rest, count=5)
        if namespace != NAMESPACE.encode():
            raise ValueError(f"it was made for {namespace[:100].decode(errors='replace')!r}, not for {NAMESPACE!r}")
        if digest not in _DIGESTS:
            raise ValueError("its digest is neither SHA-256 nor SHA-512")
        signers = [signer for signer in self._signers if signer.key_blob == key_blob]
        if not signers:
            raise ValueError(f"key {fingerprint(key_blob)} is not among the allowed signers")
        algorithm, raw = _strings(signature, count=2)
        _check(_public_key(key_blob), algorithm, raw, _signed_data(message, namespace, reserved, digest))
        return signers


def fingerprint(key_blob: bytes) -> str:
    """The fingerprint of a public key, as OpenSSH shows it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key_blob).digest()).decode().rstrip("=")


def _check(key: _PublicKey, algorithm: bytes, signature: bytes, signed: bytes) -> None:
    """
    :raises InvalidSignature: if the key did not sign this.
    :raises ValueError: if the algorithm is not one of the key.
    """
    match key:
        case ed25519.Ed25519PublicKey() if algorithm == b"ssh-ed25519":
            key.verify(signature, signed)
        case ec.EllipticCurvePublicKey() if algorithm == b"ecdsa-sha2-" + _CURVES[key.curve.name][0]:
            r, s = (int.from_bytes(each, "big", signed=True) for each in _strings(signature, count=2))
            if r <= 0 or s <= 0:
                raise InvalidSignature
            key.verify(encode_dss_signature(r, s), signed, ec.ECDSA(_CURVES[key.curve.name][1]))
        case rsa.RSAPublicKey() if algorithm in _RSA_HASHES:
            key.verify(signature, signed, padding.PKCS1v15(), _RSA_HASHES[algorithm])
        case _:
            raise ValueError(f"{algorithm[:100].decode(errors='replace')} is not an algorithm of its key")


def _signed_data(message: bytes, namespace: bytes, reserved: bytes, digest: bytes) -> bytes:
    return _MAGIC + b"".join(map(_string, (namespace, reserved, digest, _DIGESTS[digest](message).digest())))


def _opened(armored: str) -> tuple[int, bytes]:
    """Version and contents of a signature."""
    text = armored.strip()
    if not (text.startswith(_BEGIN) and text.endswith(_END)):
        raise ValueError("it is not an SSH signature")
    try:
        blob = base64.b64decode("".join(text[len(_BEGIN) : -len(_END)].split()), validate=True)
    except binascii.Error as error:
        raise ValueError("it is not base64") from error
    if not blob.startswith(_MAGIC):
        raise ValueError("it is not an SSH signature")
    at = len(_MAGIC)
    return int.from_bytes(blob[at : at + 4], "big"), blob[at + 4 :]


def _public_key(key_blob: bytes) -> _PublicKey:
    [kind] = _strings(key_blob, count=1, is_whole=False)
    if kind.startswith(b"sk-"):
        raise ValueError("keys of security tokens (sk-...) are not supported")
    key = serialization.load_ssh_public_key(kind + b" " + base64.b64encode(key_blob))
    if not isinstance(key, _KEY_KINDS) or b"-cert-" in kind:
        raise ValueError(f"keys of type {kind.decode(errors='replace')} are not supported")
    if isinstance(key, rsa.RSAPublicKey) and key.key_size < _MIN_RSA_BITS:
        raise ValueError(f"RSA keys need {_MIN_RSA_BITS} bits or more")
    return key


# -- SSH's encoding ----------------------------------------------------------------------------------------------------


def _string(value: bytes) -> bytes:
    return len(value).to_bytes(4, "big") + value


def _mpint(value: int) -> bytes:
    return _string(value.to_bytes(value.bit_length() // 8 + 1, "big"))


def _strings(encoded: bytes, *, count: int, is_whole: bool = True) -> list[bytes]:
    found, at = [], 0
    for _ in range(count):
        end = at + 4 + int.from_bytes(encoded[at : at + 4], "big")
        if at + 4 > len(encoded) or end > len(encoded):
            raise ValueError("it is truncated")
        found.append(encoded[at + 4 : end])
        at = end
    if is_whole and at != len(encoded):
        raise ValueError("it has bytes behind its end")
    return found


# -- allowed_signers ---------------------------------------------------------------------------------------------------


def _signer(line: str) -> Signer:
    tokens = _TOKEN.findall(line)
    has_options = len(tokens) > 1 and not _KEY_TYPE.fullmatch(tokens[1])
    given = list(_options(tokens[1])) if has_options else []
    options = dict(given)
    if len(options) < len(given):
        raise ValueError("an option is there twice")
    fields = tokens[2:4] if has_options else tokens[1:3]
    if len(fields) < 2:
        raise ValueError("expected principals, options if there are any, type of key, and key")
    try:
        key_blob = base64.b64decode(fields[1], validate=True)
        [kind] = _strings(key_blob, count=1, is_whole=False)
        _public_key(key_blob)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(f"the key cannot be used: {error}") from error
    if kind.decode(errors="replace") != fields[0]:
        raise ValueError(f"the key is not of type {fields[0]}")
    return Signer(
        tokens[0].strip('"'),
        key_blob,
        namespaces=options.get("namespaces"),
        valid_after=_instant(options.get("valid-after")),
        valid_before=_instant(options.get("valid-before")),
    )


def _options(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        if not (option := _OPTION.match(text, at)):
            raise ValueError(f"{text[at:]!r} is not an option")
        name, value = option[1].lower(), option[2]
        if name == "cert-authority":
            raise ValueError("cert-authority is not supported: list the keys of the signers themselves")
        if name not in {"namespaces", "valid-after", "valid-before"} or not value:
            raise ValueError(f"{option[0].rstrip(',')!r} is not an option")
        yield name, value
        at = option.end()


def _instant(text: str | None) -> float | None:
    """Epoch seconds; without a Z, the time is local."""
    if text is None:
        return None
    digits = text[:-1] if text[-1] in "Zz" else text
    try:
        at = dt.datetime.strptime(digits, _TIMES[len(digits)])  # noqa: DTZ007 - local, as ssh-keygen reads it
    except (KeyError, ValueError) as error:
        raise ValueError(f"{text!r} is not a time: write YYYYMMDD[HHMM[SS]][Z]") from error
    return (at.replace(tzinfo=dt.UTC) if digits != text else at).timestamp()


def _matches(text: str, patterns: str) -> bool:
    """OpenSSH's pattern lists: ``*`` and ``?`` are wildcards, a match of ``!pattern`` excludes."""
    found = False
    for pattern in patterns.split(","):
        expression = re.escape(pattern.removeprefix("!")).replace(r"\*", ".*").replace(r"\?", ".")
        if re.fullmatch(expression, text):
            if pattern.startswith("!"):
                return False
            found = True
    return found
