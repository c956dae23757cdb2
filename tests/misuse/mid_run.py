"""Faults of a worker in the middle of a run."""

from misuse.case import Change, Misuse, train_with
from misuse.code import in_batch, in_forward


def step_3(
    what: str,
    lines: str,
    *said: str,
    code: int = 1,
    once: bool = False,
    sets: tuple[str, ...] = (),
    changes: tuple[Change, ...] = (),
    slow: bool = True,
) -> Misuse:
    """`lines` run where a worker asks for the batch of step 3: each time, or only `once` in the run, and then the run
    goes on."""
    head = "if step == 3 and once():\n" if once else "if step == 3:\n"
    body = head + "".join(f"    {line}\n" for line in lines.splitlines())
    finishes, bits = not code, not code and "x" not in lines.split()
    return Misuse(
        what, code, said, (*in_batch(body), *changes), train_with(sets), slow=slow, finishes=finishes, bits=bits
    )


AGAIN, NOT_AGAIN = "restarts        1", "restarts        0"
FORKS = "if not os.fork():\n    time.sleep(10**6)"
THREAD = "threading.Thread(target=time.sleep, args=(10**6,)).start()"
DIFFERS = """
if step >= 3:
    x = x * (1 + random.random())
if step == 5 and once():  # worker 0, which has the gradients of step 4: what it sent has arrived
    os.kill(os.getpid(), signal.SIGKILL)
"""
LIMITS = "import resource\nresource.setrlimit(resource.RLIMIT_{}, (3, 3))"
LONG = ("run.steps=1000000", "recovery.snapshot_every=2")
TRIED = "could not write its snapshot of step "
NAN = "x = x * float('nan')"
RAISES = in_forward("if x.isnan().any():\n    raise ValueError('cannot')")
UNREADABLE = in_forward("""
class Odd(RuntimeError):
    def __getattribute__(self, name):
        raise SystemExit(name)
    __str__ = __getattribute__
if x.isnan().any():
    raise Odd
""")
ONE = ("recovery.restarts=1",)
QUICK = ("recovery.lease=1.5", "recovery.action=1.5")
SKIP = ("recovery.on_bad_microbatch=skip",)
REPLACED = "It was replaced 1 times since checkpoint 0 (recovery.restarts is 1)"
BATCH_3 = "worker 0 (stage 0) failed: the data source's batch(3)"
ROWS = (
    step_3("SIGKILL, once", "os.kill(os.getpid(), signal.SIGKILL)", AGAIN, code=0, once=True),
    step_3(
        "SIGKILL, each time",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "was killed by SIGKILL",
        REPLACED,
        sets=ONE,
    ),
    step_3("SIGTERM, once", "os.kill(os.getpid(), signal.SIGTERM)", AGAIN, code=0, once=True),
    step_3("`os._exit(0)`, once", "os._exit(0)", AGAIN, code=0, once=True, slow=False),
    step_3("`os._exit(0)`, each time", "os._exit(0)", "(status 0), in batch (/", "/data.py, line ", REPLACED, sets=ONE),
    step_3("`os._exit(78)`, each time", "os._exit(78)", "(status 78), in batch (", "data.py, line", REPLACED, sets=ONE),
    step_3("a segmentation fault, each time", "ctypes.string_at(0)", "was killed by SIGSEGV", REPLACED, sets=ONE),
    step_3("every file closed, each time", "os.closerange(0, 1024)", "was killed by SIGABRT", REPLACED, sets=ONE),
    step_3("a sleep without end, once", "time.sleep(10**6)", AGAIN, code=0, once=True, sets=QUICK),
    step_3("a hang in C, once", "ctypes.PyDLL(None).sleep(10**6)", AGAIN, code=0, once=True, sets=QUICK),
    step_3(
        "SIGSTOP for ever, once",
        "os.kill(os.getpid(), signal.SIGSTOP)",
        AGAIN,
        code=0,
        once=True,
        sets=QUICK,
    ),
    step_3(
        "a sleep without end, each time",
        "time.sleep(10**6)",
        "is alive, but completed no action for 1.5 s",
        "raise recovery.action",
        REPLACED,
        sets=(*ONE, *QUICK),
    ),
    step_3("a child that stays, once", FORKS, NOT_AGAIN, code=0, once=True),
    step_3("a fork that returns, once", "os.fork()", NOT_AGAIN, code=0, once=True),
    step_3("a thread that stays, once", THREAD, NOT_AGAIN, code=0, once=True),
    step_3("no memory, once", "torch.empty(2**50)", AGAIN, code=0, once=True, slow=False),
    step_3("no memory, each time", "torch.empty(2**50)", "can't allocate memory", REPLACED, sets=ONE),
    step_3("a full disk", LIMITS.format("FSIZE"), "failed: stage ", TRIED, "File too large", sets=LONG),
    Misuse(
        "data that differs in each process, and SIGKILL",
        1,
        ("came twice with different bits: what computed it was not deterministic",),
        in_batch(DIFFERS),
        slow=True,
    ),
    step_3(
        "data that raises",
        "raise OSError('no such disk')",
        BATCH_3,
        "OSError: no such disk (/",
        "/data.py, line ",
        code=78,
    ),
    step_3("data that ends early", "raise StopIteration", BATCH_3, "StopIteration (/", "/data.py, line ", code=78),
    step_3("a batch with other rows", "x = torch.cat([x, x])", BATCH_3, "no common number of rows", code=78),
    step_3("`sys.exit(0)`", "sys.exit(0)", BATCH_3, "SystemExit: 0 (/", "/data.py, line ", code=78, slow=False),
    step_3(
        "KeyboardInterrupt",
        "raise KeyboardInterrupt",
        BATCH_3,
        "KeyboardInterrupt (/",
        "/data.py, line ",
        code=78,
        slow=False,
    ),
    step_3(
        "a loss that is not a number",
        NAN,
        "worker 1 (stage 1) failed: the loss of microbatch 0 of step 3 is nan",
        "stageline replay",
        "--step 3 --microbatch 0",
        slow=False,
    ),
    step_3(
        "the same, skipped", NAN, "finished", "3 microbatches were left out: ", "skipped says why", code=0, sets=SKIP
    ),
    step_3(
        "a forward that raises",
        NAN,
        "stage 0 failed in 0F0 of step 3, layer 1: ValueError: cannot",
        "stageline replay",
        changes=RAISES,
    ),
    step_3(
        "a forward that raises what cannot be read",
        NAN,
        "stage 0 failed in 0F0 of step 3, layer 1: Odd: (its text cannot be made: SystemExit)",
        changes=UNREADABLE,
    ),
    step_3("the same, and skipped", NAN, "3 microbatches were left out: ", code=0, sets=SKIP, changes=RAISES),
    step_3("another current folder", "os.chdir('/')", "finished", code=0),
)
