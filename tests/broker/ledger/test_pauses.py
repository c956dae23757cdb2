"""The pauses of a run as its broker keeps them: what workers are told, and what survives the broker."""

from stageline.broker.control.pauses import HeldBack, Hold
from stageline.broker.ledger.pauses import KEPT, PauseBook


def test_a_pause_closes_a_step_then_settles_on_the_last_that_a_worker_has_closed_and_ends() -> None:
    book = PauseBook()
    assert (book.present, book.order) == (None, Hold(0))
    book.begin("ada", "a backup", 7, now=10.0)
    assert book.order == Hold(10_000, 7)
    assert book.present is not None
    assert (book.present.by, book.present.step, book.steps, book.after) == ("ada", None, [], 0)
    book.settle([7, 9, 8], now=10.0)
    assert book.order == Hold(10_001, 9, settled=True)
    assert (book.steps, book.after) == ([9], 10)
    book.end("bob", now=12.0)
    assert (book.present, book.order) == (None, Hold(12_000))
    assert (book.pauses[0].until, book.pauses[0].ended) == (12.0, "bob")
    assert book.steps == [9]
    assert book.seconds == {9: 2.0}


def test_a_second_request_changes_nothing_and_neither_does_an_end_without_a_pause() -> None:
    book = PauseBook()
    book.end("ada", 1.0)
    assert book == PauseBook()
    book.begin("ada", "", 3, 1.0)
    book.begin("bob", "", 5, 2.0)
    assert [each.by for each in book.pauses] == ["ada"]
    assert book.order == Hold(1000, 3)


def test_a_book_comes_back_from_a_store_as_it_was() -> None:
    book = PauseBook()
    book.begin("ada", "why", 3, 1.0)
    book.settle([4], 1.0)
    name, fact = book.fact()
    assert PauseBook.stored_in({name: fact}) == book
    assert PauseBook.stored_in({}) == PauseBook()


def test_lost_records_learn_a_pause_from_the_worker_that_knows_most_and_agree_again() -> None:
    book = PauseBook()
    book.learn(HeldBack(1000, 7), now=5.0)  # of one that was told that step 7 is closed, and not yet what all agreed on
    assert book.order == Hold(1000, 7)
    book.learn(HeldBack(1001, 9), now=5.0)
    assert book.order == Hold(1001, 9)
    assert len(book.pauses) == 1
    book.learn(HeldBack(1002, None), now=6.0)
    assert (book.present, book.order) == (None, Hold(1002))
    book.learn(HeldBack(1003, None), now=6.0)
    assert book.order == Hold(1003)


def test_a_number_is_given_once_also_by_a_broker_whose_records_are_old() -> None:
    old, new = PauseBook(), PauseBook()
    new.begin("ada", "", 1, 1.0)
    new.end("ada", 1.5)
    old.begin("bob", "", 2, 2.0)
    assert old.number > new.number


def test_as_many_pauses_are_kept_as_a_record_has_room_for() -> None:
    book = PauseBook()
    for step in range(KEPT + 5):
        book.begin("ada", "", step, float(step))
        book.end("ada", float(step))
    assert len(book.pauses) == KEPT
