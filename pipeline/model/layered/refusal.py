"""Errors for models that torch.export cannot trace, with the line of the model's code that is the reason."""

import linecache
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_tb

import torch

from stageline.pipeline.code_lines import CodeLine, users_line
from stageline.pipeline.errors import ModelRefused, describe_error, error_text, raised_by_user_code
from stageline.pipeline.tree import Tree

_TORCH = f"{Path(torch.__file__).parent}/"


def does_not_fit(model: torch.nn.Module, inputs: Tree, own: str) -> ModelRefused:
    """Return the error for an example with which `model` itself raises an error.

    Args:
        model: The model.
        inputs: The example.
        own: Text of the model's error.
    """
    return ModelRefused(
        f"the example that the model is traced with does not fit: the {type(model).__name__}, called with it, raises "
        f"{own.rstrip('.')}. Give inputs that it takes, as an example to traced() or as a Line's first batch, or "
        f"correct its forward{_of_arguments(inputs) if own.startswith('TypeError') and 'argument' in own else ''}"
    )


def _of_arguments(inputs: Tree) -> str:
    """Return how `inputs` become arguments of a call, and how they stay one, as the end of an error's text."""
    match inputs:
        case dict():
            return ". A dict's entries are keyword arguments: a forward that takes the dict itself gets ({...},)"
        case tuple() | list():
            return ". The entries of a tuple or list are its arguments: a forward that takes it itself gets ([...],)"
    return ". A forward of several arguments gets a tuple, or a dict with their names"


def demand_python(model: torch.nn.Module) -> None:
    """Raise `ModelRefused` for a model of which there is no Python code to trace."""
    if hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:
        raise ModelRefused(
            "the model is compiled (torch.compile), and stages call its layers one by one, which a trace finds only in "
            "the model itself: give the model as it was before"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelRefused(
                f"{name or 'the model'} is compiled by torch.jit, and a trace needs its Python code: give the module "
                f"as it was before"
            )


def refused(model: torch.nn.Module, error: Exception) -> ModelRefused:
    """Return the error for a model that torch.export cannot trace because of `error`."""
    reason = " ".join(error_text(error).split("\n\n")[0].split()).rstrip(".")
    return ModelRefused(
        f"torch.export cannot trace the {type(model).__name__}: {reason}{_place(error)}. Change its forward, or list "
        f"its layers yourself: stageline.Layers (docs/guides/models.md)"
    )


def own_error(called: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> str:
    """Return the first line of what `called` raises for the tensors `given`, untraced; "" if it raises nothing.

    Also "" if its parameters have no memory. The buffers are as before.
    """
    state = [*called.named_parameters(), *called.named_buffers()]
    if any(tensor.is_meta for _, tensor in state):
        return ""
    buffers = {name: buffer.clone() for name, buffer in called.named_buffers()}
    try:
        torch.func.functional_call(called, buffers, given)
    except Exception as error:
        if not raised_by_user_code(error):
            raise
        return describe_error(error).splitlines()[0]
    return ""


def _place(error: BaseException) -> str:
    """Return the innermost line of the model's code that `error` came through, as text; "" if it came through none.

    An example is ` (/home/anna/net/model.py, line 12, in forward: if x.abs().max() > 5:)`.
    """
    line = next((found for each in _chain(error) if (found := _line(each))), None)
    if line is None:
        return ""
    source = linecache.getline(line.file, line.line).strip()
    return f" ({line.place}, in {line.function}{f': {source}' if source else ''})"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _line(error: BaseException) -> CodeLine | None:
    walked = walk_tb(error.__traceback__)
    found = [CodeLine(frame.f_code.co_filename, number, frame.f_code.co_name) for frame, number in walked][::-1]
    libraries = (line for line in found if "site-packages" in line.file and not line.file.startswith(_TORCH))
    return users_line(found) or next(libraries, None)
