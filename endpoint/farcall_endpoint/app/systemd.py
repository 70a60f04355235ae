"""Start at boot: a unit of the user's systemd. Needs no root, and contains no secret."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from farcall_common.errors import (
    ConfigurationError,
    EndpointInUse,
    EndpointUnknown,
    SessionRefused,
    SpoolOutdated,
    Unauthenticated,
)
from farcall_common.exit_codes import exit_code_of

_TIMEOUT_S: Final = 20
_KEPT: Final = (
    "PATH", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "all_proxy", "https_proxy", "http_proxy", "no_proxy",
)  # fmt: skip
"""Variables of a login that systemd does not pass on, and that an agent needs to find commands and the API."""
_FINAL: Final = (ConfigurationError, EndpointInUse, Unauthenticated, SessionRefused, SpoolOutdated, EndpointUnknown)
"""Errors that a restart cannot fix."""

_UNIT: Final = """\
# Written by `farcall-endpoint enable-on-boot {name}`; `farcall-endpoint disable-on-boot {name}` removes it.
[Unit]
Description=Farcall endpoint {name}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
ExecStart={command}
WorkingDirectory={working_dir}
{environment}
Delegate=yes
KillMode=mixed
TimeoutStopSec={stop_s:.0f}
Restart=on-failure
RestartSec=30
RestartPreventExitStatus={no_restart}

[Install]
WantedBy=default.target
"""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """``done``: systemd was updated; ``to_do``: commands for the user to run."""

    unit: Path
    done: bool
    to_do: tuple[str, ...]
    reason: str = ""


def unit_file(environ: Mapping[str, str], name: str) -> Path | None:
    """The path of an endpoint's unit; None for a user without a home directory."""
    try:
        config = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME") or "~").expanduser() / ".config")
    except RuntimeError:
        return None
    return Path(config) / "systemd" / "user" / f"farcall-endpoint-{name}.service"


def unit_text(
    name: str, *, command: Sequence[str], working_dir: Path, environ: Mapping[str, str], stop_s: float
) -> str:
    """The unit. ``stop_s`` is the timeout of an orderly shutdown in seconds. A proxy with a password is left out."""
    kept = {key: environ[key] for key in _KEPT if environ.get(key) and "@" not in environ[key]}
    return _UNIT.format(
        name=name,
        command=" ".join(_quoted(word, dollars=True) for word in command),
        working_dir=str(working_dir).replace("%", "%%"),
        environment="\n".join(f"Environment={_quoted(f'{key}={value}')}" for key, value in kept.items()),
        stop_s=stop_s,
        no_restart=" ".join(map(str, dict.fromkeys(map(exit_code_of, _FINAL)))),
    )


def enable_on_boot(unit: Path | None, text: str, *, environ: Mapping[str, str]) -> Outcome:
    """Write the unit, and enable it if systemd is available.

    :raises ConfigurationError: if the unit cannot be written.
    """
    if unit is None:
        raise ConfigurationError("The home directory is not known, and units of systemd are in it.", hint="Set HOME.")
    try:
        unit.parent.mkdir(parents=True, exist_ok=True)
        unit.write_text(text)
        unit.chmod(0o600)
    except OSError as error:
        raise ConfigurationError(f"{unit} cannot be written: {error.strerror}.") from error
    commands = (("systemctl", "--user", "daemon-reload"), ("systemctl", "--user", "enable", unit.name))
    reason = _first_failure(commands, environ)
    linger = ("loginctl", "enable-linger")
    to_do = tuple(" ".join(command) for command in ((linger,) if reason is None else (*commands, linger)))
    return Outcome(unit, reason is None, to_do, reason or "")


def disable_on_boot(unit: Path | None, *, environ: Mapping[str, str]) -> Outcome | None:
    """Remove the unit; None if there was none. A running endpoint continues.

    :raises ConfigurationError: if the unit cannot be removed.
    """
    if unit is None or not unit.exists():
        return None
    disable, reload = ("systemctl", "--user", "disable", unit.name), ("systemctl", "--user", "daemon-reload")
    reason = _first_failure((disable,), environ)
    try:
        (unit.parent / "default.target.wants" / unit.name).unlink(missing_ok=True)  # what `disable` would have removed
        unit.unlink()
    except OSError as error:
        raise ConfigurationError(f"{unit} cannot be removed: {error.strerror}.") from error
    reason = reason or _first_failure((reload,), environ)
    return Outcome(unit, reason is None, () if reason is None else (" ".join(reload),), reason or "")


def _first_failure(commands: Sequence[Sequence[str]], environ: Mapping[str, str]) -> str | None:
    """Run commands up to the first failure; its reason, or None."""
    if shutil.which("systemctl", path=environ.get("PATH")) is None:
        return "there is no systemctl on this machine"
    for command in commands:
        try:
            ended = subprocess.run(
                command, env=dict(environ), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if ended.returncode != 0:
            return (ended.stderr.strip() or f"exit code {ended.returncode}").splitlines()[-1]
    return None


def _quoted(word: str, *, dollars: bool = False) -> str:
    """A word as units quote it (systemd.syntax(7)); ``$`` has a meaning only in command lines."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("\n", "\\n")
    return f'"{text.replace("$", "$$") if dollars else text}"'
