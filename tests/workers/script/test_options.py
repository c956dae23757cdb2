"""Refusals of `fit` before the first step."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau

from stageline.pipeline.evaluation import Better, Criterion
from stageline.workers.script.arguments import LineOptions
from stageline.workers.script.callbacks import Callback, FitOptions, demand_fit


def accuracy(outputs: Any, targets: Any) -> float:
    return 1.0


LINE = LineOptions(loss=cross_entropy, optimizer=SGD, metrics=[accuracy])
FOLLOWS = replace(LINE, lr_scheduler=ReduceLROnPlateau, lr_every="evaluation")
EVALUATES: dict[str, Any] = {"evaluate_every": 2, "held_out": [0]}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"epochs": 0}, "epochs = 0: expected a whole number of at least 1, or None"),
        ({"steps": 2.5}, "steps = 2.5: expected"),
        (
            {**EVALUATES, "evaluate_every": "epochs"},
            "evaluate_every = 'epochs': expected a whole number of at least 1, \"epoch",
        ),
        ({**EVALUATES, "patience": True}, "patience = True: expected"),
        (
            {**EVALUATES, "metric": "recall"},
            "metric = 'recall': this line measures loss, accuracy; see metrics=",
        ),
        ({**EVALUATES, "metric": "accuracy"}, 'metric = \'accuracy\': pass better="higher" or better="lower"'),
        ({**EVALUATES, "better": "more"}, 'better = \'more\': expected "lower" or "higher"'),
        ({"patience": 3}, "patience = 3: say after how many steps to evaluate, with evaluate_every="),
        ({"held_out": [0]}, "held_out = [0]: say after how many steps"),
        ({"best": "best"}, "best = 'best': say after how many steps"),
        ({"evaluate_every": 2}, "evaluate_every= is given, and there is nothing to evaluate; pass held_out="),
        ({**EVALUATES, "best": True}, 'best = True: expected a path, such as best="best"'),
        ({"evaluate_every": 2, "held_out": iter([0])}, "can be walked once, and is evaluated again and again"),
        ({**EVALUATES, "best": "best"}, 'best = "best": there is no disk'),
        ({"callbacks": Callback}, "callbacks = Callback: expected a list of objects of classes derived from Callback"),
        ({"callbacks": [print]}, "callbacks[0] = print: expected an object of a class derived from Callback"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(options: dict[str, Any], named: str):
    with pytest.raises(ValueError, match=re.escape(named)):
        demand_fit(FitOptions(**options), LINE, "there is no disk")


def test_a_plateau_of_the_other_direction_than_the_metric_is_refused():
    higher = FitOptions(**EVALUATES, metric="accuracy", better="higher")
    with pytest.raises(ValueError, match='mode = "min", by which the rate is lowered while accuracy rises'):
        demand_fit(higher, FOLLOWS, "")
    demand_fit(higher, replace(FOLLOWS, lr_scheduler=partial(ReduceLROnPlateau, mode="max")), "")


def test_of_the_loss_the_lower_is_better():
    demand_fit(FitOptions(**EVALUATES), LINE, "")
    assert FitOptions(**EVALUATES).criterion == Criterion("loss", Better.LOWER, None)
    assert FitOptions(metric="accuracy", better="higher", patience=3).criterion == (
        Criterion("accuracy", Better.HIGHER, 3)
    )


def test_rates_that_follow_evaluations_need_some():
    demand_fit(FitOptions(**EVALUATES), FOLLOWS, "")
    with pytest.raises(ValueError, match='lr_every = "evaluation": say after how many steps to evaluate'):
        demand_fit(FitOptions(), FOLLOWS, "")
