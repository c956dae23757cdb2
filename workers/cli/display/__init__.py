"""What commands draw on a terminal: progress, tables, the summary of a run.

May import nothing but its own files and `broker.control`. Read the file you need.
"""
