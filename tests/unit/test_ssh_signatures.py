"""SSH signatures of functions: OpenSSH's own and ours are the same, and nothing else counts."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from farcall._signing import signed
from farcall_common.errors import ConfigurationError, FunctionNotSigned
from farcall_common.ssh_signatures import AllowedSigners, PrivateKey, Signer, public_blob, sign, statement
from tests.waiting import wait_until

MESSAGE = statement("f", "0" * 64)
KEYS: dict[str, PrivateKey] = {
    "ssh-ed25519": ed25519.Ed25519PrivateKey.from_private_bytes(b"1" * 32),
    "ecdsa-sha2-nistp256": ec.derive_private_key(2**250 + 7, ec.SECP256R1()),
    "ecdsa-sha2-nistp384": ec.derive_private_key(2**380 + 7, ec.SECP384R1()),
    "ecdsa-sha2-nistp521": ec.derive_private_key(2**515 + 7, ec.SECP521R1()),
    "ssh-rsa": rsa.generate_private_key(public_exponent=65537, key_size=2048),
}
KEY = KEYS["ssh-ed25519"]
OTHER = ed25519.Ed25519PrivateKey.from_private_bytes(b"2" * 32)

needs_ssh_keygen = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="OpenSSH is not installed")
each_kind = pytest.mark.parametrize("kind", KEYS)


def line(kind: str, *, principals: str = "ada@lab.org", options: str = "", key: PrivateKey | None = None) -> str:
    blob = base64.b64encode(public_blob(key or KEYS[kind])).decode()
    return " ".join(filter(None, (principals, options, kind, blob)))


def allowed(text: str) -> AllowedSigners:
    return AllowedSigners.parse(text, source="signers")


def write_key(directory: Path, key: PrivateKey) -> Path:
    path = directory / "key"
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    path.chmod(0o600)
    return path


def ssh_keygen(*arguments: str, message: bytes = MESSAGE) -> str:
    command = ["ssh-keygen", *arguments]
    return subprocess.run(command, input=message, capture_output=True, check=True).stdout.decode()


def opened(armored: str) -> bytes:
    return base64.b64decode("".join(armored.split("\n")[1:-2]))


def armored(blob: bytes) -> str:
    return f"-----BEGIN SSH SIGNATURE-----\n{base64.b64encode(blob).decode()}\n-----END SSH SIGNATURE-----\n"


@each_kind
def test_a_signature_names_its_signer(kind: str) -> None:
    [signer] = allowed(line(kind)).verify(MESSAGE, sign(MESSAGE, KEYS[kind]))
    assert (signer.principals, signer.problem(now=0.0)) == ("ada@lab.org", "")


@needs_ssh_keygen
@each_kind
@pytest.mark.parametrize("digest", ["sha256", "sha512"])
def test_signatures_of_ssh_keygen_count(tmp_path: Path, kind: str, digest: str) -> None:
    key = write_key(tmp_path, KEYS[kind])
    signature = ssh_keygen("-Y", "sign", "-n", "farcall-function", "-O", f"hashalg={digest}", "-f", str(key))
    assert allowed(line(kind)).verify(MESSAGE, signature)
    with pytest.raises(FunctionNotSigned, match="another body or another name"):
        allowed(line(kind)).verify(MESSAGE + b"x", signature)


@needs_ssh_keygen
@each_kind
def test_ssh_keygen_accepts_our_signatures_and_files(tmp_path: Path, kind: str) -> None:
    signature, signers = tmp_path / "signature", tmp_path / "signers"
    signature.write_text(sign(MESSAGE, KEYS[kind]))
    signers.write_text(line(kind, options='namespaces="farcall-*",valid-after="20200101Z"') + "\n")
    names = ("-n", "farcall-function", "-I", "ada@lab.org")
    answer = ssh_keygen("-Y", "verify", *names, "-f", str(signers), "-s", str(signature))
    assert "Good" in answer
    [signer] = allowed(signers.read_text()).verify(MESSAGE, signature.read_text())
    assert not signer.problem(now=dt.datetime(2021, 1, 1, tzinfo=dt.UTC).timestamp())


@needs_ssh_keygen
def test_signatures_for_another_purpose_do_not_count(tmp_path: Path) -> None:
    signature = ssh_keygen("-Y", "sign", "-n", "git", "-f", str(write_key(tmp_path, KEY)))
    with pytest.raises(FunctionNotSigned, match="made for 'git'"):
        allowed(line("ssh-ed25519")).verify(MESSAGE, signature)


@each_kind
@pytest.mark.parametrize("message", [statement("g", "0" * 64), statement("f", "1" * 64), b""])
def test_another_name_or_another_body_is_refused(kind: str, message: bytes) -> None:
    with pytest.raises(FunctionNotSigned, match="another body or another name"):
        allowed(line(kind)).verify(message, sign(MESSAGE, KEYS[kind]))


def test_a_name_cannot_be_taken_for_a_hash() -> None:
    """The statement has one reading, whatever a name holds."""
    names = ["f", 'f", "sha256": "' + "0" * 64, "f\n", "é", "\\u00e9"]
    assert len({statement(name, digest * 64) for name in names for digest in "01"}) == 2 * len(names)


def test_the_key_of_another_person_is_refused() -> None:
    with pytest.raises(FunctionNotSigned, match=r"SHA256:.* is not among the allowed signers"):
        allowed(line("ssh-ed25519")).verify(MESSAGE, sign(MESSAGE, OTHER))


def test_a_signature_under_the_name_of_an_allowed_key_is_refused() -> None:
    forged = opened(sign(MESSAGE, OTHER)).replace(public_blob(OTHER), public_blob(KEY))
    with pytest.raises(FunctionNotSigned, match="another body or another name"):
        allowed(line("ssh-ed25519")).verify(MESSAGE, armored(forged))


def test_every_changed_byte_is_noticed() -> None:
    blob, signers = opened(sign(MESSAGE, KEY)), allowed(line("ssh-ed25519"))
    for at in range(len(blob)):
        changed = blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :]
        with pytest.raises(FunctionNotSigned):
            signers.verify(MESSAGE, armored(changed))


@each_kind
def test_every_truncation_is_refused(kind: str) -> None:
    blob, signers = opened(sign(MESSAGE, KEYS[kind])), allowed(line(kind))
    for size in range(0, len(blob), 7):
        with pytest.raises(FunctionNotSigned):
            signers.verify(MESSAGE, armored(blob[:size]))
    with pytest.raises(FunctionNotSigned, match="bytes behind its end"):
        signers.verify(MESSAGE, armored(blob + b"\0"))


@pytest.mark.parametrize(
    "text", ["", "x", "-----BEGIN SSH SIGNATURE-----\nx\n-----END SSH SIGNATURE-----", armored(b"SSHSIG\0\0\0\2")]
)
def test_what_is_no_signature_is_refused(text: str) -> None:
    with pytest.raises(FunctionNotSigned, match="does not count"):
        allowed(line("ssh-ed25519")).verify(MESSAGE, text)


def test_a_signature_with_sha1_is_refused() -> None:
    signature = opened(sign(MESSAGE, KEYS["ssh-rsa"])).replace(b"\0\0\0\x0crsa-sha2-512", b"\0\0\0\x07ssh-rsa")
    with pytest.raises(FunctionNotSigned):
        allowed(line("ssh-rsa")).verify(MESSAGE, armored(signature))


# -- signing by the client ---------------------------------------------------------------------------------------------


@needs_ssh_keygen
def test_a_key_in_an_agent_signs_by_openssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = write_key(tmp_path, KEY)
    public = tmp_path / "key.pub"
    public.write_text(line("ssh-ed25519").split(" ", 1)[1] + " ada\n")
    request = {"function_name": "f", "function_code": "code"}
    ssh_agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(tmp_path / "socket")], stdout=subprocess.DEVNULL)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "socket"))
        wait_until((tmp_path / "socket").exists)
        subprocess.run(["ssh-add", "-q", str(key)], check=True)
        key.unlink()
        message = statement("f", hashlib.sha256(b"code").hexdigest())
        assert signed(request, public) == request | {"signature": sign(message, KEY)}
        subprocess.run(["ssh-add", "-q", "-D"], check=True, stderr=subprocess.DEVNULL)
        with pytest.raises(ConfigurationError, match="ssh-keygen cannot sign"):
            signed(request, public)
    finally:
        ssh_agent.terminate()
        ssh_agent.wait()


# -- allowed_signers ---------------------------------------------------------------------------------------------------


def problems(text: str, *, now: float) -> Sequence[str]:
    return [signer.problem(now=now) for signer in allowed(text).verify(MESSAGE, sign(MESSAGE, KEY))]


DAY = dt.datetime(2030, 6, 15, 12, tzinfo=dt.UTC).timestamp()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("", ""),
        ('valid-after="20300101Z",valid-before="20310101Z"', ""),
        ('valid-after="20300615115959Z"', ""),
        ('valid-after="203006151201Z"', "not valid yet"),
        ('valid-before="20300615Z"', "expired"),
        ('VALID-BEFORE="20300615"', "expired"),
        ('namespaces="git,farcall-function"', ""),
        ('namespaces="farcall-?unction"', ""),
        ('namespaces="git"', "may not sign functions"),
        ('namespaces="*,!farcall-*"', "may not sign functions"),
        ('namespaces="farcall.function"', "may not sign functions"),
    ],
)
def test_options_limit_a_signer(options: str, problem: str) -> None:
    [found] = problems(line("ssh-ed25519", options=options), now=DAY)
    assert problem in found
    assert bool(found) is bool(problem)


def test_a_key_may_have_several_lines() -> None:
    text = "\n".join(
        ["# of the lab", "", line("ssh-ed25519", options='valid-before="20200101Z"'), "  # old", line("ssh-ed25519")]
    )
    assert [bool(problem) for problem in problems(text, now=DAY)] == [True, False]


@pytest.mark.parametrize("principals", ["*", "ada@lab.org,*@group.org", '"ada lovelace"'])
def test_principals_are_names_of_a_signer(principals: str) -> None:
    [signer] = allowed(line("ssh-ed25519", principals=principals) + " a comment").verify(MESSAGE, sign(MESSAGE, KEY))
    assert signer.principals == principals.strip('"')


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (line("ssh-ed25519", options="cert-authority"), "cert-authority is not supported"),
        (line("ssh-ed25519", options='namespaces="x",cert-authority'), "cert-authority is not supported"),
        (line("ssh-ed25519", options="no-touch-required"), "'no-touch-required' is not an option"),
        (line("ssh-ed25519", options="valid-before"), "'valid-before' is not an option"),
        (line("ssh-ed25519", options='valid-before="2030"'), "'2030' is not a time"),
        (line("ssh-ed25519", options='valid-before="20301301"'), "'20301301' is not a time"),
        (line("ssh-ed25519", options='valid-before="20300101Z",valid-before="20400101Z"'), "is there twice"),
        ("ada@lab.org ssh-ed25519", "expected principals"),
        ("ada@lab.org", "expected principals"),
        ("ada@lab.org ssh-ed25519 x", "the key cannot be used"),
        (line("ssh-ed25519").replace("ssh-ed25519", "ssh-rsa", 1), "not of type ssh-rsa"),
    ],
)
def test_a_line_that_is_not_understood_is_refused(text: str, reason: str) -> None:
    """A line that was left out silently could be the one that limits a key."""
    with pytest.raises(ConfigurationError, match=f"signers, line 2: .*{reason}"):
        allowed(f"# signers\n{text}\n")


@pytest.mark.parametrize(
    ("kind", "reason"), [(b"sk-ssh-ed25519@openssh.com", "security tokens"), (b"ssh-dss", "the key cannot be used")]
)
def test_keys_that_are_not_supported_are_refused(kind: bytes, reason: str) -> None:
    blob = len(kind).to_bytes(4, "big") + kind + bytes(40)
    with pytest.raises(ConfigurationError, match=reason):
        allowed(f"ada {kind.decode()} {base64.b64encode(blob).decode()}")


def test_short_rsa_keys_are_refused() -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    with pytest.raises(ConfigurationError, match="2048 bits"):
        allowed(f"ada ssh-rsa {base64.b64encode(public_blob(key)).decode()}")


def test_an_empty_file_allows_no_one() -> None:
    with pytest.raises(FunctionNotSigned):
        allowed("# none\n").verify(MESSAGE, sign(MESSAGE, KEY))
    assert not Signer("ada", b"").problem(now=0.0)
