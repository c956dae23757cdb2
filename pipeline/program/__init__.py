"""The program of every worker of a run, as data: operations, the queues that they touch, and a digest over both.

A schedule is compiled by passes, each of which holds all that one feature adds to a program:

    base.py         forwards, backwards and updates, with the queues between stages
    ties.py         gradients of parameters that stages share
    clipping.py     norms, and clips by them
    sums.py         sums of gradients between replicas of a stage
    evaluation.py   evaluated batches, and the verdict after each round of them
    replays.py      steps that replay what leaves the frozen first stages
    script.py       a script's calls, losses and replies
    copies.py       copies of snapshots on the disk of another worker

`additions.py` checks what a feature of the user's has added. `verdict.py` proves that a schedule's program is complete,
in order and free of deadlock, and computes its times and its peaks in memory (`complete.py`, `timing.py`).

May import `pipeline/schedule`. Read `operations.py`, `program.py` and `base.py` first.
"""

from .additions import adding_pass, fault_of_additions
from .base import compile_program
from .clipping import NormClipping
from .complete import Disordered, Incomplete, UnsoundSchedule
from .copies import CHUNKS, Neighbours, SnapshotCopies, neighbours_of
from .evaluation import Evaluation
from .operations import Instruction, Op, Per, Queue, QueueName
from .program import OpLists, Pass, Program, StepLists
from .replays import CacheUse, Replays
from .script import ScriptCalls
from .sums import SumExchange
from .ties import Tied, TiedStages, Ties
from .timing import Costs, Deadlock, Timed
from .verdict import Verdict, check_schedule

__all__ = [
    "CHUNKS",
    "CacheUse",
    "Costs",
    "Deadlock",
    "Disordered",
    "Evaluation",
    "Incomplete",
    "Instruction",
    "Neighbours",
    "NormClipping",
    "Op",
    "OpLists",
    "Pass",
    "Per",
    "Program",
    "Queue",
    "QueueName",
    "Replays",
    "ScriptCalls",
    "SnapshotCopies",
    "StepLists",
    "SumExchange",
    "Tied",
    "TiedStages",
    "Ties",
    "Timed",
    "UnsoundSchedule",
    "Verdict",
    "adding_pass",
    "check_schedule",
    "compile_program",
    "fault_of_additions",
    "neighbours_of",
]
