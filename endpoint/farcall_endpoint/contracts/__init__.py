"""Contracts between processes of an endpoint: messages, outcomes, and the rules that both sides apply. No I/O."""
