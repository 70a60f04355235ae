"""Providers: they start blocks, and a block has one manager on each of its nodes."""

from farcall_endpoint.providers.base import Block, BlockStatus, Phase, Provider
from farcall_endpoint.providers.local import LocalProvider

__all__ = ["Block", "BlockStatus", "LocalProvider", "Phase", "Provider"]
