"""Which kinds of values a `Line`'s arguments may have: what is of another kind would fail somewhere below, unnamed.

Their ranges, and how they go together, are for the plan to judge.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence

from stageline.pipeline.model.families.layers import Layers

from .script_plan import LineOptions

Accepts = Callable[[object], bool]

_SETTING = '{"recovery.lease": "30s"}'
_SEEDS = range(1 << 64)  # what torch's generators take


def misfits(options: LineOptions) -> Iterator[str]:
    """What is of a wrong kind: the argument, its value, and what is expected."""
    settings: object = options.settings  # whose values may hold a password
    if not isinstance(settings, Mapping):
        yield f"settings is {a_kind(settings)}: expected a dict of a plan's keys, such as {_SETTING}"
        return
    for name, accepts, wanted in _KINDS:
        value = getattr(options, name)
        if not accepts(value):
            yield f"{name} = {short(value)}: expected {wanted}"
    for key, value in settings.items():
        if not isinstance(key, str):
            yield f"settings: the key {short(key)} is {a_kind(key)}: expected a plan's keys, such as {_SETTING}"
        if isinstance(value, Mapping):
            yield f"settings[{key!r}] is {a_kind(value)}: expected single keys, such as {_SETTING}"


def resume_misfit(resume: object) -> str:
    """What is wrong with the kind of `resume`; "" if nothing is."""
    if resume is None or isinstance(resume, str | os.PathLike):
        return ""
    return f"resume = {short(resume)}: expected the folder of a run, or of what save has saved"


def model_misfit(model: object) -> str:
    """What is wrong with the kind of `model`; "" if nothing is, as far as its kind tells."""
    if callable(model) or isinstance(model, Layers | list | tuple):
        return ""
    return (
        f"model = {short(model)} is {a_kind(model)}: expected a torch module, Layers, a list with one module for each "
        "stage, or a function that returns one of these"
    )


def short(value: object) -> str:
    """`value` as Python writes it, shortened; of a function its name."""
    text = getattr(value, "__qualname__", None) or " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def a_kind(value: object) -> str:
    """ "an int", "a tuple"."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_cut(value: object) -> bool:
    return isinstance(value, Sequence) and _is_list(value) and bool(value) and all(map(_is_place, value))


def _is_place(value: object) -> bool:
    return _is_whole(value) or isinstance(value, str)


def _are_patterns(value: object) -> bool:
    return (
        isinstance(value, Sequence) and _is_list(value) and bool(value) and all(isinstance(each, str) for each in value)
    )


def _is_recompute(value: object) -> bool:
    return value is None or isinstance(value, str) or _are_patterns(value)


def _is_placement(value: object) -> bool:
    return isinstance(value, Sequence) and all(_is_list(owned) and all(map(_is_whole, owned)) for owned in value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and _is_whole(value) and value > 0


def _is_seed(value: object) -> bool:
    return _is_whole(value) and value in _SEEDS


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike)


def _optional(accepts: Accepts) -> Accepts:
    return lambda value: value is None or accepts(value)


_KINDS: tuple[tuple[str, Accepts, str], ...] = (
    ("cut", _optional(_is_cut), "a list of layers' numbers or names, such as [4]"),
    ("stages", _optional(_is_count), "a whole number of at least 1"),
    ("placement", _optional(_is_placement), "a list with the stages of each worker, such as [[0, 2], [1, 3]]"),
    ("window", _optional(_is_list), "a list with one whole number for each stage, such as [4, 2]"),
    ("trainable", _optional(_are_patterns), 'a list of patterns of names, such as ["encoder.layer.40.*"]'),
    ("recompute", _is_recompute, '"stage", "layers", or a list of patterns of names such as ["encoder.layer.*.mlp"]'),
    ("taps", _optional(_are_patterns), 'a list of patterns of names, such as ["encoder.layer.40"]'),
    ("weights", _optional(_is_path), "the path of a file or folder of weights"),
    ("accept_difference", lambda value: isinstance(value, bool), "True or False"),
    ("seed", _is_seed, "a whole number of at least 0, of at most 64 bits"),
    ("lr_every", _is_place, "a number of steps of at least 1"),
    ("folder", lambda value: _is_path(value) and value != "", "the path of a folder"),
    ("broker", _optional(lambda value: isinstance(value, str)), 'an address such as "tcp://0.0.0.0:7000"'),
    ("progress", _optional(lambda value: isinstance(value, bool)), "True, False or None"),
    ("metrics", _is_list, "a list of functions of (outputs, targets), such as [accuracy]"),
    (
        "settings",
        lambda value: isinstance(value, Mapping),
        'a dict of a plan\'s keys, such as {"recovery.lease": "30s"}',
    ),
)
