"""Conversion of a message to frames, and of frames to a message. docs/reference/messages.md is its specification.

May import `broker.errors` and `pipeline`. Read `message.py` first.
"""
