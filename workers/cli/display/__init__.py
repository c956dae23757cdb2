"""What commands draw on a terminal: progress, tables, the summary of a run.

May import `launch`, `runs` and `broker.control`. Read the file you need.
"""
