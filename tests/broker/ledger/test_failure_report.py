"""Reports about a lost worker."""

import pytest

from support.worker_line import WorkerLine, hang


@pytest.fixture
def line() -> WorkerLine:
    return WorkerLine()


def test_the_reason_of_a_run_that_is_given_up_ends_with_the_chain(line: WorkerLine):
    hang(line)
    line.passes(10.0)
    reason = str(line.status()["reason"])
    assert "is alive, but completed no action for 10.0 s" in reason
    assert reason.endswith(
        "Stage 0 waits for the gradient of step 118 microbatch 5 from stage 1 (worker w1, generation 1), "
        "which waits for the gradient of step 118 microbatch 5 from stage 2 (worker w2, generation 1), "
        "which waits for the gradient of step 118 microbatch 5 from stage 3 (worker w3, generation 1), "
        "which took it 10 s ago and has made no progress since; it is in layers.30.mlp"
    )
    assert line.why()["text"] == reason
