"""Secrets and state of a tier, as files in its directory. Secrets are created once; state is written at every
change."""

from __future__ import annotations

import dataclasses
import json
import secrets
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farcall_common.files import write_private


@dataclasses.dataclass(frozen=True)
class TierSecrets:
    """The secrets of one tier. ``tokens`` maps identity names to bearer tokens; the user's own is first."""

    tokens: Mapping[str, str]
    ticket_key: str
    database_password: str
    queue_password: str
    blob_key: str

    @classmethod
    def load_or_create(cls, directory: Path, *, users: Sequence[str]) -> TierSecrets:
        """The secrets of the tier at ``directory``; created on first use, with a token for each identity."""
        path = directory / "secrets.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        result = cls(
            tokens={name: secrets.token_urlsafe(32) for name in users},
            ticket_key=secrets.token_urlsafe(48),
            database_password=secrets.token_urlsafe(24),
            queue_password=secrets.token_urlsafe(24),
            blob_key=secrets.token_urlsafe(30),
        )
        known = {name: value for name, value in kept.items() if name in dataclasses.asdict(result)}
        result = dataclasses.replace(result, **known)  # a tier of an earlier release lacks the newer ones
        if dataclasses.asdict(result) != kept:
            write_private(path, _to_json(result))
        return result

    def dev_tokens(self) -> str:
        """FARCALL_DEV_TOKENS: the identity of each token. An identity keeps its id across restarts."""
        return json.dumps(
            {
                token: {"identity_id": str(uuid.uuid5(uuid.NAMESPACE_OID, token)), "username": name}
                for name, token in self.tokens.items()
            }
        )


@dataclasses.dataclass(frozen=True)
class ProcessState:
    """One supervised process. ``pid`` is None while it is down; ``restarts`` counts since the start of the tier."""

    pid: int | None = None
    restarts: int = 0
    last_status: int | None = None


@dataclasses.dataclass(frozen=True)
class TierState:
    """The state of a tier, in ``state.json``, which only its owner can read."""

    phase: str  # starting → ready → stopping → stopped, or failed
    supervisor_pid: int
    api_url: str = ""
    token: str = ""
    tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    database_url: str = ""
    queue_url: str = ""
    blobs_url: str = ""
    processes: Mapping[str, ProcessState] = dataclasses.field(default_factory=dict)
    started_in_s: float | None = None
    error: str | None = None

    def write(self, directory: Path) -> None:
        """Replace ``state.json``.

        :raises OSError: if that fails; the old file then remains.
        """
        write_private(directory / "state.json", _to_json(self))

    @classmethod
    def read(cls, directory: Path) -> TierState | None:
        """The last written state, None if there never was a tier. Its supervisor may have died since."""
        try:
            data: dict[str, Any] = json.loads((directory / "state.json").read_text())
        except FileNotFoundError:
            return None
        processes = {name: ProcessState(**values) for name, values in data.pop("processes").items()}
        return cls(**data, processes=processes)


def _to_json(value: TierSecrets | TierState) -> bytes:
    return json.dumps(dataclasses.asdict(value), indent=2).encode()
