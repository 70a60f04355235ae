"""Where managers run: a provider starts a block, which is one manager per node. Batch systems come as further ones."""

from farcall_endpoint.providers.local import Block, LocalProvider, Provider

__all__ = ["Block", "LocalProvider", "Provider"]
