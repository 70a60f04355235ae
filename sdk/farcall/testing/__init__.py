"""A cloud in memory, for the tests of programs that use Farcall."""

from farcall.testing._cloud import FakeCloud

__all__ = ["FakeCloud"]
