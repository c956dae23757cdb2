"""What a trial tells the process that has started it: what the plan comes to, checksums of what was drawn and computed,
or why the plan cannot work.

May import `pipeline` and `broker/control`, but nothing that needs torch. Read `trial_result.py` first.
"""
