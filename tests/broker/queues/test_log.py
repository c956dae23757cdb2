"""Messages that a producer retains, in memory and on the disk."""

import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from stageline.broker.codec.message import Message, decode
from stageline.broker.codec.structure import rest_of
from stageline.broker.errors import Disagreement, Overwritten, QueueFull
from stageline.broker.queues import spill as spill_module
from stageline.broker.queues.log import Log, RetentionBudget
from stageline.pipeline.program import Per, Queue
from support.queue_pair import queue_of

KEY = queue_of("evaluation-3", count=2, per=Per.EVALUATED)
MakeBudget = Callable[[int], RetentionBudget]
SIZE = 400  # bytes of a test message's tensor; its header has a few dozen more


def message(number: int, payload: torch.Tensor | None = None) -> Message:
    content = torch.full((SIZE // 4,), float(number)) if payload is None else payload
    return Message("run", KEY.name, number, 1, content)


@pytest.fixture
def budget_of(tmp_path: Path) -> Iterator[MakeBudget]:
    """Makes budgets with so much memory and plenty of disk."""
    budgets: list[RetentionBudget] = []

    def make(memory: int) -> RetentionBudget:
        budgets.append(RetentionBudget(memory, disk=1000 * SIZE, folder=str(tmp_path)))
        return budgets[-1]

    yield make
    for budget in budgets:
        budget.spill.close()


def log_on(budget: RetentionBudget, count: int = 0, key: Queue = KEY) -> Log:
    log = Log("run", key, budget)
    for number in range(count):
        log.put(message(number), now=float(number))
    return log


def contents(log: Log) -> list[float]:
    return [decode(log.frames(number)).payload[0].item() for number in range(log.first, log.end)]


def test_memory_is_used_up_to_its_limit_and_then_the_disk(budget_of: MakeBudget) -> None:
    budget = budget_of(5 * SIZE)
    log = log_on(budget, 40)
    assert 4 * SIZE <= budget.used <= 5 * SIZE
    assert budget.used + budget.spill.bytes == log.bytes
    assert contents(log) == list(range(40))


def test_the_oldest_go_to_the_disk_first(budget_of: MakeBudget) -> None:
    budget = budget_of(5 * SIZE)
    tensors = [torch.full((SIZE // 4,), float(number)) for number in range(10)]
    log = log_on(budget)
    for number, tensor in enumerate(tensors):
        log.put(message(number, tensor), now=0.0)
    tensors[0].zero_()  # its bytes are safe
    assert contents(log) == list(range(10))
    tensors[9].zero_()
    with pytest.raises(Overwritten, match=r"message 9 of evaluation-3 \(evaluated batch 4, microbatch 1\)"):
        contents(log)


def test_a_tensor_written_to_is_found_before_it_goes_to_the_disk(budget_of: MakeBudget) -> None:
    log = log_on(budget_of(3 * SIZE))
    tensor = torch.zeros(SIZE // 4)
    log.put(message(0, tensor), now=0.0)
    tensor.add_(1)
    log.put(message(1), now=0.0)
    with pytest.raises(Overwritten):
        log.put(message(2), now=0.0)


def test_a_message_larger_than_memory_goes_straight_to_the_disk(budget_of: MakeBudget) -> None:
    budget = budget_of(SIZE // 2)
    log = log_on(budget, 3)
    assert budget.used == 0
    assert contents(log) == [0, 1, 2]


def test_logs_share_one_budget(budget_of: MakeBudget) -> None:
    budget = budget_of(6 * SIZE)
    first, second = log_on(budget, 4), log_on(budget, 8)
    assert budget.used <= 6 * SIZE
    first.trim(2)
    assert contents(second) == list(range(8))
    second.trim(4)
    assert (budget.used, budget.spill.bytes) == (0, 0)


def test_trimming_gives_disk_space_back_file_by_file(budget_of: MakeBudget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_module, "FILES", 250)  # of 4 messages each
    none = len(os.listdir("/proc/self/fd"))
    budget = budget_of(SIZE)
    log, files = log_on(budget, 40), []
    for step in range(21):
        log.trim(step)
        files.append(len(os.listdir("/proc/self/fd")) - none)
    assert files == sorted(files, reverse=True)
    assert files[0] >= 10
    assert files[10] <= 6
    assert (files[-1], budget.spill.bytes) == (0, 0)


def test_what_is_trimmed_takes_no_room_from_what_is_put_though_its_file_is_still_needed(tmp_path: Path) -> None:
    # It did: a run whose messages lie on the disk in every step waited in vain, since no file was ever all trimmed.
    budget = RetentionBudget(3 * SIZE, disk=12 * SIZE, folder=str(tmp_path))
    log = log_on(budget)
    for number in range(200):
        log.put(message(number), now=0.0)
        log.trim(number // 2 - 3)
    assert budget.spill.bytes <= 6 * (SIZE + 100)
    budget.spill.close()


def test_a_log_goes_on_after_all_of_it_was_trimmed(budget_of: MakeBudget) -> None:
    log = log_on(budget_of(3 * SIZE), 20)
    log.trim(10)
    for number in range(20, 40):
        log.put(message(number), now=0.0)
    assert contents(log) == list(range(20, 40))


def test_a_put_without_room_asks_whether_to_wait() -> None:
    asked: list[tuple[str, float]] = []

    def wait(reason: str, since: float) -> bool:
        asked.append((reason, since))
        if len(asked) == 2:
            log.trim(1)
        return True

    log = log_on(RetentionBudget(memory=3 * SIZE, wait=wait), 2)
    log.put(message(2), now=7.0)
    assert contents(log) == [2]
    assert [since for _, since in asked] == [7.0, 7.0]
    assert "evaluation-3 retains 2 messages, " in asked[0][0]


def test_a_full_disk_is_an_error_that_names_it(budget_of: MakeBudget, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = budget_of(3 * SIZE)
    log = log_on(budget, 2)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(QueueFull, match=r"the disk takes no more in .*: No space left on device"):
            log.put(message(2), now=0.0)
    assert (len(log), budget.spill.bytes) == (2, 0)
    log.put(message(2), now=0.0)
    assert contents(log) == [0, 1, 2]


def test_the_age_is_that_of_the_oldest_kept() -> None:
    log = log_on(RetentionBudget(), 6)
    assert log.oldest(now=10.0) == 10.0
    log.trim(2)
    assert log.oldest(now=10.0) == 6.0
    log.trim(3)
    assert log.oldest(now=10.0) == 0.0


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_all_that_is_kept_can_be_read(budget_of: MakeBudget, seed: int) -> None:
    """Two logs on one budget against lists: puts of all sizes, repeated puts, trims and reads in any order."""
    dice = random.Random(seed)
    budget = budget_of(dice.choice([0, 3, 10, 50]) * SIZE)
    logs = [log_on(budget), log_on(budget)]
    firsts, ends = [0, 0], [0, 0]
    for _ in range(120):
        which = dice.randrange(2)
        log = logs[which]
        match dice.randrange(5):
            case 0:
                step = firsts[which] // 2 + dice.randrange(4)
                log.trim(step)
                firsts[which] = 2 * step
                ends[which] = max(ends[which], firsts[which])
            case 1 if ends[which] > firsts[which]:
                old = dice.randrange(ends[which])
                assert log.put(message(old, sized(old)), now=0.0) is None
            case _:
                assert log.put(message(ends[which], sized(ends[which])), now=0.0)
                ends[which] += 1
        assert (log.first, log.end) == (firsts[which], ends[which])
        assert contents(log) == list(range(firsts[which], ends[which]))
        assert budget.used <= budget.memory
    for log in logs:
        log.trim(1000)
    assert (budget.used, budget.spill.bytes) == (0, 0)


def sized(number: int) -> torch.Tensor:
    """A tensor of which message `number` alone decides the size."""
    return torch.full((1 + number * 37 % 301,), float(number))


@pytest.mark.parametrize("memory", [40 * SIZE, 5 * SIZE], ids=["in memory", "on the disk"])
def test_an_emptied_message_keeps_its_number_and_its_checksums_alone(budget_of: MakeBudget, memory: int) -> None:
    budget = budget_of(memory)
    log = log_on(budget, 20)
    for step in range(9):
        log.empty(step, "rest")
        log.empty(step, "rest")  # again changes nothing
    assert budget.used + budget.spill.bytes == log.bytes
    assert [rest_of(decode(log.frames(number)).payload) for number in range(18)] == ["rest"] * 18
    assert decode(log.frames(18)).payload[0].item() == 18
    assert log.put(message(7), now=30.0) is None
    with pytest.raises(Disagreement, match="was put twice with different bits"):
        log.put(message(7, torch.zeros(100)), now=30.0)
    log.trim(10)
    assert budget.used == budget.spill.bytes == log.bytes == 0


def test_what_is_emptied_makes_room(budget_of: MakeBudget) -> None:
    log = log_on(RetentionBudget(5 * SIZE), 2)
    for number in range(2, 10, 2):
        log.empty(number // 2 - 1)
        log.put(message(number), now=0.0)
        log.put(message(number + 1), now=0.0)
    assert len(log) == 10
