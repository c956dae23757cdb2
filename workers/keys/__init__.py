"""Key files of this user on this machine: made once, read by this user alone.

May import `disk` and `broker.keys`. Read `key_file.py`.
"""
