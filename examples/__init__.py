"""Case studies: programs that run real work on an endpoint; each is both a script and a module."""
