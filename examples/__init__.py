"""Case studies: ordinary programs that run real work on an endpoint. Each is a script as well as a module."""
