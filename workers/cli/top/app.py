"""The screen of `stageline top`, drawn by textual: panels of a run, and a closer look at a worker, queue or microbatch.

A thread asks (`top_facts.py`), `top_panels.py` makes text of the answers, and this file places it. On a narrow terminal
one panel is shown at a time, on a wide one all are.
"""

import asyncio
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.coordinate import Coordinate
from textual.message import Message
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static

from .facts import Glance, Looker, Question
from .panels import PanelTable, RunPanels

WIDE, HIGH = 120, 36  # columns and rows from which on all panels are shown
PANELS = ("workers", "queues", "microbatches", "timetable")
_QUITS = (
    Binding("q", "app.quit", "Quit"),
    Binding("ctrl+c,ctrl+q", "app.quit", "Quit", show=False, priority=True),
)


class Looked(Message):
    """Message from the thread that asks: what it has seen."""

    def __init__(self, seen: Glance) -> None:
        """Carry `seen`."""
        super().__init__()
        self.seen = seen


class FactsTable(DataTable[Text]):
    """Table whose rows change from look to look, while its cursor stays on the row that it is on."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Open")]

    def __init__(self, name: str) -> None:
        """Begin empty, as the panel `name`."""
        super().__init__(id=name, cursor_type="row", zebra_stripes=False)
        self._columns: tuple[str, ...] = ()
        self._questions: list[Question] = []

    @property
    def chosen(self) -> Question | None:
        """The question that opens the row under the cursor; None without a row."""
        return self._questions[self.cursor_row] if self.cursor_row < len(self._questions) else None

    def show_facts(self, made: PanelTable) -> None:
        """Show the rows of `made`."""
        at, chosen, before = self.cursor_row, self.chosen, self._questions
        self._questions = [question for question, _ in made.rows]
        if self._columns != tuple(made.columns) or not self._questions:
            self._columns = tuple(made.columns) if self._questions else ()
            self.clear(columns=True)
            self.add_columns(*(Text(name) for name in made.columns if self._questions))
        if before == self._questions and self.row_count == len(before):
            for row, (_, cells) in enumerate(made.rows):
                for column, cell in enumerate(cells):
                    self.update_cell_at(Coordinate(row, column), cell, update_width=True)
            return
        scrolled = self.scroll_y
        self.clear()
        for _, cells in made.rows:
            self.add_row(*cells)
        if chosen in self._questions:
            same = self._questions[at : at + 1] == [chosen]  # a microbatch has a row for each stage
            self.move_cursor(row=at if same else self._questions.index(chosen), scroll=False)
        self.scroll_to(y=scrolled, animate=False)


class Closely(Screen[None]):
    """Closer look at one worker, queue or microbatch."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,backspace,left", "app.back", "Back"), *_QUITS]

    def __init__(self, draw: Callable[[int], Text]) -> None:
        """Show what `draw` returns for a number of columns."""
        super().__init__()
        self._draw = draw

    def compose(self) -> ComposeResult:
        """Yield the widgets."""
        with VerticalScroll(id="closely"):
            yield Static(id="lines")
        yield Footer()

    def on_mount(self) -> None:
        """Show the first text."""
        self.draw()

    def draw(self) -> None:
        """Show the newest text."""
        for lines in self.query("#lines").results(Static):
            lines.update(self._draw(self.app.size.width - 4))


class Overview(Screen[None]):
    """Panels of the run."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"panel('{name}')", name.title()) for number, name in enumerate(PANELS, start=1)),
        *_QUITS,
    ]

    def __init__(self, panels: RunPanels) -> None:
        """Show `panels`."""
        super().__init__()
        self._panels = panels
        self._panel = "workers"
        self._composed = False

    def compose(self) -> ComposeResult:
        """Yield the widgets."""
        yield Static(id="head")
        yield FactsTable("workers")
        yield Static(id="legend")
        with Horizontal(id="middle"):
            with Vertical(id="left"):
                yield FactsTable("queues")
            with Vertical(id="right"):
                yield FactsTable("microbatches")
        yield Static(id="note")
        with VerticalScroll(id="timetable"):
            yield Static(id="drawn")
        yield Footer()

    def on_mount(self) -> None:
        """Begin with the workers."""
        self._composed = True
        self.action_panel("workers")

    def on_resize(self, event: events.Resize) -> None:
        """Draw for another size."""
        self._panels.width = event.size.width
        if self._composed:
            self._arrange()
            self.draw()

    @property
    def _wide(self) -> bool:
        return self.app.size.width >= WIDE and self.app.size.height >= HIGH

    def _arrange(self) -> None:
        """Show the panels that there is room for."""
        here, wide = self._panel, self._wide
        self.set_class(wide, "wide")
        shown = {
            "workers": wide or here == "workers",
            "legend": wide or here == "workers",
            "middle": wide or here in ("queues", "microbatches"),
            "left": wide or here == "queues",
            "right": wide or here == "microbatches",
            "timetable": wide or here in ("workers", "timetable"),
        }
        for name, is_shown in shown.items():
            self.query_one(f"#{name}").display = is_shown

    def action_panel(self, name: str) -> None:
        """Go to a panel."""
        self._panel = name
        self._arrange()
        self.query_one(f"#{name}").focus()
        self.draw()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Look closely at a row that was chosen."""
        if isinstance(event.data_table, FactsTable):
            self._open(event.data_table)

    def _open(self, table: FactsTable) -> None:
        if (question := table.chosen) is not None and isinstance(self.app, TopApp):
            self.app.look_closely(question, table.cursor_row if table.id == "workers" else None)

    def draw(self) -> None:
        """Show the newest facts."""
        if not self._composed:
            return
        panels, width = self._panels, self.app.size.width
        half = width // 2 if self._wide else width
        self.query_one("#head", Static).update(panels.head())
        self.query_one("#legend", Static).update(panels.legend())
        self.query_one("#drawn", Static).update(panels.timetable(width - 4))
        tables = {"workers": panels.workers(), "queues": panels.queues(half - 4), "microbatches": panels.microbatches()}
        for name, made in tables.items():
            self.query_one(f"#{name}", FactsTable).show_facts(made)
        empty = [made.note for name, made in tables.items() if not made.rows and made.note and self._is_shown(name)]
        note = self.query_one("#note", Static)
        note.update(Text("; ".join(dict.fromkeys(empty))))
        note.display = bool(empty)

    def _is_shown(self, panel: str) -> bool:
        return self._wide or self._panel == panel


class TopApp(App[None]):
    """The screen of a run, until q is pressed."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    #head, #legend, #note { height: auto; padding: 0 1; }
    #head { margin-bottom: 1; }
    #workers { height: auto; max-height: 60%; }
    #middle, #timetable, #closely { height: 1fr; }
    #left, #right { width: 1fr; }
    #timetable, #closely { padding: 0 1; margin-top: 1; }
    #closely { margin-top: 0; }
    #lines, #drawn { height: auto; }
    .wide #timetable { height: auto; max-height: 45%; }
    .wide #workers { max-height: 30%; }
    """

    def __init__(self, looker: Callable[[Callable[[Glance], object]], Looker]) -> None:
        """Take what makes the thread that asks, from what takes its looks."""
        super().__init__()
        self.panels = RunPanels()
        self._looker = looker(lambda seen: self.post_message(Looked(seen)))

    def get_default_screen(self) -> Screen[None]:
        """Return the screen with the panels."""
        return Overview(self.panels)

    def on_mount(self) -> None:
        """Begin to ask."""
        self._looker.start()

    async def on_unmount(self) -> None:
        """End the thread."""
        await asyncio.to_thread(self._looker.stop)

    def on_looked(self, message: Looked) -> None:
        """Show what was seen."""
        self.panels.note(message.seen)
        for screen in self.screen_stack:
            if isinstance(screen, Overview | Closely):
                screen.draw()

    def look_closely(self, question: Question, worker: int | None) -> None:
        """Open a closer look; `worker` is the row of a worker, None for anything else."""
        self._looker.look_closely(question)

        def draw(width: int) -> Text:
            if worker is None:
                return self.panels.closely(question, width)
            return self.panels.worker(worker, question, width)

        self.push_screen(Closely(draw))

    async def action_back(self) -> None:
        """Go back to the panels."""
        self._looker.look_closely(None)
        await self.pop_screen()
