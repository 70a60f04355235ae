"""What a tier keeps in its directory: its secrets, made once, and its state, rewritten at every change."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Phase", "ProcessState", "TierSecrets", "TierState", "write_private"]

#: starting → ready → stopping → stopped, or failed.
Phase = str


@dataclasses.dataclass(frozen=True)
class TierSecrets:
    """The secrets of one tier. ``tokens`` maps the name of each identity to its bearer token, first the user's own."""

    tokens: Mapping[str, str]
    ticket_key: str
    database_password: str
    queue_password: str
    blob_access_key: str
    blob_secret_key: str

    @classmethod
    def load_or_make(cls, directory: Path, *, users: Sequence[str]) -> TierSecrets:
        """The secrets of the tier at ``directory``; made on first use, with a token for each identity."""
        path = directory / "secrets.json"
        if path.exists():
            return cls(**json.loads(path.read_text()))
        made = cls(
            tokens={name: secrets.token_urlsafe(32) for name in users},
            ticket_key=secrets.token_urlsafe(48),
            database_password=secrets.token_urlsafe(24),
            queue_password=secrets.token_urlsafe(24),
            blob_access_key=f"FARCALL{secrets.token_hex(8).upper()}",
            blob_secret_key=secrets.token_urlsafe(30),
        )
        write_private(path, dataclasses.asdict(made))
        return made

    def dev_tokens(self) -> str:
        """FARCALL_DEV_TOKENS: who each token stands for. An identity keeps its id across restarts."""
        return json.dumps(
            {
                token: {"identity_id": str(uuid.uuid5(uuid.NAMESPACE_OID, token)), "username": name}
                for name, token in self.tokens.items()
            }
        )


@dataclasses.dataclass(frozen=True)
class ProcessState:
    """One supervised process: ``pid`` is None while it is down; ``restarts`` counts since the tier came up."""

    pid: int | None = None
    restarts: int = 0
    last_status: int | None = None


@dataclasses.dataclass(frozen=True)
class TierState:
    """What others may know of a running tier; in ``state.json``, readable by its owner alone."""

    phase: Phase
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
        write_private(directory / "state.json", dataclasses.asdict(self))

    @classmethod
    def read(cls, directory: Path) -> TierState | None:
        """The last state written, or None when no tier was ever up here. It may be of a supervisor that died."""
        try:
            data: dict[str, Any] = json.loads((directory / "state.json").read_text())
        except FileNotFoundError:
            return None
        processes = {name: ProcessState(**values) for name, values in data.pop("processes").items()}
        return cls(**data, processes=processes)


def write_private(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file in one step; only its owner may read it."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as scratch:
        json.dump(value, scratch, indent=2)
    os.replace(scratch.name, path)  # noqa: PTH105 - a name, not a path
