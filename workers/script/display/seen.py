"""What a script's process sees of its run: the steps whose losses have come, and these."""

from collections.abc import Mapping
from concurrent.futures import Future

from stageline.pipeline.tree import Tree

from .loss_curve import LossCurve


class Seen:
    """The losses of `steps` have come, counted from the run's beginning; `loss` is the newest that there was. Written
    by the thread that takes the replies, once for each step; read by any."""

    def __init__(self, start: int) -> None:
        self.start = self.steps = start
        self.loss: float | None = None
        self.curve = LossCurve()

    def step_ended(self, done: "Future[Mapping[int, Tree]]") -> None:
        """The loss of a step has come; or it has failed."""
        if done.cancelled() or done.exception() is not None:
            return
        replies = (reply[0] if isinstance(reply, tuple) else reply for reply in done.result().values())
        loss = next((reply for reply in replies if isinstance(reply, float)), None)
        if loss is not None:
            self.loss = loss
            self.curve.add(self.steps, loss)
        self.steps += 1
