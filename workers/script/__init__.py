"""stageline from a script: `Line` drives stages step by step, `train` runs a plan.

May import every room but `cli`. Read `line.py` first, then the walk of a call in ARCHITECTURE.md:

    calls         the script's calls, numbered, the workers' replies, and what people see of a run
    processes     runs whose processes are forks of the script, or whose workers are on other machines
"""
