"""Features: objects that change how a run is compiled and what its stages compute.

    refuses(plan)                    before anything is loaded      conflicts with the rest of the plan
    lower(program)                   once per compiled program      adds operations and queues
    handlers(stage)                  once per stage                 computes the operations that `lower` has added
    around(stage, kind, compute)     once per stage and kind        wraps the stage's computation of one kind
    state(stage), restore            at each snapshot               the feature's part of the snapshot

Every method does nothing until a subclass overrides it. Hooks are composed before the first microbatch: for a kind
whose computation no feature wraps, the composed function is the stage's own, so an absent feature costs nothing.

A list of features has an order, the outermost first. `outside` and `inside` declare it where it matters:

    recorder ( skipping ( the stage's own computation ) )        Recorder.outside = ("skipping",)
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from types import CodeType, TracebackType
from typing import Any, Protocol

from .errors import ExitCode, StagelineError, describe_error, raised_by_user_code
from .tree import Tree


class Operation(Protocol):
    """Entry of a worker's program, as features see it."""

    @property
    def kind(self) -> str:
        """Kind of the operation, such as "F", by which its handler is found."""

    @property
    def stage(self) -> int:
        """Stage that the operation is computed for; a replica's own number where the stage has several."""

    @property
    def step(self) -> int:
        """Step that the operation is part of, from 0."""

    @property
    def microbatch(self) -> int:
        """Microbatch of the step, from 0; 0 where the operation is of the whole step."""


Compute = Callable[[Any, Sequence[Tree]], Tree]  # of an operation and what it received from its queues


class FeatureRefused(StagelineError):
    """Error that a list of features cannot be used together.

    Mend: List each feature once, and name as neighbours only features of this run.

    Example: two features are called noise: list it once, or give one another name
    """

    error_code = "SL107"
    exit_code = ExitCode.REFUSED


class FeatureFailed(StagelineError):
    """Error that a hook of a feature raised.

    Mend: Mend the line of the feature that the message names.

    Example: the feature noise failed in 1F3: ValueError: no scale (noise.py, line 20, in around)
    """

    error_code = "SL210"


class Feature:
    """Feature of a run whose hooks do nothing. A subclass overrides the hooks that it needs."""

    name = "Feature"  # by which errors and other features call it; by default the class's
    inside: Collection[str] = ()  # names of features that wrap this one
    outside: Collection[str] = ()  # names of features that this one wraps
    only_trains = False  # if true, forwards of an evaluation are computed without it

    def __init_subclass__(cls) -> None:
        """Name the subclass after its class unless it has a `name` of its own."""
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def refuses(self, plan: Any) -> Iterator[Any]:
        """Yield a `PlanError` for each key of `plan` that this feature cannot be combined with."""
        return iter(())

    def lower(self, program: Any) -> Any:
        """Return `program` with the operations and queues that this feature adds. Does not change `program`."""
        return program

    def handlers(self, stage: Any) -> Mapping[str, Compute]:
        """Return the functions that compute this feature's own operations on `stage`, by kind."""
        return {}

    def around(self, stage: Any, kind: str, compute: Compute) -> Compute:
        """Return the function that computes operations of `kind` on `stage`.

        Return `compute` itself if this feature changes nothing.

        Args:
            stage: The stage that computes.
            kind: The kind of the operations. The hook is called once for each kind.
            compute: Computes an operation from what it received, with every feature inside of this one.
        """
        return compute

    def state(self, stage: Any) -> Tree:
        """Return a copy of what this feature keeps of `stage`, for a snapshot; None if it keeps nothing."""
        return None

    def restore(self, stage: Any, state: Tree) -> None:
        """Continue from `state`, which the method `state` returned in this process or another."""


def ordered(features: Iterable[Feature], known: Collection[str] = ()) -> list[Feature]:
    """Return `features` sorted by their declared order; features without a declared order stay as they were given.

    Args:
        features: The features of a run, in the order in which they are listed.
        known: Names of features that the run does without: they may be named as neighbours, too.

    Returns:
        The features, the outermost first: each feature stands before every feature that it is outside of.

    Raises:
        FeatureRefused: Two features have one name, a neighbour is unknown, or the declarations contradict each other.
    """
    named: dict[str, Feature] = {}
    for feature in features:
        if feature.name in named:
            raise FeatureRefused(f"two features are called {feature.name}: list it once, or give one another name")
        named[feature.name] = feature
    before: dict[str, set[str]] = {name: set() for name in named}  # the features that must come before each
    for name, feature in named.items():
        for neighbour in (*feature.inside, *feature.outside):
            if neighbour not in named and neighbour not in known:
                raise FeatureRefused(
                    f"the feature {name} names {neighbour} as its neighbour, which is no feature of this run; there "
                    f"are {', '.join(dict.fromkeys((*named, *known)))}"
                )
        before[name].update(named.keys() & feature.inside)
        for inner in named.keys() & feature.outside:
            before[inner].add(name)
    found: list[Feature] = []
    while before:
        first = next((name for name, others in before.items() if not others & before.keys()), None)
        if first is None:
            raise FeatureRefused(f"the order of features contradicts itself: {' outside '.join(_circle(before))}")
        del before[first]
        found.append(named[first])
    return found


def compose(features: Sequence[Feature], stage: Any, kind: str, compute: Compute) -> Compute:
    """Return what computes operations of `kind` on `stage`: `compute` within the `features`.

    An exception of a hook becomes a `FeatureFailed`; one that `compute` raised passes as it is.

    Args:
        features: Features of the run, the last one innermost.
        stage: Stage that computes.
        kind: Kind of the operations.
        compute: The stage's own computation of such operations.
    """
    for feature in reversed(features):
        where = f"around() for operations of kind {kind}"
        with naming(feature, where):
            with_it = feature.around(stage, kind, compute)
        _demand_function(feature, where, with_it)
        if with_it is not compute:
            named = _named(feature, with_it, compute)
            compute = _in_training(named, compute) if feature.only_trains else named
    return compute


def all_handlers(
    features: Sequence[Feature],
    stage: Any,
    core: Mapping[str, Compute],
    demand: Callable[[Any, Tree], None] = lambda operation, result: None,
) -> dict[str, Compute]:
    """Return what computes each kind of operation on `stage`, with the features around it that wrap it.

    Args:
        features: Features of the run, the outermost first.
        stage: Stage that computes.
        core: Handlers of the stage itself, by the kinds of operations.
        demand: Raises an exception if the result of a feature's handler cannot be used, given the operation and it.

    Raises:
        FeatureRefused: A kind has two handlers, or a handler or wrapper is no function.
        FeatureFailed: A feature's `handlers` or `around` raised.
    """
    found, owners = dict(core), dict.fromkeys(core, "the stage itself")
    for feature in features:
        with naming(feature, "handlers()"):
            added = dict(feature.handlers(stage))
        for kind, handler in added.items():
            _demand_function(feature, f"handlers() for the kind {kind}", handler)
            if kind in owners:
                raise FeatureRefused(
                    f"the feature {feature.name} computes operations of kind {kind}, and so does {owners[kind]}: give "
                    f"them another kind"
                )
            found[kind], owners[kind] = _named(feature, _checked(handler, demand), None), feature.name
    return {kind: compose(features, stage, kind, compute) for kind, compute in found.items()}


def demand_hooks(feature: Feature) -> None:
    """Raise `FeatureRefused` if a method of `feature` is named nearly as a hook is, so that nothing would call it."""
    hooks = [name for name in vars(Feature) if not name.startswith("_") and callable(getattr(Feature, name))]
    own = (name for name in dir(type(feature)) if name not in hooks and not name.startswith("_"))
    for name in own:
        meant = get_close_matches(name, hooks, 1, cutoff=0.85)
        if meant and callable(getattr(type(feature), name)):
            raise FeatureRefused(
                f"the feature {feature.name} has a method {name}, which is no hook: did you mean {meant[0]}? Call a "
                f"method of its own _{name}"
            )


def states_of(features: Iterable[Feature], stage: Any) -> dict[str, Tree]:
    """Return the parts that `features` have in a snapshot of `stage`, by the features' names.

    A feature that keeps nothing has no part. Raises `FeatureFailed` if a `state` hook fails.
    """
    found: dict[str, Tree] = {}
    for feature in features:
        with naming(feature, "state()"):
            state = feature.state(stage)
        if state is not None:
            found[feature.name] = state
    return found


def restore_states(features: Iterable[Feature], stage: Any, states: Mapping[str, Tree]) -> None:
    """Restore the parts of a snapshot of `stage` to the features that have one.

    Args:
        features: The features of the run.
        stage: The stage that continues from the snapshot.
        states: The return value of `states_of`, from this process or another.

    Raises:
        FeatureFailed: A `restore` hook failed.
    """
    for feature in features:
        if feature.name in states:
            with naming(feature, "restore()"):
                feature.restore(stage, states[feature.name])


@contextmanager
def naming(feature: Feature, where: str) -> Iterator[None]:
    """Return a context whose exceptions become a `FeatureFailed` that names `feature` and `where` in it."""
    try:
        yield
    except BaseException as error:
        if issubclass(type(error), StagelineError) or not raised_by_user_code(error):
            raise
        raise FeatureFailed(f"the feature {feature.name} failed in {where}: {describe_error(error)}") from error


def _demand_function(feature: Feature, where: str, hook: object) -> None:
    if not callable(hook):
        raise FeatureRefused(
            f"the feature {feature.name} returned {hook!r:.60} from {where}; expected a function of an operation and "
            "what it received"
        )


def _checked(handler: Compute, demand: Callable[[Any, Tree], None]) -> Compute:
    def checked(operation: Operation, received: Sequence[Tree]) -> Tree:
        result = handler(operation, received)
        demand(operation, result)
        return result

    return checked


def _named(feature: Feature, hook: Compute, inner: Compute | None) -> Compute:
    """Return `hook` with exceptions that name `feature`, unless they came through the code of `inner`."""

    def called(operation: Operation, received: Sequence[Tree]) -> Tree:
        try:
            return hook(operation, received)
        except BaseException as error:
            if issubclass(type(error), StagelineError) or not raised_by_user_code(error):
                raise
            if inner is not None and _code_of(inner) in _codes(error.__traceback__):
                raise
            raise FeatureFailed(f"the feature {feature.name} failed in {operation}: {describe_error(error)}") from error

    return called


def _in_training(hook: Compute, without: Compute) -> Compute:
    def called(operation: Any, received: Sequence[Tree]) -> Tree:
        return (without if operation.evaluates else hook)(operation, received)

    return called


def _code_of(compute: Compute) -> CodeType | None:
    function = getattr(compute, "__func__", compute)
    return getattr(function if hasattr(function, "__code__") else type(compute).__call__, "__code__", None)


def _codes(traceback: TracebackType | None) -> set[CodeType]:
    found = set()
    traceback = None if traceback is None else traceback.tb_next  # the first frame is the one that caught it
    while traceback is not None:
        found.add(traceback.tb_frame.f_code)
        traceback = traceback.tb_next
    return found


def _circle(before: Mapping[str, set[str]]) -> list[str]:
    """Return names of features, each of which has to come before the next, the last of them before the first."""
    way = [next(iter(before))]
    while way[-1] not in way[:-1]:
        way.append(min(before[way[-1]] & before.keys()))
    return way[way.index(way[-1]) :][::-1]
