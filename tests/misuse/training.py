"""Loss, metrics, optimizer, learning rate."""

from misuse.case import Change, Misuse, train_with
from misuse.code import PLAN, in_loss, in_metric, in_module

OPTIMIZER = 'factory = "torch.optim.SGD"\nlr = 0.1'
NO_GRADIENT = "the loss has no gradient, so nothing would be trained"
ONE_NUMBER = "the loss must be one number"
METRIC = "the metric accuracy: "


def loss(what: str, lines: str, *said: str, code: int = 78) -> Misuse:
    return Misuse(what, code, said, in_loss(lines))


def metric(what: str, lines: str, *said: str, code: int = 78, finishes: bool = False) -> Misuse:
    return Misuse(what, code, said, in_metric(lines), finishes=finishes)


def plan(what: str, before: str, after: str, *said: str, code: int = 78) -> Misuse:
    return Misuse(what, code, said, (Change(PLAN, before, after),))


def lr_scheduler(what: str, factory: str, *said: str) -> Misuse:
    table = f'[lr_scheduler]\nfactory = "torch.optim.lr_scheduler.{factory}"'
    return plan(what, OPTIMIZER, f"{OPTIMIZER}\n\n{table}", "lr_scheduler" if "step()" not in said[0] else "", *said)


def optimizer(what: str, lines: str, *said: str) -> Misuse:
    """`Own` of these lines as the optimizer."""
    return Misuse(what, 78, said, (*in_module(lines), Change(PLAN, "torch.optim.SGD", "model.py:Own")))


ROWS = (
    plan("a loss that does not exist", "cross_entropy", "cross_entrapy", "model.loss", "has no 'cross_entrapy'"),
    plan(
        "a function that is no loss",
        "torch.nn.functional.cross_entropy",
        "torch.nn.functional.log_softmax",
        "stage 1 failed in 1F0 of step 0, the loss: TypeError: log_softmax()",
    ),
    loss("a loss with a number for each row", "return outputs.mean(1)", ONE_NUMBER, "it returned float32 [2]"),
    loss("a loss that is a float", "return outputs.mean().item()", ONE_NUMBER, "it returned "),
    loss("a loss that returns nothing", "return None", ONE_NUMBER, "it returned None"),
    loss("a loss without a gradient", "return outputs.detach().mean()", NO_GRADIENT, "a detach()"),
    loss("a loss that is a whole number", "return outputs.sum().long()", NO_GRADIENT),
    loss("a loss that raises", "raise ValueError('cannot')", "stage 1", "the loss: ValueError: cannot"),
    loss(
        "a loss that is not a number",
        "return outputs.mean() * float('nan')",
        "the loss of microbatch 0 of step 0 is nan",
        "lower the learning rate",
    ),
    loss("a loss that is infinite", "return outputs.pow(2).sum() * float('inf')", "microbatch 0 of step 0 is inf"),
    loss("a loss on another device", "return outputs.mean().to('meta')", "cannot be called on meta tensors"),
    metric("a metric that raises", "raise ValueError('cannot')", METRIC, "ValueError: cannot"),
    metric(
        "a metric that is text",
        "return 'good'",
        METRIC,
        "must return one number, the mean over rows; it returned 'good'",
    ),
    metric("a metric that returns nothing", "return None", METRIC, "it returned None"),
    metric(
        "a metric with a number for each row",
        "return targets.float()",
        METRIC,
        "it returned float32 [",
        "Take its mean()",
    ),
    metric("`sys.exit(0)` in a metric", "sys.exit(0)", METRIC, "SystemExit: 0"),
    plan("a metric that does not exist", "model.py:accuracy", "model.py:acuracy", "model.metrics", "It has: accuracy"),
    metric("a metric that is not a number", "return torch.tensor(float('nan'))", "finished", code=0, finishes=True),
    plan(
        "an optimizer that does not exist",
        "torch.optim.SGD",
        "torch.optim.SDG",
        "has no 'SDG'",
        "Its names include SGD",
    ),
    plan(
        "an optimizer that needs a closure", "torch.optim.SGD", "torch.optim.LBFGS", "the optimizer", "needs a closure"
    ),
    plan(
        "an option that the optimizer does not take",
        "lr = 0.1",
        "larning_rate = 0.1",
        "optimizer.larning_rate = 0.1",
        "it takes lr",
    ),
    plan("a learning rate below 0", "lr = 0.1", "lr = -1", "optimizer: ValueError: Invalid learning rate: -1"),
    optimizer(
        "a factory that makes no optimizer",
        "def Own(parameters, lr):\n    return 3",
        'optimizer.factory = "model.py:Own" returned an object of type int without step',
    ),
    optimizer(
        "an optimizer that raises",
        "class Own(torch.optim.SGD):\n    def step(self):\n        raise ValueError('cannot')",
        "stage 1 failed in 1U of step 0, the optimizer: ValueError: cannot",
    ),
    lr_scheduler("an lr_scheduler that does not exist", "StepRL", "has no 'StepRL'"),
    lr_scheduler(
        "an lr_scheduler without its arguments", "StepLR", "missing 1 required positional argument: 'step_size'"
    ),
    lr_scheduler(
        "an lr_scheduler that steps by a value",
        "ReduceLROnPlateau",
        'ReduceLROnPlateau steps by the value of an evaluation; use lr_scheduler.every = "evaluation"',
    ),
    plan("a learning rate at which it explodes", "lr = 0.1", "lr = 1e38", "is nan", "stageline replay", code=1),
    loss("`os._exit(0)` in the loss", "os._exit(0)", "(status 0)", "stage 1, forward, at loss (/", "/model.py, line "),
    metric("`os._exit(0)` in a metric", "os._exit(0)", "(status 0)", "stage 1, evaluation and metrics, at accuracy"),
    Misuse(
        "a metric that sleeps for ever",
        78,
        ("stage 1, evaluation and metrics after 1.5 s, at accuracy (", "model.py, line", "raise recovery.loading"),
        in_metric("time.sleep(10**6)"),
        train_with(("recovery.loading=1.5",)),
    ),
)
