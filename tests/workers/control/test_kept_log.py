"""The newest lines that a process has logged, for the broker."""

import msgspec

from stageline.broker.control.log_answer import LONGEST_LINE, MOST_LINES, KeptLines
from stageline.broker.control.peek import Peeked, ShowLog
from stageline.workers.control.kept_log import KEPT, KeptLog, shown_log


def filled(count: int) -> KeptLog:
    kept = KeptLog()
    for number in range(count):
        kept.note(float(number), "info", f"line {number}")
    return kept


def test_lines_are_told_in_pieces_each_once() -> None:
    kept, start, found = filled(2 * MOST_LINES + 7), 0, []
    while (piece := kept.since(start)).lines:
        assert len(piece.lines) <= MOST_LINES
        assert piece.first == start
        found += [each.text for each in piece.lines]
        start += len(piece.lines)
    assert found == [f"line {number}" for number in range(2 * MOST_LINES + 7)]
    kept.note(0.5, "error", "one more")
    assert [each.text for each in kept.since(start).lines] == ["one more"]


def test_of_more_lines_than_are_kept_the_oldest_are_gone_and_the_number_says_how_many() -> None:
    piece = filled(KEPT + 5).since(2)
    assert piece.first == 5
    assert piece.lines[0].text == "line 5"


def test_a_long_line_is_cut_to_what_a_message_may_have() -> None:
    kept = KeptLog()
    kept.note(0.0, "info", "x" * 10_000)
    piece = kept.since(0)
    assert len(piece.lines[0].text) == LONGEST_LINE
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(piece), type=KeptLines) == piece


def test_a_log_that_must_stay_is_refused_with_the_reason() -> None:
    told = shown_log(ShowLog(3), "data.stays is set")
    assert isinstance(told, Peeked)
    assert "data.stays is set" in told.refusal
    assert told.log is None
    assert shown_log(ShowLog(3), "").log is not None


def test_a_process_that_was_forked_tells_no_line_of_the_one_before() -> None:
    kept = filled(3)
    kept.clear()
    assert kept.since(0) == KeptLines(first=0, lines=[])
