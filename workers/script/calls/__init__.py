"""A script's calls, numbered and put into the workers' queues, the replies, and what people see of the run.

May import the rooms up to `launch`. Read `driver.py` first; then `news.py`, `page.py`.
"""
