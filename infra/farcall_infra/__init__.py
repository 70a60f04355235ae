"""AWS CDK app of the Farcall cloud tier: the stacks, and the profiles they are built for.

Importing ``aws_cdk`` starts a Node process at once, so the Node program must be chosen before any module of this
package is imported. That is why this file runs one line of code.
"""

from farcall_infra import jsii_node

__all__: list[str] = []

jsii_node.choose()
