"""What an audit is asked for, and what it finds."""

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class AuditChoice:
    """`cuts`: the numbers of the layers that would begin the second part (none: all). `steps` of training come first;
    `sampled` rows are then looked at. `noise` is `AddNoise.share`; `clip` the part of the median norm of rows, before
    the training, that `ClipRows` leaves."""

    cuts: tuple[int, ...] = ()
    steps: int = 0
    sampled: int = 512
    defended: bool = False
    noise: float = 1.0
    clip: float = 0.5


class CutAudit(msgspec.Struct, frozen=True):
    """What one cut gives away. `layer` is the last before the cut, `features` the numbers of a row that cross it.

    `dependence` is the distance correlation, `by_chance` that of pairs that do not belong together; `linear` and
    `network` are R^2 of decoders; `by_norm` and `by_direction` areas under the ROC curve, None without classes. `score`
    is what the rows held out are measured by, after the training; None without any. `codec` is that of activations,
    `codec_back` that of gradients.
    """

    cut: int
    layer: str
    features: int
    defence: str
    dependence: float
    by_chance: float
    linear: float
    network: float
    by_norm: float | None
    by_direction: float | None
    score: float | None
    codec: str = "lossless"
    codec_back: str = "lossless"


class AuditReport(msgspec.Struct, frozen=True):
    """Of all cuts; decoders were trained on `trained` rows and measured on `tested`. `measure` names `CutAudit.score`,
    None if no rows are held out."""

    schema: str
    steps: int
    trained: int
    tested: int
    measure: str | None
    cuts: list[CutAudit]
