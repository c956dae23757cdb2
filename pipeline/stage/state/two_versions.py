"""Double-buffered weights (PipeDream-2BW, arXiv 2006.09503, section 3.1): the gradients of a step are those at the
weights before the newest update, W(t+1) = W(t) - rate * gradient(W(t-1)), and no third version is ever needed.

With W(t) the weights after t updates, the microbatches of step t read W(t-1), those of steps 0 and 1 W(0). A stage
that is ahead of the last begins step t before its update t-1 makes W(t), the last one after it.

    step 1, update 1      step 2, begun     update 2        step 2, the rest
    W(0)    W(1)          W(1)              W(1)  W(2)      W(1)

The memory of the parameters becomes that of the version before, which graphs may hold, and the parameters go on in a
copy, which the optimizer then changes. So there are two versions in memory, one of them the parameters themselves.
"""

from collections.abc import Iterable

from stageline.pipeline.errors import ForeignState, ModelRefused, StageError
from stageline.pipeline.stage.layers.body import Body, Weights
from stageline.pipeline.stage.layers.memory import copied
from stageline.pipeline.stage.layers.overlaps import overlaps

from .stage_state import InFlight, Previous
from .stashed_versions import StashedVersions, leaf_copy, on_host_uncopied
from .versions import Key, Version, Versions


def versions_of(body: Body, *, stash: bool, delay: bool) -> Versions:
    """Return the versions of the weights of `body` that a stage keeps: all that microbatches in flight have read with
    `stash`, two with `delay`, or the present one alone."""
    if delay:
        return TwoVersions(body)
    return StashedVersions(body) if stash else Versions()


class TwoVersions(StashedVersions):
    """The two versions of one stage's weights. Counts updates, so every step must have one. Raises `ModelRefused` for a
    trained parameter that shares memory: from the first update on it would have memory of its own."""

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        _demand_own_memory(body)
        self._updates = 0
        self._before: Weights | None = None  # the newest update; None before the first

    def version_for(self, key: Key) -> Version:
        """Raises `StageError` for a step that is neither the next to be updated nor the one after it."""
        if key[0] not in (self._updates, self._updates + 1):
            raise StageError(
                f"microbatch {key[1]} of step {key[0]} came after {self._updates} updates: delayed weights are there "
                f"for steps {self._updates} and {self._updates + 1}, and every step ends with an update"
            )
        return super().version_for(key)

    @property
    def previous(self) -> Previous | None:
        """Nothing ever writes to it, so it is not copied."""
        if self._before is None:
            return None
        return Previous(self._updates, on_host_uncopied(self._body.by_unsplit_names(self._before)))

    def begin_update(self) -> bool:
        self._before, self._current = self._newest(), None
        self._updates += 1
        for parameter in self._body.trainable().values():
            parameter.data = copied(parameter.data)
        return True

    def in_flight(self, versions: Iterable[tuple[Key, Version]]) -> tuple[InFlight, ...]:
        """Without weights, which are those of `previous`."""
        unsplit = self._body.by_unsplit_names
        return tuple(
            InFlight(*key, {}, on_host_uncopied(unsplit(version.buffers)))
            for key, version in (*versions, *self._reruns.items())
        )

    def restore(self, in_flight: Iterable[InFlight], previous: Previous | None) -> None:
        self._updates, self._before = 0, None
        if previous is not None:
            weights = self._body.by_own_names(previous.weights)
            if weights.keys() != self._body.trainable().keys():
                raise ForeignState(f"the weights before update {previous.updates} are not those of all that is trained")
            self._updates = previous.updates
            self._before = {name: leaf_copy(each, self._body.device) for name, each in weights.items()}
        super().restore(in_flight, previous)

    def _weights_of(self, step: int) -> Weights:
        before = self._before
        return self._newest() if before is None or step > self._updates else before

    def _newest(self) -> Weights:
        """In the memory of the parameters: `data`, since `detach` would share their count of changes, too."""
        if self._current is None:
            trainable = self._body.trainable().items()
            self._current = {name: parameter.data.requires_grad_() for name, parameter in trainable}
        return self._current

    def _restored(self, saved: InFlight) -> Version:
        return Version(self._weights_of(saved.step), self._restored_buffers(saved), rerun=True)


def _demand_own_memory(body: Body) -> None:
    trained = body.by_unsplit_names(body.trainable())
    variables = body.by_unsplit_names({**dict(body.named_parameters()), **dict(body.named_buffers())})
    for one, other in overlaps(variables):
        if one in trained or other in trained:
            raise ModelRefused(
                f'{one} and {other} share memory, and name = "2bw" gives a trained parameter other memory at each '
                f"update: what is written to one would no longer be in the other. Make them one parameter, clone one "
                f'of them, or use name = "1f1b"'
            )
