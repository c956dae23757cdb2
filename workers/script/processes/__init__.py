"""Processes of a script's run: forks of the script, made and watched by a launcher.

May import `calls`, and the rooms up to `launch`. Read `process_run.py` first.
"""
