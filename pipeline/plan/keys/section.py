"""A table of a plan file, as a model of its keys."""

from pydantic import BaseModel, ConfigDict

from .key_types import Argument, Options


class Section(BaseModel):
    """One table of a plan file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FactorySection(Section):
    """A table whose keys, but for `factory`, are keyword arguments for the factory."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Argument]

    @property
    def options(self) -> Options:
        """The keyword arguments."""
        return self.__pydantic_extra__
