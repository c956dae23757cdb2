"""The screen of `top` under textual's own pilot: keys are pressed, and what stands on the screen is read."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from html import unescape
from typing import Any

import pytest
from rich.text import Text

from stageline.pipeline.schedule import make_schedule
from stageline.workers.cli.top.app import FactsTable, Overview, TopApp
from stageline.workers.cli.top.facts import Glance, Question
from stageline.workers.cli.top.panels import PanelTable
from support.conversation import TERMS, Conversation, name, report
from support.top_facts import answers, asked, timetable

NARROW, WIDE = (80, 24), (160, 48)


class Answering:
    """Stands for the thread that asks: it has looked once it is started, and again when something else is asked."""

    def __init__(self, show: Callable[[Glance], object], talk: Conversation, **more: Any) -> None:
        self.show, self.talk, self.more = show, talk, more
        self.close: Question | None = None
        self.stopped = False

    def start(self) -> None:
        self.look()

    def look(self, **more: Any) -> None:
        found = {**answers(self.talk), **self.more}
        close = None if self.close is None else (self.close, asked(self.talk, self.close.what, **self.close.of))
        self.show(Glance(self.talk.now, found, {}, close=close, **more))

    def look_closely(self, question: Question | None) -> None:
        self.close = question
        self.look()

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def talk() -> Conversation:
    talk = Conversation()
    talk.join(0), talk.join(1)
    for index in range(2):
        talk.send(name(index), report(index))
    return talk


def shown(app: TopApp) -> str:
    """Text on the screen."""
    rows: dict[float, list[tuple[float, str]]] = {}
    for attributes, text in re.findall(r"<text ([^>]*)>(.*?)</text>", app.export_screenshot(), re.DOTALL):
        x, y = (float(found[1]) if (found := re.search(rf'{axis}="([\d.]+)"', attributes)) else -1.0 for axis in "xy")
        rows.setdefault(y, []).append((x, unescape(text).replace("\xa0", " ")))
    return "\n".join("".join(text for _, text in sorted(rows[y])) for y in sorted(rows))


def piloted(
    talk: Conversation, size: tuple[int, int], act: Callable[[TopApp, Answering, Any], Awaitable[None]], **more: Any
) -> None:
    """Runs the screen without a terminal, and `act` in it."""
    made: list[Answering] = []

    def looker(show: Callable[[Glance], object]) -> Any:
        made.append(Answering(show, talk, **more))
        return made[-1]

    async def run() -> None:
        app = TopApp(looker)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await act(app, made[0], pilot)
        assert made[0].stopped

    asyncio.run(run())


def test_on_a_narrow_terminal_each_number_shows_its_panel_alone(talk: Conversation) -> None:
    async def act(app: TopApp, looker: Answering, pilot: Any) -> None:
        text = shown(app)
        assert "run run-1" in text
        assert "process" not in text, "there is no room for it"
        assert "measured" in text
        assert "forward-1" not in text
        for key, part, other in (("2", "forward-1", "measured"), ("4", "measured", "forward-1"), ("1", "busy", "")):
            await pilot.press(key)
            await pilot.pause()
            assert part in shown(app)
            assert not other or other not in shown(app)
        assert "Quit" in text

    piloted(talk, NARROW, act, timetable=timetable(2))


def test_a_wide_terminal_shows_all_panels_and_a_resized_one_those_that_it_has_room_for(talk: Conversation) -> None:
    async def act(app: TopApp, looker: Answering, pilot: Any) -> None:
        assert all(part in shown(app) for part in ("worker-1, pid", "forward-1", "measured", "run run-1"))
        await pilot.resize_terminal(*NARROW)
        await pilot.pause()
        assert "forward-1" not in shown(app)
        assert "measured" in shown(app)

    piloted(talk, WIDE, act, timetable=timetable(2))


@pytest.mark.parametrize("size", [NARROW, pytest.param(WIDE, marks=pytest.mark.slow)])
def test_enter_looks_closely_at_a_queue_escape_goes_back_to_its_row_and_q_quits(talk, size) -> None:
    async def act(app: TopApp, looker: Answering, pilot: Any) -> None:
        await pilot.press("2", "down", "enter")
        await pilot.pause()
        text = shown(app)
        assert "queue backward-0 of run run-1" in text
        assert "producer:" in text
        assert "consumer:" in text
        await pilot.press("escape")
        await pilot.pause()
        assert looker.close is None
        assert isinstance(app.screen, Overview)
        assert app.screen.query_one("#queues", FactsTable).chosen == Question("queue", {"name": "backward-0"})
        await pilot.press("q")
        await pilot.pause()
        assert not app.is_running

    piloted(talk, size, act)


@pytest.mark.slow
def test_a_worker_is_shown_with_its_process_and_what_it_waits_for(talk: Conversation) -> None:
    async def act(app: TopApp, looker: Answering, pilot: Any) -> None:
        await pilot.press("down", "enter")
        await pilot.pause()
        text = shown(app)
        assert "worker 1, stages 1" in text
        assert "what to do:" in text
        talk.send(name(1), report(1, now="computes 1F0 of step 0"))
        looker.look()
        await pilot.pause()
        assert "computes 1F0 of step 0" in shown(app), "a closer look goes on"

    piloted(talk, NARROW, act)


@pytest.mark.slow
def test_a_microbatch_is_shown_with_its_history(talk: Conversation) -> None:
    row = {"step": 0, "microbatch": 2, "stage": "0", "worker": 0, "state": "computing", "since": None, "holder": None}
    found = {"schema": "microbatches/1", "run": "run-1", "state": None, "states": {}, "microbatches": [row]}

    async def act(app: TopApp, looker: Answering, pilot: Any) -> None:
        await pilot.press("3", "enter")
        await pilot.pause()
        assert "microbatch 2 of step 0" in shown(app)
        assert "stage 1, worker 1" in shown(app)

    piloted(talk, NARROW, act, microbatches=found)


def test_a_broker_that_goes_away_is_told_on_the_screen_and_what_was_known_stays(talk: Conversation) -> None:
    async def act(app: TopApp, looker: Answering, pilot: Any) -> None:
        looker.show(Glance(1.0, {}, {}, "no broker answered at ipc://x within 3 s"))
        await pilot.pause()
        text = shown(app)
        assert "no broker answered at ipc://x within 3 s" in text
        assert "run run-1" in text
        looker.look()
        await pilot.pause()
        assert "no broker answered" not in shown(app)
        looker.look(over=True)
        await pilot.pause()
        assert "the run is over" in shown(app)

    piloted(talk, NARROW, act)


@pytest.mark.slow
def test_a_cursor_stays_on_its_row_when_others_come_and_go(talk: Conversation) -> None:
    def table(*names: str) -> PanelTable:
        return PanelTable(["queue"], [(Question("queue", {"name": each}), [Text(each)]) for each in names])

    async def act(app: TopApp, looker: Answering, pilot: Any) -> None:
        rows = app.screen.query_one("#workers", FactsTable)
        rows.show_facts(table("a", "b", "c"))
        await pilot.press("down")
        rows.show_facts(table("c", "x", "b"))
        assert rows.chosen == Question("queue", {"name": "b"})
        rows.show_facts(table())
        assert rows.chosen is None
        await pilot.press("enter")
        rows.show_facts(table("b"))
        assert rows.chosen == Question("queue", {"name": "b"})

    piloted(talk, NARROW, act)


@pytest.mark.slow
@pytest.mark.parametrize("size", [NARROW, WIDE])
def test_with_eight_stages_all_rows_can_be_reached(size) -> None:
    schedule = make_schedule("1f1b", tuple((stage,) for stage in range(8)), 16)
    talk = Conversation(terms=replace(TERMS, schedule=schedule))
    for index in range(8):
        talk.join(index)

    async def act(app: TopApp, looker: Answering, pilot: Any) -> None:
        await pilot.press("ctrl+end")
        await pilot.pause()
        chosen = app.screen.query_one("#workers", FactsTable).chosen
        assert chosen == Question("why", {"stage": "7"})
        await pilot.press("2", "ctrl+end")
        await pilot.pause()
        last = app.screen.query_one("#queues", FactsTable)
        assert last.cursor_row == last.row_count - 1

    piloted(talk, size, act, timetable=timetable(8, 16))
