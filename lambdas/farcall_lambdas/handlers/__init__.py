"""The Lambda handlers. Each reads its settings once, on the first call, and keeps its connections."""
