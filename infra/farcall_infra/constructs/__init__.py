"""Constructs: each owns its resources, its environment variables and the grants that go with them."""

__all__: list[str] = []
