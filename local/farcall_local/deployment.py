"""Access data of a deployed cloud tier, local or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Deployment:
    """The URL of the API, a bearer token for each user by name, and the directory of the logs."""

    api_url: str
    tokens: Mapping[str, str]
    directory: Path

    def environment(self, user: str) -> dict[str, str]:
        """The environment variables for the programs of a user."""
        return {"FARCALL_API_URL": self.api_url, "FARCALL_TOKEN": self.tokens[user]}
