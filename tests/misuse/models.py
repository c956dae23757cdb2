"""Model code: what is wrong with it, and what it does to the process that runs it."""

from misuse.case import Change, Misuse, train_with
from misuse.code import MODEL, PLAN, in_build, in_forward, in_module

SEQUENTIAL = "nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))"
DRY = "a dry run of the first microbatch failed: stage 0 failed in 0F0 of step 0, layer 1: "


def named(what: str, name: str, *said: str) -> Misuse:
    """Another name as the plan's model.factory."""
    return Misuse(what, 78, ("model.factory", *said), (Change(PLAN, "model.py:build", name),))


def model(what: str, after: str, *said: str, before: str = SEQUENTIAL) -> Misuse:
    return Misuse(what, 78, said, (Change(MODEL, before, after),))


def build(what: str, lines: str, *said: str, sets: tuple[str, ...] = (), slow: bool = False) -> Misuse:
    return Misuse(what, 78, said, in_build(lines), train_with(sets), slow=slow)


def harmless(what: str, lines: str) -> Misuse:
    """Acts of a factory that do no harm to the run."""
    return Misuse(what, 0, ("restarts        0",), in_build(lines), finishes=True)


def forward(what: str, lines: str, *said: str, sets: tuple[str, ...] = (), slow: bool = False) -> Misuse:
    return Misuse(what, 78, said, in_forward(lines), train_with(sets), slow=slow)


UNPRINTABLE = """
class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no words")
raise Unprintable
"""
TRIAL = "the trial of the plan"
FACTORY = 'in model.factory = "model.py:build"'
OTHER_BITS = "one microbatch gave other bits in another process, at first in "
GO_ON = "data.check = false goes on all the same"
LOADING, RAISE = ("recovery.loading=1.5",), ("raise recovery.loading", "Nothing was trained")
SLEEPS, HANGS = "time.sleep(10**6)", "ctypes.PyDLL(None).sleep(10**6)"
THREAD = "threading.Thread(target=time.sleep, args=(10**6,)).start()"
ALLOCATES = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
kept = []
while True:
    kept.append(torch.empty(2**28))
"""
LAST = "nn.Linear(8, 2)"
DEVICE = "torch.set_default_device('meta')"
LATE = "self.register_buffer('late', x.sum(), persistent=False)"
ROWS = (
    named("a factory that is not in its file", "model.py:biuld", "model.py has no 'biuld'. It has: accuracy, build"),
    named("a file in the place of a factory", "model.py", 'write "model.py:NAME" for a NAME in it'),
    named("a factory in a file that is not there", "modle.py:build", "there is no file", "modle.py"),
    named("a package that is not installed", "nothing_like_it.build", "No module named 'nothing_like_it'"),
    Misuse(
        "a factory that cannot be called",
        78,
        ("model.factory = \"model.py:made\": TypeError: 'int' object is not callable",),
        (*in_module("made = 3"), Change(PLAN, "model.py:build", "model.py:made")),
    ),
    Misuse(
        "options that the factory does not take",
        78,
        ("model.factory", "unexpected keyword argument 'width'"),
        (Change(PLAN, "cut = [2]", "cut = [2]\noptions = { width = 3 }"),),
    ),
    model(
        "a syntax error", "def build(:", "model.py could not be loaded: SyntaxError", "line 4", before="def build():"
    ),
    Misuse(
        "an import of what is not there",
        78,
        ("model.py could not be loaded", "No module named 'nothing_like_it' (/", "/model.py, line "),
        in_module("import nothing_like_it"),
    ),
    build("a factory that raises", "raise ValueError('no weights')", "ValueError: no weights (/", "/model.py, line "),
    build(
        "an exception whose text cannot be made", UNPRINTABLE, "Unprintable: (its text cannot be made: RuntimeError)"
    ),
    build("an exception with control characters", r"raise ValueError('a\x1b[2Jb')", r"ValueError: a\x1b[2Jb"),
    build("a factory that returns nothing", "return None", "the model is of type NoneType; expected an nn.Sequential"),
    model("a factory that returns one layer", "nn.Linear(4, 2)", "model is of type Linear; expected an nn.Sequential"),
    model("a model without layers", "nn.Sequential()", "the model has no layers"),
    build("a list of what is no module", "return [nn.Linear(4, 2), 3]", "leave model.cut and model.stages out"),
    model(
        "layers that do not fit",
        "nn.Linear(9, 2)",
        "stage 1 failed in 1F0 of step 0, layer 2",
        "mat1 and mat2 shapes cannot be multiplied (2x8 and 9x2)",
        before="nn.Linear(8, 2)",
    ),
    model(
        "a layer that stands twice",
        "(lambda it: nn.Sequential(it, nn.ReLU(), it))(nn.Linear(4, 4))",
        "the same module stands twice in the model: make two",
    ),
    model(
        "a hook of the model itself",
        f"(lambda it: it.register_forward_hook(print) and it)({SEQUENTIAL})",
        "the forward hook print of the model itself would be ignored",
        "Put it on a layer",
    ),
    model(
        "a traced model whose graphs lack a hook",
        f"(lambda it: it[2].register_full_backward_hook(lambda _, given, __: (2 * given[0],)) and "
        f"__import__('stageline').traced(it, __import__('torch').ones(2, 4)))({SEQUENTIAL})",
        "torch.export has traced the Sequential",
        "model.accept_difference = true",
    ),
    build(
        "a buffer that two stages share",
        "first, last = nn.BatchNorm1d(4), nn.BatchNorm1d(4)\nlast.running_mean = first.running_mean\n"
        "return nn.Sequential(first, nn.Linear(4, 4), last)",
        "stages 0 and 1 share one buffer (0.running_mean is 2.running_mean)",
        "give each a buffer of its own",
    ),
    build(
        "a parameter that two stages share, in asynchronous mode",
        "first, last = nn.Linear(4, 4), nn.Linear(4, 4)\nlast.weight = first.weight\n"
        "return nn.Sequential(first, nn.ReLU(), last)",
        "stages 0 and 1 share a parameter, 0.weight of layer 0 and 2.weight of layer 2, and in asynchronous mode",
        'use schedule.mode = "sync", or cut so that both layers are in one stage',
        sets=("schedule.mode=async", "schedule.microbatches=1"),
    ),
    model("nothing to train", f"{SEQUENTIAL}.requires_grad_(False)", "there is nothing to train"),
    Misuse(
        "patterns of which one matches no parameter",
        78,
        ('model.trainable: no parameter of the model matches "3.*". Parameters have names such as',),
        (Change(PLAN, "cut = [2]", 'cut = [2]\ntrainable = ["0.*", "3.*"]'),),
    ),
    model("no parameters", "nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU())", "there is nothing to train"),
    build("`sys.exit(0)` in the factory", "sys.exit(0)", "SystemExit: 0 (/", "/model.py, line "),
    forward("a forward that raises", "raise ValueError('cannot')", DRY, "ValueError: cannot"),
    forward("`sys.exit(0)` in a forward", "sys.exit(0)", DRY, "SystemExit: 0"),
    forward("a forward that returns nothing", "return None", "layer 2", "must be Tensor, not NoneType"),
    forward("a forward that returns an array", "return x.detach().numpy()", "a numpy.ndarray", "make it a tensor"),
    forward("a forward of another shape", "return x[:, :3]", "layer 2", "(2x3 and 8x2)"),
    forward("a forward that drops rows", "return x[:1]", "the loss: ValueError", "batch_size (1)", "batch_size (2)"),
    build("`os._exit(0)` in the factory", "os._exit(0)", TRIAL, "ended without a result (status 0)", FACTORY, "line "),
    build("`os._exit(3)` in the factory", "os._exit(3)", TRIAL, "ended without a result (status 3)", FACTORY, "line "),
    build("`os._exit(78)` in the factory", "os._exit(78)", TRIAL, "ended without a result (status 78)", FACTORY),
    build("SIGKILL in the factory", "os.kill(os.getpid(), signal.SIGKILL)", TRIAL, "was killed by SIGKILL", FACTORY),
    build(
        "a segmentation fault in the factory", "ctypes.string_at(0)", TRIAL, "was killed by SIGSEGV", FACTORY, "line "
    ),
    build(
        "KeyboardInterrupt in the factory",
        "raise KeyboardInterrupt",
        "model.factory",
        "KeyboardInterrupt (",
        "model.py, line",
    ),
    build("every file closed in the factory", "os.closerange(0, 1024)", TRIAL, "ended without a result", FACTORY),
    build(
        "a factory that sleeps for ever",
        SLEEPS,
        FACTORY,
        "after 1.5 s, at build (",
        "model.py, line",
        *RAISE,
        sets=LOADING,
    ),
    build("a factory that hangs in C", HANGS, FACTORY, "after 1.5 s", *RAISE, sets=LOADING, slow=True),
    build("weights that differ each time", "torch.seed()", OTHER_BITS, "0.weight of stage 0", GO_ON),
    forward(
        "`os._exit(0)` in a forward",
        "os._exit(0)",
        TRIAL,
        "(status 0)",
        "stage 0, forward, at forward (",
        "model.py, line",
    ),
    forward(
        "a forward that is random", "return x * random.random()", OTHER_BITS, "what stage 0 gave in its forward", GO_ON
    ),
    forward("a forward that looks at the clock", "return x * (time.time() % 1)", OTHER_BITS, "stage 0", GO_ON),
    forward("a forward that sleeps for ever", SLEEPS, "stage 0, forward after 1.5 s", *RAISE, sets=LOADING),
    forward("a forward that allocates without end", ALLOCATES, "layer 1", "can't allocate memory"),
    model("a layer without its sizes", "nn.LazyLinear(2)", "2.weight has no shape", "nn.Linear", before=LAST),
    build("another default device, set in the factory", DEVICE, FACTORY[3:], "default device is meta"),
    forward("another default device, set in a forward", DEVICE, "stage 0", "forward", "default device is meta"),
    model("a layer without values", "nn.Linear(8, 2, device='meta')", "2.weight", "model.weights", before=LAST),
    forward("a buffer that is registered in a forward", LATE, "1.late was registered by a forward", "__init__"),
    harmless("another current folder in the factory", "os.chdir('/')"),
    harmless("a seed in the factory", "torch.manual_seed(5)"),
    harmless("a thread that stays, of the factory", THREAD),
    harmless("a child that stays, of the factory", f"if not os.fork():\n    {SLEEPS}"),
)
