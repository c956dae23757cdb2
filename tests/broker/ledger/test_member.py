"""Descriptions of a worker for people."""

from stageline.broker.ledger.member import stages_label


def test_stages_label():
    assert [stages_label(range(n)) for n in (1, 2, 3)] == ["stage 0", "stages 0 and 1", "stages 0, 1 and 2"]
