"""Control messages, their channels, and the records that the broker keeps.

May import `codec` and `keys`. Read `messages.py` first, then `channel.py`, `store.py`.
"""
