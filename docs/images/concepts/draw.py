"""Draws the pictures of the pages in docs/concepts and docs/start.

Run it as `python docs/images/concepts/draw.py`; a test keeps the pictures up to date. Each picture is one SVG without
scripts, fonts or references, on a light card, so that it reads in light and dark themes.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent
INK, LINE, CARD = "#1f2933", "#52606d", "#ffffff"
FILLS = {
    "worker": "#dbeafe",
    "broker": "#fef3c7",
    "script": "#dcfce7",
    "queue": "#f1f5f9",
    "disk": "#ede9fe",
    "zone": "#f8fafc",
    "lost": "#fee2e2",
}


class Picture:
    """A drawing that grows by boxes, texts and arrows.

    Args:
        width, height: Size in CSS pixels.
        title: Text that a screen reader speaks instead of the picture.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
            f'aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="14">'
        )
        self._parts = [
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{LINE}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="8" fill="{CARD}"/>',
        ]

    def box(self, x: int, y: int, width: int, height: int, kind: str, *lines: str, dashed: bool = False) -> None:
        """Add a rectangle of the colour of `kind`, with centred lines of text; the first is bold."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{FILLS[kind]}" '
            f'stroke="{LINE}"{dash}/>'
        )
        top = y + height / 2 - 9 * (len(lines) - 1) + 5
        for number, line in enumerate(lines):
            size = 12 if number else 14
            self.text(x + width / 2, top + 18 * number, line, bold=number == 0, anchor="middle", size=size)

    def zone(self, x: int, y: int, width: int, height: int, name: str) -> None:
        """Add a large rectangle, named at its upper left corner, for other shapes to stand in."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{FILLS["zone"]}" '
            f'stroke="{LINE}" stroke-dasharray="2 3"/>'
        )
        self.text(x + 10, y + 20, name, bold=True)

    def text(self, x: float, y: float, line: str, *, bold: bool = False, anchor: str = "start", size: int = 14) -> None:
        """Add a line of text; `x` is its start or its middle, `y` its baseline."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{INK}" text-anchor="{anchor}" font-size="{size}"{weight}>'
            f"{escape(line)}</text>"
        )

    def arrow(self, *points: tuple[int, int], both: bool = False, dashed: bool = False) -> None:
        """Add a line through `points` with a tip at its end, or at both ends."""
        path = " ".join(f"{'L' if number else 'M'}{x} {y}" for number, (x, y) in enumerate(points))
        start = ' marker-start="url(#tip)"' if both else ""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.5" marker-end="url(#tip)"{start}{dash}/>'
        )

    def svg(self) -> str:
        """Return the finished document."""
        return "\n".join([self._head, *self._parts, "</svg>", ""])


def processes() -> Picture:
    picture = Picture(720, 260, "A script sends batches to two workers and gets losses; all report to the broker")
    picture.box(20, 30, 130, 64, "script", "script", "has the data")
    picture.box(270, 30, 140, 64, "worker", "worker 0", "stage 0: layers 0, 1")
    picture.box(550, 30, 150, 64, "worker", "worker 1", "stage 1: layers 2 to 4")
    picture.arrow((150, 50), (270, 50))
    picture.text(210, 43, "batches", anchor="middle", size=12)
    picture.arrow((410, 50), (550, 50))
    picture.text(480, 43, "activations", anchor="middle", size=12)
    picture.arrow((550, 76), (410, 76))
    picture.text(480, 92, "gradients", anchor="middle", size=12)
    picture.arrow((625, 94), (625, 130), (85, 130), (85, 94))
    picture.text(210, 124, "losses", anchor="middle", size=12)
    picture.box(270, 180, 140, 60, "broker", "broker", "no tensors")
    picture.arrow((340, 94), (340, 180), both=True, dashed=True)
    picture.arrow((110, 94), (110, 210), (270, 210), both=True, dashed=True)
    picture.arrow((660, 94), (660, 210), (410, 210), both=True, dashed=True)
    picture.text(540, 203, "reports", anchor="middle", size=12)
    return picture


def machines() -> Picture:
    picture = Picture(760, 300, "Three machines joined by queues; the broker keeps the records")
    picture.zone(25, 20, 190, 170, "hospital")
    picture.box(45, 55, 150, 50, "script", "data", "images, labels")
    picture.box(45, 125, 150, 50, "worker", "worker 0", "stage 0")
    picture.zone(285, 20, 190, 170, "home computer")
    picture.box(305, 125, 150, 50, "worker", "worker 1", "stage 1")
    picture.zone(545, 20, 190, 170, "cloud")
    picture.box(565, 125, 150, 50, "worker", "worker 2", "stage 2")
    picture.arrow((120, 105), (120, 125))
    for left in (195, 455):
        picture.arrow((left, 140), (left + 110, 140))
        picture.arrow((left + 110, 162), (left, 162))
    picture.text(250, 133, "forward", anchor="middle", size=12)
    picture.text(250, 178, "backward", anchor="middle", size=12)
    picture.text(510, 133, "queue", anchor="middle", size=12)
    picture.text(510, 178, "queue", anchor="middle", size=12)
    picture.box(305, 230, 150, 50, "broker", "broker", "records, no tensors")
    picture.arrow((120, 175), (120, 255), (305, 255), both=True, dashed=True)
    picture.arrow((380, 175), (380, 230), both=True, dashed=True)
    picture.arrow((640, 175), (640, 255), (455, 255), both=True, dashed=True)
    return picture


def retained_log() -> Picture:
    picture = Picture(760, 230, "The messages of a queue: trimmed, taken and retained, sent, to come")
    kinds = ["lost"] * 3 + ["disk"] * 4 + ["worker"] * 3 + ["zone"] * 2
    for number, kind in enumerate(kinds):
        picture.box(20 + 60 * number, 80, 54, 46, kind, str(number), dashed=kind in ("lost", "zone"))
    names = (
        (20, 174, "trimmed"),
        (200, 234, "taken, retained"),
        (440, 174, "sent, not yet taken"),
        (620, 114, "to come"),
    )
    for x, width, name in names:
        picture.text(x + width / 2, 150, name, anchor="middle", size=12)
    picture.text(200, 40, "checkpoint: a replacement", size=12)
    picture.text(200, 56, "begins to read here", size=12)
    picture.arrow((203, 62), (203, 80))
    picture.text(440, 40, "the consumer's", size=12)
    picture.text(440, 56, "next message", size=12)
    picture.arrow((443, 62), (443, 80))
    picture.text(622, 40, "credit ends: nothing", size=12)
    picture.text(622, 56, "is sent beyond", size=12)
    picture.arrow((617, 62), (617, 80))
    note = "The producer keeps every message since the newest complete checkpoint. A newer one trims the log."
    picture.text(20, 200, note, size=13)
    return picture


def recovery() -> Picture:
    picture = Picture(760, 260, "A replacement of worker 1 loads step 40; worker 0 does not go back")
    for y, name in ((70, "worker 0"), (150, "worker 1")):
        picture.text(20, y + 5, name, bold=True)
    picture.arrow((110, 70), (740, 70))
    picture.arrow((110, 150), (420, 150))
    picture.arrow((450, 150), (740, 150))
    for x, step in ((130, "20"), (280, "40"), (590, "60")):
        picture.box(x - 14, 56, 28, 28, "disk", step)
        picture.box(x - 14, 136, 28, 28, "disk", step)
    picture.box(406, 136, 28, 28, "lost", "×")
    picture.text(420, 128, "killed in step 47", anchor="middle", size=12)
    picture.arrow((420, 164), (420, 195), (280, 195), (280, 166), dashed=True)
    picture.text(280, 212, "a new process loads step 40", anchor="middle", size=12)
    picture.text(452, 188, "steps 40 to 47 again, from", size=12)
    picture.text(452, 204, "worker 0's retained messages", size=12)
    picture.text(430, 52, "waits, does not go back", anchor="middle", size=12)
    note = "Purple squares are snapshots. A checkpoint is complete when every stage has its snapshot on disk."
    picture.text(20, 246, note, size=13)
    return picture


def determinism() -> Picture:
    picture = Picture(760, 190, "The unsplit model and two stages give equal weights")
    picture.box(20, 40, 120, 46, "script", "batch", "4 microbatches")
    picture.box(240, 20, 200, 50, "worker", "unsplit model", "plain loop")
    picture.box(240, 100, 90, 50, "worker", "stage 0")
    picture.box(350, 100, 90, 50, "worker", "stage 1")
    picture.arrow((140, 55), (240, 45))
    picture.arrow((140, 72), (240, 125))
    picture.arrow((330, 125), (350, 125), both=True)
    picture.box(560, 20, 160, 50, "disk", "weights", "b1500dbe…")
    picture.box(560, 100, 160, 50, "disk", "weights", "b1500dbe…")
    picture.arrow((440, 45), (560, 45))
    picture.arrow((440, 125), (560, 125))
    picture.arrow((640, 70), (640, 100), both=True)
    picture.text(652, 90, "torch.equal", size=12)
    picture.text(20, 178, "Same order of additions, same random numbers per layer and microbatch: same bits.")
    return picture


def trust() -> Picture:
    picture = Picture(760, 250, "Each party sees its own part; the broker sees no tensors")
    picture.zone(20, 20, 210, 130, "party with the data")
    picture.box(45, 50, 160, 80, "worker", "worker 0", "rows, labels,", "weights of stage 0")
    picture.zone(530, 20, 210, 130, "other party")
    picture.box(555, 50, 160, 80, "worker", "worker 1", "activations, gradients,", "weights of stage 1")
    picture.arrow((205, 90), (555, 90), both=True)
    picture.text(380, 72, "queue: activations and gradients", anchor="middle", size=12)
    picture.text(380, 110, "encrypted between machines", anchor="middle", size=12)
    picture.box(300, 170, 160, 60, "broker", "broker", "names, steps, losses")
    picture.arrow((125, 130), (125, 200), (300, 200), both=True, dashed=True)
    picture.arrow((635, 130), (635, 200), (460, 200), both=True, dashed=True)
    return picture


PICTURES: Iterable[Callable[[], Picture]] = (processes, machines, retained_log, recovery, determinism, trust)


def drawn() -> dict[str, str]:
    """Return each picture's file name with its content."""
    return {f"{picture.__name__.replace('_', '-')}.svg": picture().svg() for picture in PICTURES}


if __name__ == "__main__":
    for name, text in drawn().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
