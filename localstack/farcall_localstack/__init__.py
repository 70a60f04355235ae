"""The synthesised CDK app on LocalStack in host mode, with real engines behind it."""
