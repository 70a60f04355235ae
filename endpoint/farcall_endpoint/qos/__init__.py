"""Quality of service: how long functions take at an endpoint. Nothing here does I/O."""
