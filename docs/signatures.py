"""Prepares docstrings and signatures for the reference of the Python API.

mkdocstrings loads these extensions of griffe when the site is built (zensical.toml).
"""

import re
from typing import Any

from griffe import (
    Attribute,
    ExprSubscript,
    ExprTuple,
    Extension,
    Module,
    Object,
    Parameter,
    ParameterKind,
    Parameters,
)

EXAMPLE = re.compile(r"^Example:\n((?: {4}.*\n?|\n)+)", re.MULTILINE)


class Examples(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Mark examples as code, and leave out the docstring of a constructor whose class documents its arguments."""
        if obj.docstring is None:
            return
        obj.docstring.value = EXAMPLE.sub(_as_code, obj.docstring.value)
        if obj.name == "__init__" and "\n" not in obj.docstring.value:
            obj.docstring = None


def _as_code(example: re.Match[str]) -> str:
    return f"Example:\n    ```python\n{example[1].rstrip()}\n    ```\n\n"


class LineSignature(Extension):
    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Give `Line` the signature that callers see: its `__init__` takes all arguments in one value."""
        arguments = pkg["workers.script.arguments"]
        model = _parameter(arguments["LineCall.model"], ParameterKind.positional_or_keyword)
        options = arguments["LineOptions"].attributes.values()
        init = pkg["workers.script.line.Line.__init__"]
        parameters = (model, *(_parameter(field, ParameterKind.keyword_only) for field in options))
        init.parameters = Parameters(init.parameters["self"], *filter(None, parameters))


def _parameter(field: Attribute, kind: ParameterKind) -> Parameter | None:
    """Return the parameter that sets a field, without its row in the table of arguments; None for a property."""
    match field.annotation:
        case ExprSubscript(left=left, slice=ExprTuple(elements=[annotation, *_])) if str(left) == "Annotated":
            return Parameter(field.name, annotation=annotation, kind=kind, default=field.value)
    return None
