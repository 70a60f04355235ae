"""Diagnosis: data for a bug report, without secrets."""

from farcall_endpoint.diagnose.report import Finding, Report, gather
from farcall_endpoint.diagnose.scrub import Scrubber

__all__ = ["Finding", "Report", "Scrubber", "gather"]
