"""What each cut of a plan's model gives away: measured after some steps of training, with and without a defence.

The one who looks is given what crosses the cut for all rows, the inputs of three quarters of them, and the label of one
row of each class: a server with data of its own and the client's part of the model, for example. What can be told of
the other rows is measured.
"""

from collections.abc import Callable, Iterator

from torch import Tensor, int64, nn

from stageline.pipeline.audit import decoders
from stageline.pipeline.audit.defences import AddNoise, ClipRows, EqualNormGradients
from stageline.pipeline.audit.dependence import by_chance, centred_distances, correlation
from stageline.pipeline.audit.label_leak import told_by_direction, told_by_norm
from stageline.pipeline.audit.png import sheet
from stageline.pipeline.data import Batch, Source, rows
from stageline.pipeline.errors import DataError, ModelRefused
from stageline.pipeline.model.cut import build_segments
from stageline.pipeline.model.loading.load import load_source
from stageline.pipeline.plan import Plan
from stageline.pipeline.tree import Tree, concatenate, map_tensors, tensors

from .audited_model import AuditedModel, side_by_side
from .report import AuditChoice, AuditReport, CutAudit

SHOWN = 8  # images in a line of a picture
LEAST = 20  # rows

Picture = Tensor  # uint8 [height, width, 3]
Found = Callable[[CutAudit, Picture | None], object]


def audit(plan: Plan, choice: AuditChoice, found: Found = lambda cut, picture: None) -> AuditReport:
    """`found` is told each cut with its picture: the originals, what the linear decoder told of them, and what the
    network did; None where inputs are no images.

    Raises `ModelRefused`, `DataError` or `PlanRefused` for what cannot be trained or measured.
    """
    whole = _in_one_stage(plan)
    source = load_source(whole)
    sample = _sample(source, choice.sampled)
    count = rows(sample)
    if count < LEAST:
        raise DataError(f"{plan.data.origin} gives {count} rows; an audit needs {LEAST} at least")
    layers = sum(len(part.names) for part in build_segments(whole))
    trained = count - count // 4
    results = []
    for cut in _cuts(choice, layers):
        for model, defence in _defended(whole, cut, sample, choice):
            model.train(source, choice.steps)
            score = None if source.held_out() is None else model.score()
            told, picture = _told(model, defence, sample, trained, score)
            results.append(told)
            found(told, picture)
    measure = None if source.held_out() is None else next(iter(plan.metric_names), "loss")
    return AuditReport("audit/1", choice.steps, trained, count - trained, measure, results)


def _in_one_stage(plan: Plan) -> Plan:
    """The audit cuts the model itself."""
    model = plan.model.model_copy(update={"cut": None, "stages": None, "balance": "parameters", "stage_memory": None})
    return plan.model_copy(update={"model": model, "workers": (), "stage": None})


def _cuts(choice: AuditChoice, layers: int) -> tuple[int, ...]:
    if wrong := [cut for cut in choice.cuts if not 0 < cut < layers]:
        raise ModelRefused(f"there is no cut before layer {wrong[0]}: layers 1 to {layers - 1} may begin a stage")
    return choice.cuts or tuple(range(1, layers))


def _defended(plan: Plan, cut: int, sample: Batch, choice: AuditChoice) -> Iterator[tuple[AuditedModel, str]]:
    """The model with each defence, as the factory makes it, and the defence's name."""
    yield AuditedModel(plan, cut), "none"
    if choice.defended:
        norm = choice.clip * float(AuditedModel(plan, cut).features(sample[0]).norm(dim=1).median())
        defences: dict[str, nn.Module] = {
            f"noise {choice.noise:g}": AddNoise(choice.noise),
            f"clip {norm:.3g}": ClipRows(norm),
            "equal norms": EqualNormGradients(),
        }
        for name, defence in defences.items():
            model = AuditedModel(plan, cut)
            model.defence = defence
            yield model, name


def _told(
    model: AuditedModel, defence: str, sample: Batch, trained: int, score: float | None
) -> tuple[CutAudit, Picture | None]:
    """What is told of the rows after the first `trained`, and the picture of that."""
    inputs, targets = sample
    crossing, gradients = model.crossing(sample)
    original, wanted = side_by_side(inputs, rows(sample), "the audit"), decoders.small(_images(inputs))
    distances = centred_distances(original), centred_distances(crossing)
    features = decoders.scaled(crossing, trained)
    linear = decoders.decoded_linearly(features, wanted, trained)
    network = decoders.decoded_by_network(features, wanted, trained)
    tested, guess = wanted[trained:], wanted[:trained].mean(0)
    classes = targets if isinstance(targets, Tensor) and targets.dtype is int64 and targets.dim() == 1 else None
    told = CutAudit(
        cut=model.cut,
        layer=model.layer,
        features=crossing.shape[1],
        defence=defence,
        dependence=correlation(*distances),
        by_chance=by_chance(*distances),
        linear=decoders.explained(linear, tested, guess),
        network=decoders.explained(network, tested, guess),
        by_norm=None if classes is None else told_by_norm(gradients, classes),
        by_direction=None if classes is None else told_by_direction(gradients, classes),
        score=score,
    )
    return told, _picture(tested, linear, network)


def _images(inputs: Tree) -> Tensor:
    """float32 [rows, channels, height, width] of a single tensor of images, else [rows, features]."""
    match tensors(inputs):
        case [one] if one.dim() == 4 and one.is_floating_point():
            return one.float()
        case _:
            return side_by_side(inputs, rows(inputs), "the audit")


def _sample(source: Source, count: int) -> Batch:
    """The first `count` rows of the first epoch, or all."""
    found: list[Batch] = []
    for step in range(source.steps_per_epoch):
        found.append(source.batch(step))
        if sum(map(rows, found)) >= count:
            break
    inputs, targets = (concatenate([batch[side] for batch in found]) for side in (0, 1))
    return map_tensors(lambda t: t[:count], inputs), map_tensors(lambda t: t[:count], targets)


def _picture(tested: Tensor, linear: Tensor, network: Tensor) -> Picture | None:
    if tested.dim() != 4 or tested.shape[1] not in (1, 3):
        return None
    low, high = tested.min(), tested.max()
    return sheet([(each[:SHOWN] - low) / (high - low).clamp(min=1e-12) for each in (tested, linear, network)])
