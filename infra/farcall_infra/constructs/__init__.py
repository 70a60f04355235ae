"""CDK constructs. Each owns its resources, their environment variables and their grants."""

__all__: list[str] = []
