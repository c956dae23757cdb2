"""Which layers' outputs a run writes to its folder: a table of the plan. It changes no bit of what is trained."""

from typing import Annotated

from pydantic import Field

from .key_types import Accepts, Truth, whole
from .section import Section


class TapsPlan(Section):
    """The layers that are tapped, and the steps whose microbatches are stored."""

    layers: Annotated[
        tuple[Annotated[str, Field(strict=True, min_length=1)], ...],
        Field(min_length=1),
        Accepts('a list of patterns such as ["encoder.layer.4*"]'),
    ] = Field(
        description="Patterns of the names of layers, as `model.cut` has them: what these return is written to the "
        "run's folder.",
        examples=[["encoder.layer.40", "encoder.layer.4?"]],
    )
    every: Annotated[int, whole(1)] = Field(
        default=10, description="Every so many steps are stored, from step 0 on.", examples=[1]
    )
    evaluation: Truth = Field(
        default=False, description="Whether the batches that are evaluated are stored too.", examples=[True]
    )

    def has(self, step: int) -> bool:
        """Whether training step `step` is stored."""
        return step % self.every == 0
