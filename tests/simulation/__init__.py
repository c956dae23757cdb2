"""A whole run in one process: the product's own workers and broker on a virtual clock.

real        the worker's loop, machine, commands, control thread, session, progress, checkpoint hooks; a script's driver
            and its log of calls; what decides in queues, their logs, messages; the coordinator and its parts
simulated   time (clock), connections (network, queues), the snapshots' disk (disk), computing (chain), processes, their
            threads and their deaths (process)
"""
