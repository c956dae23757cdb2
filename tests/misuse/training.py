"""Loss, metrics, optimizer, learning rate."""

from misuse.case import Change, Misuse
from misuse.code import PLAN, in_loss, in_metric, in_module


def loss(what: str, lines: str, *said: str, code: int = 78) -> Misuse:
    return Misuse(what, code, said, in_loss(lines))


def metric(what: str, lines: str, *said: str, code: int = 78) -> Misuse:
    return Misuse(what, code, said, in_metric(lines))


def plan(what: str, before: str, after: str, *said: str, code: int = 78, more: str = "") -> Misuse:
    return Misuse(what, code, said, (*in_module(more), Change(PLAN, before, after)))


OPTIMIZER = 'factory = "torch.optim.SGD"\nlr = 0.1'
ROWS = (
    plan("a loss that is not there", "cross_entropy", "cross_entrapy"),
    plan("a loss of other arguments", "torch.nn.functional.cross_entropy", "torch.nn.functional.log_softmax"),
    loss("a loss with a value for each row", "return outputs.mean(1)"),
    loss("a loss without a gradient", "return outputs.detach().mean()"),
    loss("a loss that is a float", "return float(outputs.mean())"),
    loss("a loss that returns nothing", "return None"),
    loss("a loss that raises", "raise ValueError('cannot')"),
    loss("a loss that is not a number", "return outputs.mean() * float('nan')", code=1),
    loss("a loss that is infinite", "return outputs.sum() * float('inf')", code=1),
    loss("a loss on another device", "return outputs.mean().to('meta')"),
    loss("a loss that writes to the outputs", "outputs[0] = 0"),
    loss("a loss that writes to the targets", "targets[:] = 0"),
    loss("a loss that is an integer", "return outputs.sum().long()"),
    loss("a loss that runs backward itself", "outputs.mean().backward(retain_graph=True)"),
    loss("a loss that exits", "os._exit(0)"),
    metric("a metric that raises", "raise ValueError('cannot')"),
    metric("a metric that returns text", "return 'good'"),
    metric("a metric that returns nothing", "return None"),
    metric("a metric that is a value for each row", "return (outputs.argmax(1) == targets).float()"),
    metric("a metric that exits", "sys.exit(0)"),
    metric("a metric that is NaN", "return torch.tensor(float('nan'))", code=0),
    plan("a metric that is not there", "model.py:accuracy", "model.py:acuracy"),
    plan("two metrics of one name", '["model.py:accuracy"]', '["model.py:accuracy", "model.py:accuracy"]'),
    plan("an optimizer that is not there", "torch.optim.SGD", "torch.optim.SDG"),
    plan("an optimizer that needs a closure", "torch.optim.SGD", "torch.optim.LBFGS"),
    plan("an option that the optimizer does not know", "lr = 0.1", "larning_rate = 0.1"),
    plan("a negative learning rate", "lr = 0.1", "lr = -1"),
    plan("an optimizer that is none", "torch.optim.SGD", "model.py:opt", more="def opt(parameters, lr):\n    return 3\n"),
    plan("an optimizer that does nothing", "torch.optim.SGD", "model.py:Lazy", more="class Lazy(torch.optim.SGD):\n    def step(self):\n        pass\n", code=0),
    plan("an optimizer that raises", "torch.optim.SGD", "model.py:Bad", more="class Bad(torch.optim.SGD):\n    def step(self):\n        raise ValueError('cannot')\n"),
    plan("an lr_scheduler that is not there", OPTIMIZER, f'{OPTIMIZER}\n\n[lr_scheduler]\nfactory = "torch.optim.lr_scheduler.StepRL"'),
    plan("an lr_scheduler without its arguments", OPTIMIZER, f'{OPTIMIZER}\n\n[lr_scheduler]\nfactory = "torch.optim.lr_scheduler.StepLR"'),
    plan("an lr_scheduler that needs a value at each step", OPTIMIZER, f'{OPTIMIZER}\n\n[lr_scheduler]\nfactory = "torch.optim.lr_scheduler.ReduceLROnPlateau"'),
    plan("a loss that explodes", "lr = 0.1", "lr = 1e38", code=1),
)
