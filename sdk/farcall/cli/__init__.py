"""The ``farcall`` command line. Other packages add commands through the entry point group ``farcall.cli``."""

from farcall.cli._app import main

__all__ = ["main"]
