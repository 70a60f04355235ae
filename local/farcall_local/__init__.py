"""Local tier: the whole cloud tier as processes on one machine."""
