"""The smallest plan, changed key by key, and tables of plans of any shape."""

from copy import deepcopy

import pytest
from hypothesis import strategies as st

from stageline.pipeline.plan import Plan, PlanError, PlanRefused, from_mapping

SMALLEST = """\
[run]
epochs = 2

[model]
factory = "model.py:build"
cut = [5]
loss = "torch.nn.functional.cross_entropy"

[data]
source = "data.py:batches"
batch_size = 64

[optimizer]
factory = "torch.optim.SGD"
lr = 0.1
"""


TABLES_OF_SMALLEST = {
    "run": {"epochs": 2},
    "model": {"factory": "model.py:build", "cut": [5], "loss": "torch.nn.functional.cross_entropy"},
    "data": {"source": "data.py:batches", "batch_size": 64},
    "optimizer": {"factory": "torch.optim.SGD", "lr": 0.1},
}


def plan(**changes: object) -> Plan:
    """The smallest plan with keys changed: `plan(schedule__name="gpipe")`; None takes a key or table away."""
    tables: dict = deepcopy(TABLES_OF_SMALLEST)
    for name, value in changes.items():
        *path, last = name.split("__")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
        if value is None:
            del table[last]
        else:
            table[last] = value
    return from_mapping(tables)


def refusal(**changes: object) -> list[PlanError]:
    with pytest.raises(PlanRefused) as refused:
        plan(**changes)
    return list(refused.value.errors)


def the_error(**changes: object) -> PlanError:
    errors = refusal(**changes)
    assert len(errors) == 1, [str(error) for error in errors]
    return errors[0]


NAMES = st.text(min_size=1, max_size=8)


VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


OPTIONS = st.dictionaries(NAMES.filter(lambda name: name != "factory"), VALUES, max_size=3)


@st.composite
def tables(draw: st.DrawFn) -> dict[str, dict]:
    stages = draw(st.integers(1, 5))
    owners = [draw(st.integers(0, stages - 1)) for _ in range(stages)]
    owned = [[stage for stage in range(stages) if owners[stage] == worker] for worker in sorted(set(owners))]
    # A window that grows along the line would let a stage wait for itself, which the schedule refuses.
    windows = st.lists(st.integers(1, 9), min_size=stages, max_size=stages).map(lambda ks: sorted(ks, reverse=True))
    window = draw(st.none() | windows)
    microbatches = draw(st.integers(1, 9))
    names = ("gpipe", "1f1b", "eager-1f1b")
    schedule = {"name": draw(st.sampled_from(names))} if window is None else {"name": "window", "window": window}
    return {
        "run": {"seed": draw(st.integers(0, 2**63 - 1)), draw(st.sampled_from(("steps", "epochs"))): 3},
        "model": {"factory": "model.py:build", "loss": "a.b", "stages": stages, "options": draw(OPTIONS)},
        "data": {"source": "data.py:batches", "batch_size": microbatches + 3, "options": draw(OPTIONS)},
        "schedule": {**schedule, "microbatches": microbatches},
        "optimizer": {"factory": "torch.optim.SGD", **draw(OPTIONS)},
        "recovery": {"lease": draw(st.floats(0.001, 1e6))},
        "workers": {str(index): {"stages": stages} for index, stages in enumerate(owned)},
    }
