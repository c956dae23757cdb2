"""Types of the plan's keys: what each accepts, what the plan keeps of it, and what a refusal of its value asks for.

batch_size: Annotated[int, whole(1)]     64 -> 64     "many" -> "expected a whole number of at least 1, got text"
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    ValidatorFunctionWrapHandler,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from stageline.pipeline import addresses

from .names import name_of, nearest

T = TypeVar("T")
_LARGEST = 2**63 - 1  # TOML's integers have 64 bits
_SIZES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_TIMES = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
_RATES = {"kbit/s": 125.0, "Mbit/s": 125e3, "Gbit/s": 125e6, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}
_CODED_QUEUE = re.compile(r"(forward|backward)(-(0|[1-9][0-9]*))?")
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]+(?:/s)?)")
_REFERENCE = r".+\.py:\w+|\w+(\.\w+)+|script:\w+"
STYLES = ("colwise", "rowwise")  # how the weights of a layer are split over the processes of a group
_UNFIT = PydanticCustomError("unfit", "adds nothing to what is expected")


@dataclass(frozen=True, slots=True, eq=False)
class Accepts:
    """Annotation of a key: refusals ask for `what`, `schema` replaces the type's own, hints come from `names`."""

    what: str
    schema: CoreSchema | None = None
    names: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the type, or `schema`, with refusals that say what is expected."""
        return core_schema.no_info_wrap_validator_function(self._validated, self.schema or handler(source))

    def _validated(self, value: object, validate: ValidatorFunctionWrapHandler) -> object:
        try:
            return validate(value)
        except ValidationError as error:
            raise ValueError(f"expected {self.what}{self._hint(value, error)}") from None

    def _hint(self, value: object, error: ValidationError) -> str:
        found = error.errors(include_url=False, include_input=False)
        if reasons := [str(each["ctx"]["error"]) for each in found if each["type"] == "value_error"]:
            return f"; {reasons[0]}"
        if isinstance(value, list) and (odd := _odd_text(error)):
            return f', got "{odd}"; {nearest(odd, self.names)}'.rstrip("; ")
        if all(
            each["type"].endswith("_type") or (each["type"] == "literal_error" and not isinstance(value, str))
            for each in found
        ):
            return f", got {name_of(value)}"
        near = nearest(value, self.names) if isinstance(value, str) else ""
        return f"; {near}" if near else ""


def _odd_text(error: ValidationError) -> str:
    """Return the first text of a list that is not among the allowed texts; "" if there is none."""
    found = (each["input"] for each in error.errors(include_url=False) if each["type"] == "literal_error")
    return next((each for each in found if isinstance(each, str)), "")


class _NotNull:
    """Annotation of a key that may be left out, and is None then, but cannot be set to None, since TOML has no null."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler(source)["schema"]  # type: ignore[no-any-return]  # the schema inside a nullable one


Unset = Annotated[T | None, _NotNull()]  # None if the plan leaves the key out


def whole(least: int, most: int = _LARGEST) -> Accepts:
    """Return the annotation of a whole number, at least `least` and at most `most`."""
    bounds = f"of at least {least}" if most == _LARGEST else f"from {least} to {most}"
    return Accepts(f"a whole number {bounds}", core_schema.int_schema(strict=True, ge=least, le=most))


def one_of(names: Sequence[str]) -> Accepts:
    """Return the annotation of a text that is one of `names`."""
    return Accepts(_either([f'"{name}"' for name in names]), core_schema.literal_schema(list(names)), tuple(names))


def one_of_or_function(names: Sequence[str]) -> Accepts:
    """Return the annotation of one of `names`, or of the name of a user's function, such as "mine.py:reverse"."""
    function = core_schema.str_schema(strict=True, pattern=_whole_text(_REFERENCE), regex_engine="python-re")
    schema = core_schema.union_schema([core_schema.literal_schema(list(names)), function], mode="left_to_right")
    allowed = [*(f'"{name}"' for name in names), 'a function in a file, such as "mine.py:reverse"']
    return Accepts(_either(allowed), schema, tuple(names))


def address(schemes: Mapping[str, str], *names: str) -> Accepts:
    """Return the annotation of an address of one of `schemes`, or one of `names`. Dumps leave its password out."""
    return Accepts(
        _either([f'"{example}"' for example in (*names, *schemes.values())]),
        core_schema.no_info_after_validator_function(
            partial(_checked_address, schemes, names),
            core_schema.str_schema(strict=True),
            serialization=core_schema.plain_serializer_function_ser_schema(addresses.masked),
        ),
    )


def _matching(pattern: str, what: str) -> Accepts:
    # Python's engine makes the default names of runs, and its \w is not that of pydantic's own engine.
    return Accepts(what, core_schema.str_schema(strict=True, pattern=_whole_text(pattern), regex_engine="python-re"))


def _whole_text(pattern: str) -> str:
    """Return a pattern that all of a text must match: Python's $ alone would let a last line feed pass."""
    return rf"^({pattern})(?!\n)$"


def _either(names: Sequence[str]) -> str:
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _checked_address(schemes: Mapping[str, str], names: Collection[str], url: str) -> str:
    fault = None if url in names else addresses.fault(url, schemes)
    if fault is not None:
        raise ValueError(fault) if fault else _UNFIT
    return url


def _ascending(cut: str | tuple[int | str, ...]) -> str | tuple[int | str, ...]:
    """Return `cut`; refuse numbers that do not ascend. The order of names is known only where the model is."""
    numbers = [each for each in cut if isinstance(each, int)]
    if any(before >= after for before, after in pairwise(numbers)):
        raise _UNFIT
    return cut


def _quantity(kind: type[int | float], units: Mapping[str, float], value: object) -> object:
    """Return the number, of type `kind`, that a text such as "512MiB" writes; `value` itself if it is no text."""
    if not isinstance(value, str):
        return value
    found = _QUANTITY.fullmatch(value.strip())
    if found is None or found[2] not in units:
        meant = [unit for unit in units if found is not None and unit.lower() == found[2].lower()]
        hint = "".join(f'; did you mean "{found[1]}{unit}"?' for unit in meant[:1] if found is not None)
        raise ValueError(f"units are {', '.join(units)}{hint}")
    return kind(float(found[1]) * units[found[2]])


def _no_float16(value: object) -> object:
    if value in ("fp16", "float16", "half"):
        raise ValueError(
            f"{value} requires loss scaling, which is not supported: the scale depends on the gradients of all stages"
        )
    return value


def _arguments(table: object) -> dict[str, object]:
    if not isinstance(table, Mapping):
        raise PydanticCustomError("table_type", "expected a table")
    arguments = {}
    for name, value in table.items():
        try:
            arguments[str(name)] = _argument(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return arguments


def _groups(given: object) -> tuple[Mapping[str, object], ...]:
    if not isinstance(given, list | tuple) or not given:
        raise PydanticCustomError("groups_type", "expected a list")
    return tuple(_group(place, each) for place, each in enumerate(given))


def _group(place: int, given: object) -> Mapping[str, object]:
    if not isinstance(given, Mapping):
        raise ValueError(f"group {place} is {name_of(given)}")
    match, settings = given.get("match"), {key: each for key, each in given.items() if key != "match"}
    patterns = [match] if isinstance(match, str) else match
    if not isinstance(patterns, list | tuple) or not patterns or not all(isinstance(each, str) for each in patterns):
        raise ValueError(f'group {place} requires match, patterns of parameter names, such as match = ["*.bias"]')
    if not settings or "params" in settings:
        raise ValueError(
            f"group {place} requires settings of the optimizer, such as weight_decay = 0.0, without params"
        )
    return {"match": list(patterns), **_arguments(settings)}


def _codecs(given: object) -> str | dict[str, str]:
    if isinstance(given, Mapping):
        for name, codec in given.items():
            if not _CODED_QUEUE.fullmatch(str(name)):
                raise ValueError(f'"{name}" is neither forward, backward nor a queue such as forward-1 or backward-0')
            _demand_codec(codec, f"{name} = ")
        return {str(name): str(codec) for name, codec in given.items()}
    if not isinstance(given, str):
        raise PydanticCustomError("codec_type", "expected a codec")
    _demand_codec(given, "")
    return given


def _demand_codec(codec: object, of: str) -> None:
    names = get_args(CodecName)
    if codec not in names:
        near = nearest(str(codec), names)
        raise ValueError(f"{of}{codec!r} is not a codec{'; ' + near if near else ''}")


def _styles(table: object) -> Mapping[str, str]:
    if not isinstance(table, Mapping) or not table:
        raise PydanticCustomError("table_type", "expected a table")
    for name, style in table.items():
        if style not in STYLES:
            raise ValueError(f"{name}: {style!r} is not a style; use {_either(STYLES)}")
    return {str(name): str(style) for name, style in table.items()}


def _argument(value: object) -> object:
    match value:
        case bool() | str():
            return value
        case int() if abs(value) > _LARGEST:
            raise ValueError("a whole number has at most 64 bits")
        case float() if not math.isfinite(value):
            raise ValueError(f"{value} is not a finite number")
        case int() | float():
            return value
        case list() | tuple():
            return [_argument(each) for each in value]
        case Mapping():
            return _arguments(value)
        case _:
            raise ValueError(
                f"{name_of(value)} cannot be sent to workers: write it as text, and parse it in the factory"
            )


CodecName = Literal["lossless", "bf16", "int8"]
Codecs = Annotated[
    CodecName | Mapping[str, CodecName],
    PlainValidator(_codecs, json_schema_input_type=CodecName | dict[str, CodecName]),
    Accepts('"lossless", "bf16" or "int8", or a table such as { forward = "int8", backward = "bf16" }'),
]
Name = Annotated[str, _matching(r"\w[\w.-]*", "a name of letters, digits and - _ .")]
Reference = Annotated[
    str,
    _matching(
        _REFERENCE,
        'a name in a file or a package, such as "model.py:build" or "torch.optim.SGD"',
    ),
]
Device = Annotated[str, _matching(r"[a-z]+(:\d+)?", 'a device such as "cpu" or "cuda:0"')]
PublicKeyText = Annotated[
    str,
    _matching(
        r"k1\.[A-Za-z0-9_-]{43}",
        "a public key, k1. and 43 characters, such as `stageline keys show` prints",
    ),
]
Folder = Annotated[Path, PlainSerializer(Path.as_posix), Accepts("a folder")]
WeightsPath = Annotated[Path, PlainSerializer(Path.as_posix), Accepts("the path of a file or folder of weights")]
ListPath = Annotated[Path, PlainSerializer(Path.as_posix), Accepts('the path of a CSV file, such as "schedule.csv"')]
Truth = Annotated[bool, Field(strict=True), Accepts("true or false")]
Autocast = Annotated[
    Literal["bf16"], BeforeValidator(_no_float16, json_schema_input_type=Literal["bf16"]), Accepts('"bf16"')
]
Every = Annotated[
    Literal["step", "epoch", "evaluation"] | Annotated[int, Field(strict=True, ge=1)],
    Accepts('"step", "epoch", "evaluation" or a number of steps of at least 1'),
]
EvaluationEvery = Annotated[
    Literal["epoch"] | Annotated[int, Field(strict=True, ge=1)],
    Accepts('"epoch" or a number of steps of at least 1'),
]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False), Accepts("a number above 0, such as 1.0")]
Decay = Annotated[
    float,
    Field(strict=True, ge=0, le=1, allow_inf_nan=False),
    Accepts("a number from 0 to 1, such as 0.999"),
]
Size = Annotated[
    int,
    Field(strict=True, ge=1, le=_LARGEST),
    BeforeValidator(partial(_quantity, int, _SIZES), json_schema_input_type=int | str),
    Accepts('a size in bytes of at least 1, such as 1048576 or "512MiB"'),
]
Seconds = Annotated[
    float,
    Field(strict=True, gt=0, allow_inf_nan=False),
    BeforeValidator(partial(_quantity, float, _TIMES), json_schema_input_type=float | str),
    Accepts('a time in seconds, such as 10, "10s" or "250ms"'),
]
Bandwidth = Annotated[  # bytes a second
    float,
    Field(strict=True, gt=0, allow_inf_nan=False),
    BeforeValidator(partial(_quantity, float, _RATES), json_schema_input_type=float | str),
    Accepts('a bandwidth in bytes a second, such as 1e6 or "50Mbit/s"'),
]
_LayerNumber = Annotated[int, whole(1)]
_LayerName = Annotated[str, Field(strict=True, min_length=1)]
Cut = Annotated[
    Annotated[tuple[_LayerNumber | _LayerName, ...], Field(min_length=1)] | Literal["auto"],
    AfterValidator(_ascending),
    Accepts(
        '"auto" or a list of ascending layer numbers from 1 on, such as [2, 4], or of layer names, such as '
        '["encoder.layer.6"]'
    ),
]
_Part = Annotated[str, Field(strict=True, min_length=1)] | Annotated[int, Field(strict=True)]
Target = Annotated[  # parts of a sample, or of a batch
    _Part | Annotated[tuple[_Part, ...], Field(min_length=1)],
    Accepts('a part of a sample, such as "label", 1 or ["box", "label"], or a function such as "data.py:split"'),
]
Groups = Annotated[  # groups of parameters, each with settings of the optimizer
    tuple[Mapping[str, object], ...],
    PlainValidator(_groups, json_schema_input_type=list[dict[str, object]]),
    PlainSerializer(list, return_type=list[dict[str, object]]),
    Accepts('a list of tables such as { match = ["*.bias", "*norm*"], weight_decay = 0.0 }'),
]
Recomputed = Annotated[
    Literal["stage", "layers"] | Annotated[tuple[_LayerName, ...], Field(min_length=1)],
    Accepts('"stage", "layers" or a list of patterns of names such as ["transformer.h.*.mlp"]'),
]
RecomputedOfStage = Annotated[
    Literal["stage", "layers", "nothing"] | Annotated[tuple[_LayerName, ...], Field(min_length=1)],
    Accepts('"stage", "layers", "nothing" or a list of patterns of names such as ["transformer.h.*.mlp"]'),
]
_Offloadable = Literal["activations", "weights", "optimizer"]
Offloaded = Annotated[
    tuple[_Offloadable, ...],
    Accepts('a list of "activations", "weights", "optimizer"', names=get_args(_Offloadable)),
]
Workers = Annotated[  # numbers of workers
    tuple[Annotated[int, whole(0)], ...], Accepts("a list of workers such as [0, 2]")
]
Styles = Annotated[  # styles by patterns of the names of layers
    Mapping[str, str],
    PlainValidator(_styles, json_schema_input_type=dict[str, Literal["colwise", "rowwise"]]),
    Accepts('a table of names and styles such as { "*.linear1" = "colwise", "*.linear2" = "rowwise" }'),
]
Argument = Annotated[object, PlainValidator(_argument), Accepts("an argument that TOML can write")]
Options = Annotated[  # keyword arguments for a user's factory
    Mapping[str, object],
    PlainValidator(_arguments, json_schema_input_type=dict[str, object]),
    Accepts("a table of arguments"),
]


class Section(BaseModel):
    """A table of a plan file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FactorySection(Section):
    """A table whose keys, but for `factory`, are keyword arguments for the factory."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Argument]

    @property
    def options(self) -> Options:
        """Keyword arguments for the factory."""
        return self.__pydantic_extra__
