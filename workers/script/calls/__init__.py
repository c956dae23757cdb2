"""What a script wants done, numbered and put into the workers' queues, and what they reply.

May import the rooms up to `launch`. Read `driver.py` first.
"""
