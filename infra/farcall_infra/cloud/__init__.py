"""``farcall cloud``: look before a deployment, price it, make it, watch it, take it down."""

__all__: list[str] = []
