"""Contracts between processes of an endpoint: messages, outcomes and settings that both sides know."""
