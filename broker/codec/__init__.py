"""A message becomes frames, and frames become a message again. docs/reference/messages.md is its specification.

May import `broker.errors` and `pipeline`. Read `message.py` first.
"""
