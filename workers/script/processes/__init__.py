"""A script's run: broker and workers are forks of the script, made and watched by a launcher; or workers join remotely.

May import `calls`, and the rooms up to `launch`. Read `process_run.py` first.
"""
