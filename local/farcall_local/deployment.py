"""A cloud tier as its users see it, whichever tier it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Deployment"]


@dataclasses.dataclass(frozen=True)
class Deployment:
    """The address of the API, a bearer token for each user by name, and a directory that has the logs."""

    api_url: str
    tokens: Mapping[str, str]
    directory: Path

    def environment(self, user: str) -> dict[str, str]:
        """What the programs of a user need in their environment."""
        return {"FARCALL_API_URL": self.api_url, "FARCALL_TOKEN": self.tokens[user]}
