"""The control messages that workers, the broker and the commands exchange, and the channels that carry them.

May import `codec` and `network`. Read `messages.py` first, then `channel.py`.
"""
