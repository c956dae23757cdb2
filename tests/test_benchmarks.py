"""A benchmark takes an hour: what it has measured is shown as it comes, and an interrupt does not lose it."""

import json
import signal
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from support.paths import ROOT


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.measuring import rounds

    monkeypatch.setattr(rounds, "PROGRESS", rounds.TurnLog(tmp_path / "rounds.jsonl"))
    return rounds


def contestants(at_turn: Callable[[int], object]) -> dict[str, Callable[[], int]]:
    """Two, which return the numbers of their turns; `at_turn` is called first in each."""
    numbers: Iterator[int] = iter(range(1000))

    def turn() -> int:
        number = next(numbers)
        at_turn(number)
        return number

    return {"plain": turn, "split": turn}


def test_each_turn_is_shown_and_kept_when_it_ends(rounds: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was printed until all rounds were over."""
    shown: list[SimpleNamespace] = []

    def at_turn(number: int) -> None:
        kept = rounds.PROGRESS.file.read_text().splitlines() if number else []
        shown.append(SimpleNamespace(printed=capsys.readouterr().err, kept=len(kept)))

    assert rounds.alternate(contestants(at_turn), 2) == {"plain": [0, 2], "split": [1, 3]}
    assert [each.kept for each in shown] == [0, 1, 2, 3]
    assert [each.printed.split(": ")[:2] for each in shown[1:]] == [
        ["round 1 of 2", "plain"],
        ["round 1 of 2", "split"],
        ["round 2 of 2", "plain"],
    ]
    assert [json.loads(line)["result"] for line in rounds.PROGRESS.file.read_text().splitlines()] == [0, 1, 2, 3]


@pytest.mark.parametrize(("interrupted_in", "whole"), [(5, 2), (6, 3)])
def test_an_interrupt_leaves_the_rounds_that_were_whole(rounds: Any, interrupted_in: int, whole: int) -> None:
    """It lost them all."""
    turns = contestants(lambda number: number == interrupted_in and signal.raise_signal(signal.SIGINT))
    found = rounds.alternate(turns, 9)
    assert [len(each) for each in found.values()] == [whole, whole]
    with pytest.raises(KeyboardInterrupt):  # the next comparison does not begin
        rounds.alternate(contestants(lambda number: pytest.fail("it began")), 9)


def test_an_interrupt_before_there_are_two_whole_rounds_ends_the_benchmark(rounds: Any) -> None:
    turns = contestants(lambda number: number == 3 and signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        rounds.alternate(turns, 9)
    assert len(rounds.PROGRESS.file.read_text().splitlines()) == 3


def test_each_line_says_which_claim_was_measured_of_which_commit_and_when(
    rounds: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The file grows over all invocations, and a line did not say to which it belongs."""
    from benchmarks import __main__ as benchmarks
    from benchmarks.measuring.machine import commit

    turns = contestants(lambda number: number == 3 and signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(benchmarks, "PROGRESS", rounds.PROGRESS)
    monkeypatch.setattr(benchmarks, "ROOT", tmp_path)
    monkeypatch.setitem(benchmarks.CLAIMS, "startup", lambda count: rounds.alternate(turns, count))
    before = datetime.now(UTC)
    assert CliRunner().invoke(benchmarks.main, ["startup"]).exit_code == 130
    lines = [json.loads(line) for line in (tmp_path / "runs/bench/rounds.jsonl").read_text().splitlines()]
    assert [(each["claim"], each["commit"]) for each in lines] == [("startup", commit())] * 3
    assert all(before <= datetime.fromisoformat(each["time"]) <= datetime.now(UTC) for each in lines)
    assert commit() or not (ROOT / ".git").exists()
