"""Gives the reference of `Line` the signature that callers see: its `__init__` takes all arguments in one value.

mkdocstrings loads this extension of griffe when the site is built (zensical.toml).
"""

from typing import Any

from griffe import Attribute, ExprSubscript, ExprTuple, Extension, Module, Parameter, ParameterKind, Parameters


class LineSignature(Extension):
    def on_package(self, *, pkg: Module, **_: Any) -> None:
        arguments = pkg["workers.script.arguments"]
        model = _parameter(arguments["LineCall.model"], ParameterKind.positional_or_keyword)
        options = arguments["LineOptions"].attributes.values()
        init = pkg["workers.script.line.Line.__init__"]
        parameters = (model, *(_parameter(field, ParameterKind.keyword_only) for field in options))
        init.parameters = Parameters(init.parameters["self"], *filter(None, parameters))
        init.docstring = None  # the class documents the arguments


def _parameter(field: Attribute, kind: ParameterKind) -> Parameter | None:
    """Return the parameter that sets a field, without its row in the table of arguments; None for a property."""
    match field.annotation:
        case ExprSubscript(left=left, slice=ExprTuple(elements=[annotation, *_])) if str(left) == "Annotated":
            return Parameter(field.name, annotation=annotation, kind=kind, default=field.value)
    return None
