"""``farcall cloud``: check, price, deploy, monitor and destroy the cloud tier in an AWS account."""

__all__: list[str] = []
