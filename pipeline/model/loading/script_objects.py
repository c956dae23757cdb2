"""The objects of a user's script that a plan names: `script:model` is `OBJECTS["model"]`.

They reach other processes by fork alone: nothing is pickled. A process that was not forked from the script has none.
"""

from typing import Any

from stageline.pipeline.errors import ModelRefused

PREFIX = "script:"

OBJECTS: dict[str, Any] = {}


def is_of_script(reference: str) -> bool:
    """Whether `reference` names an object of a script, not of a file or a package."""
    return reference.startswith(PREFIX)


def script_object(reference: str, key: str) -> Any:
    """The object that `reference` names; `key` is the plan's key that holds it. Raises `ModelRefused`."""
    name = reference.removeprefix(PREFIX)
    if name not in OBJECTS:
        raise ModelRefused(
            f'{key} = "{reference}" belongs to a script: only the processes that were forked from that script have it. '
            f'Run the script again, or name something that can be imported, such as "model.py:build".'
        )
    return OBJECTS[name]
