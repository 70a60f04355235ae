"""Host: the operating system below all processes of an endpoint."""
