"""Commands of the endpoint, its daemon and its service manager."""
