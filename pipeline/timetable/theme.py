"""The colours of a drawn timetable: a hue for each kind of action, a tone for each of a worker's stages.

Blue and orange can be told apart without seeing red or green. The page follows the reader's theme.
"""

from dataclasses import dataclass

from stageline.pipeline.schedule import Kind

TONES = 4  # a worker's fifth stage looks like its first


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours in CSS notation; `actions` holds TONES of each kind."""

    page: str
    text: str
    faint_text: str
    lane: str
    tick: str
    label: str
    actions: dict[Kind, tuple[str, str, str, str]]

    def css(self) -> str:
        """Rules for the classes that a drawing uses."""
        tones = (
            f".{kind}.t{tone}{{fill:{colour}}}"
            for kind, colours in self.actions.items()
            for tone, colour in enumerate(colours)
        )
        return (
            f".page{{fill:{self.page}}}.lane{{fill:{self.lane}}}.tick{{stroke:{self.tick}}}"
            f".title,.word{{fill:{self.text}}}.time,.share{{fill:{self.faint_text}}}.label{{fill:{self.label}}}"
            + "".join(tones)
        )


_LIGHT = Theme(
    page="#ffffff",
    text="#1f2328",
    faint_text="#656d76",
    lane="#f3f5f7",
    tick="#dde1e6",
    label="#14202e",
    actions={
        Kind.FORWARD: ("#9cc7f7", "#cde2fb", "#6facee", "#e3effd"),
        Kind.BACKWARD: ("#f8b76f", "#fcd9b0", "#ee9a45", "#fdeada"),
        Kind.INPUT: ("#f49b8f", "#f9c8c1", "#e97767", "#fce3df"),
        Kind.WEIGHT: ("#c7b3f0", "#e0d5f8", "#a98de4", "#eee8fb"),
        Kind.UPDATE: ("#aab4be", "#ccd3da", "#8b97a3", "#e1e5e9"),
    },
)

_DARK = Theme(
    page="#0d1117",
    text="#e6edf3",
    faint_text="#8d96a0",
    lane="#171c24",
    tick="#2a313b",
    label="#f7fafd",
    actions={
        Kind.FORWARD: ("#2f6db5", "#1f4a80", "#4787d3", "#183862"),
        Kind.BACKWARD: ("#b4611c", "#824411", "#cf7a30", "#65340c"),
        Kind.INPUT: ("#b0433a", "#7d2d26", "#c95c52", "#60211c"),
        Kind.WEIGHT: ("#6f51b5", "#4d3785", "#896dcb", "#3a2966"),
        Kind.UPDATE: ("#5b6570", "#3f474f", "#737e89", "#30363d"),
    },
)

STYLE = (
    'text{font:13px system-ui,"Segoe UI",Helvetica,Arial,sans-serif}'
    ".title{font-size:16px;font-weight:600}.time,.share,.label{font-size:12px;font-variant-numeric:tabular-nums}"
    ".time,.label{text-anchor:middle}.share{text-anchor:end}.label{pointer-events:none}"
    "g:hover>rect{stroke:currentColor;stroke-width:1.5}"
    f"{_LIGHT.css()}@media(prefers-color-scheme:dark){{svg{{color:#e6edf3}}{_DARK.css()}}}"
)
