"""Signing of functions, with an SSH key."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from farcall_common.credentials import expanded
from farcall_common.errors import ConfigurationError
from farcall_common.ssh_signatures import NAMESPACE, PrivateKey, sign, statement


def signed(request: dict[str, Any], key: str | os.PathLike[str]) -> dict[str, Any]:
    """A request that registers or changes a function, with a signature of ``function_name`` and ``function_code``.

    :param key: file of a private key; or of a public one (``.pub``), whose private key an ssh-agent has.
    :raises ConfigurationError: if that key cannot sign.
    """
    code_hash = hashlib.sha256(request["function_code"].encode()).hexdigest()
    message = statement(request["function_name"], code_hash)
    path = expanded(key)
    private_key = _private_key(path)
    signature = _sign_by_ssh_keygen(message, path) if private_key is None else sign(message, private_key)
    return request | {"signature": signature}


def _private_key(path: Path) -> PrivateKey | None:
    """The key in a file; None for one that only OpenSSH can use: encrypted, in an agent, or on a security token."""
    try:
        contents = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"The key {path} cannot be read: {error.strerror}.") from error
    try:
        key = load_ssh_private_key(contents, password=None)
    except (TypeError, ValueError, UnsupportedAlgorithm):
        return None
    return key if isinstance(key, ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) else None


def _sign_by_ssh_keygen(message: bytes, path: Path) -> str:
    """It asks for a passphrase at the terminal."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "statement")
        file.write_bytes(message)
        command = ["ssh-keygen", "-q", "-Y", "sign", "-n", NAMESPACE, "-f", str(path), str(file)]
        try:
            subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True)
            return Path(f"{file}.sig").read_text(encoding="ascii")
        except FileNotFoundError as error:
            raise ConfigurationError(
                f"The key {path} is encrypted, or is in an ssh-agent, and ssh-keygen is not installed."
            ) from error
        except subprocess.CalledProcessError as error:
            raise ConfigurationError(f"ssh-keygen cannot sign with {path}: {error.stderr.strip()}") from error
