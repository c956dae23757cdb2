"""Facts about copies of snapshots in the answer to the query "status"."""

from .answers import AnswerFacts


class CopyFacts(AnswerFacts, frozen=True, kw_only=True):
    """Copies of the snapshots of one stage on another worker's disk.

    Attributes:
        stage: The stage.
        holder: Index of the worker that holds them; None if no worker has another disk and a queue for copies.
        step: Step of the newest snapshot that the holder has; None if it has none yet.
        newest: Step of the newest snapshot that the stage's owner has.
        under_way: Step of the snapshot that is being copied; None if none is.
    """

    stage: int
    holder: int | None
    step: int | None
    newest: int
    under_way: int | None = None
