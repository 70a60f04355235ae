"""Gathers what a bug report needs, and no secret."""

from farcall_endpoint.diagnose.report import Finding, Report, gather
from farcall_endpoint.diagnose.scrub import Scrubber

__all__ = ["Finding", "Report", "Scrubber", "gather"]
