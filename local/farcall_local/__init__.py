"""The whole cloud tier as processes on one machine."""
