"""The control messages that workers, the broker and the commands exchange, and the promise of their channels.

May import `codec`. Read `messages.py` first, then `channel.py`.
"""
