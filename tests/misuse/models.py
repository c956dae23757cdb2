"""Model code: what is wrong with it, and what it does to the process that runs it."""

from misuse.case import Change, Misuse
from misuse.code import MODEL, PLAN, in_build, in_forward, in_module

SEQUENTIAL = "nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))"


def model(what: str, after: str, *said: str, before: str = SEQUENTIAL) -> Misuse:
    return Misuse(what, 78, said, (Change(MODEL, before, after),))


def build(what: str, lines: str, *said: str, code: int = 78) -> Misuse:
    return Misuse(what, code, said, in_build(lines))


def forward(what: str, lines: str, *said: str, code: int = 78) -> Misuse:
    return Misuse(what, code, said, in_forward(lines))


UNPRINTABLE = """
class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no words")
raise Unprintable
"""
ROWS = (
    Misuse("a factory that is not in the file", 78, (), (Change(PLAN, "model.py:build", "model.py:biuld"),)),
    Misuse("only a file as the factory", 78, (), (Change(PLAN, "model.py:build", "model.py"),)),
    Misuse("a file that is not there", 78, (), (Change(PLAN, "model.py:build", "modle.py:build"),)),
    Misuse("a package that is not installed", 78, (), (Change(PLAN, "model.py:build", "no_such_package.build"),)),
    Misuse("a factory that cannot be called", 78, (), (*in_module("built = 3"), Change(PLAN, "model.py:build", "model.py:built"))),
    Misuse("options that the factory does not know", 78, (), (Change(PLAN, "cut = [2]", "cut = [2]\noptions = { width = 3 }"),)),
    model("a syntax error", "def build(:", before="def build():"),
    Misuse("a module that imports what is not there", 78, (), in_module("import nothing_like_it")),
    build("a factory that raises", "raise RuntimeError('no weights today')"),
    build("a factory that returns nothing", "return None"),
    model("a factory that returns one layer", "nn.Linear(4, 2)"),
    model("an empty model", "nn.Sequential()"),
    build("a list that is not of modules", "return [nn.Linear(4, 2), 3]"),
    model("layers that do not fit", "nn.Linear(9, 2)", before="nn.Linear(8, 2)"),
    model("a parameter shared between stages", "(lambda l: nn.Sequential(l, nn.ReLU(), l))(nn.Linear(4, 4))"),
    model("nothing to train", f"{SEQUENTIAL}.requires_grad_(False)"),
    model("no parameters", "nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU())"),
    build("a factory with os._exit(0)", "os._exit(0)"),
    build("a factory with os._exit(3)", "os._exit(3)"),
    build("a factory with os._exit(78)", "os._exit(78)"),
    build("a factory with sys.exit(0)", "sys.exit(0)"),
    build("a factory that raises KeyboardInterrupt", "raise KeyboardInterrupt"),
    build("an exception that has no text", UNPRINTABLE),
    build("a factory that kills its process", "os.kill(os.getpid(), signal.SIGKILL)"),
    build("a factory that reads address 0", "ctypes.string_at(0)"),
    build("a factory that prints escape sequences", "print('\\x1b[2J\\x1b]0;title\\x07'); raise RuntimeError('\\x1b[31mred')"),
    build("a factory that changes the folder", "os.mkdir('/tmp/elsewhere-x') if not os.path.isdir('/tmp/elsewhere-x') else None; os.chdir('/tmp/elsewhere-x')", code=0),
    build("a factory that closes stdout and stderr", "os.close(1); os.close(2)", code=0),
    build("a factory that closes sys.stdout", "sys.stdout.close(); sys.stderr.close()", code=0),
    build("a factory that closes every file", "os.closerange(0, 256)"),
    build("a factory that sets the seed", "torch.manual_seed(5)", code=0),
    build("a thread that never ends", "threading.Thread(target=time.sleep, args=(10**6,)).start()", code=0),
    build("a child that stays", "if not os.fork():\n    time.sleep(10**6)", code=0),
    build("weights that differ each time", "torch.seed()"),
    build("a factory that sleeps for ever", "time.sleep(10**6)"),
    build("a loop in C", "ctypes.PyDLL(None).sleep(10**6)"),
    forward("a forward with os._exit(0)", "os._exit(0)"),
    forward("a forward that raises", "raise ValueError('cannot')"),
    forward("a forward that returns nothing", "return None"),
    forward("a forward that returns text", "return 'x'"),
    forward("a forward that returns an array", "return x.detach().numpy()"),
    forward("a forward that writes to its input", "x[0] = 0", code=0),
    forward("a forward that returns another shape", "return x[:, :3]"),
    forward("a forward that drops rows", "return x[:1]"),
    forward("a forward that detaches", "return x.detach()"),
    forward("a forward that is random", "return x * random.random()"),
    forward("a forward that depends on time", "return x * time.time()"),
    forward("a forward that sleeps for ever", "time.sleep(10**6)"),
    forward("a forward that allocates without end", "import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))\nkept = []\nwhile True:\n    kept.append(torch.ones(2**24))"),
    forward("a forward that turns gradients off", "torch.set_grad_enabled(False)"),
    forward("a forward that changes the default dtype", "torch.set_default_dtype(torch.float64)", code=0),
)
