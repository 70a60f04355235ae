"""AWS CDK app of the Farcall cloud tier."""
