"""What workers, the broker and the commands say to each other, and the channels that carry it.

May import `codec` and `network`. Read `protocol.py` first.
"""
