"""A whole run in one process: the real decisions on a virtual clock, over a simulated network, disk and computation.

real        schedules, machine, queue ends and logs, messages, reporter, progress, the broker's core and its parts
simulated   time (clock), connections (network), snapshots' disk (disk), stages (chain), processes and their deaths
"""
