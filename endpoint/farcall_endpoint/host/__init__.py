"""Host: the operating system below all processes of an endpoint. It knows no process, task or message of them."""
