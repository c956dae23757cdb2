"""The tables `parties.NAME`: owners of machines, by their keys, whom queues are closed to and opened for.

The docstring of the table is published in docs/plan.schema.json.
"""

from typing import Annotated, Literal, get_args

from pydantic import Field

from .key_types import Accepts, PublicKeyText, Section, Truth, Unset, Workers

RightName = Literal["work", "look", "stop", "inspect"]


class PartyPlan(Section):
    """A party: an owner of machines, with a key, the workers that run on them, and its rights towards the broker."""

    key: PublicKeyText = Field(
        description="The party's public key, which `stageline keys new NAME` makes and prints on its machine.",
        examples=["k1.jYnYr-khFObh8liWlG3VTOvjQxjZ7EbxZFntm6u6kj4"],
    )
    next_key: Unset[PublicKeyText] = Field(
        default=None,
        description="The key that takes the place of `key`: while the plan has both, machines may have either.",
        examples=["k1.jYnYr-khFObh8liWlG3VTOvjQxjZ7EbxZFntm6u6kj4"],
    )
    workers: Workers = Field(
        default=(),
        description="The workers that are the party's, and can be no other's. Every worker is of one party.",
        examples=[[0, 2]],
    )
    script: Truth = Field(
        default=False,
        description="Whether the script is the party's, in a run that a script drives.",
        examples=[True],
    )
    rights: Annotated[
        tuple[RightName, ...],
        Field(min_length=1),
        Accepts('a list of "work", "look", "stop", "inspect"', names=get_args(RightName)),
    ] = Field(
        default=("work",),
        description='What the broker lets the party do: "work" as its workers, "look" at the status, "inspect" queues, '
        '"stop" the run.',
        examples=[["work", "look"]],
    )

    @property
    def keys(self) -> tuple[str, ...]:
        """The texts of its keys: `key`, and `next_key` if there is one."""
        return (self.key,) if self.next_key is None else (self.key, self.next_key)
