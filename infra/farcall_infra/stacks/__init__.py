"""Stacks: they wire constructs together and own nothing themselves."""

__all__: list[str] = []
