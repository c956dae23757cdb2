"""Prints what setup.py requires, with the extras named as arguments ("examples,test"), as a requirements file.

So the image's layer of dependencies is built without the code and is not rebuilt when the code changes. The script
replaces setuptools, which an interpreter's image need not contain.
"""

import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def required(setup: Path, extras: list[str]) -> list[str]:
    """Return the requirements that the file `setup` hands to setuptools.

    Raises `KeyError` for an extra it does not have.
    """
    given: dict[str, Any] = {}
    stand_in = ModuleType("setuptools")
    stand_in.setup = given.update  # type: ignore[attr-defined]
    stand_in.find_packages = lambda *_, **__: []  # type: ignore[attr-defined]  # the code is not there
    sys.modules["setuptools"] = stand_in
    runpy.run_path(str(setup))
    return [*given["install_requires"], *(line for extra in extras for line in given["extras_require"][extra])]


if __name__ == "__main__":
    names = [name for argument in sys.argv[1:] for name in argument.split(",") if name]
    print(*required(Path("setup.py"), names), sep="\n")
