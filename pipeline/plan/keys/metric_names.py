"""What metrics are called in what an evaluation gives."""

from collections.abc import Sequence


def numbered(names: Sequence[str]) -> list[str]:
    """The functions' own `names`, each once: those that several have end with their place, "accuracy_1"."""
    every = [f"{name}_{place}" for place, name in enumerate(names)]
    own = [name if names.count(name) == 1 else longer for name, longer in zip(names, every, strict=True)]
    return own if len(set(own)) == len(own) else every


def told_apart(references: Sequence[str]) -> list[str]:
    """The names of the functions that a plan names; by the files that they are in, where functions share a name."""
    short = [function_of(each) for each in references]
    return [each if short.count(name) > 1 else name for each, name in zip(references, short, strict=True)]


def function_of(reference: str) -> str:
    """ "accuracy", of "metrics.py:accuracy"."""
    return reference.replace(":", ".").rpartition(".")[2]
