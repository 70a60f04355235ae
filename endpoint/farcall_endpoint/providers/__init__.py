"""Where managers run: a provider starts blocks, and a block has one manager on each of its nodes."""

from farcall_endpoint.providers.local import LocalProvider
from farcall_endpoint.providers.seam import Block, BlockStatus, Phase, Provider

__all__ = ["Block", "BlockStatus", "LocalProvider", "Phase", "Provider"]
