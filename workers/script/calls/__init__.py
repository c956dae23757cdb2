"""A script's calls, put into the workers' queues, the replies, and the display of the run.

May import the rooms up to `launch`. Read `driver.py` first; then `news.py`, `page.py`.
"""
