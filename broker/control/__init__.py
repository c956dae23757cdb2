"""The control messages that workers, the broker and the commands exchange, their channels, and what the broker keeps.

May import `codec` and `keys`. Read `messages.py` first, then `channel.py`, `store.py`.
"""
