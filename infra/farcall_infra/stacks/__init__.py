"""CloudFormation stacks: they connect constructs and own no resources themselves."""

__all__: list[str] = []
