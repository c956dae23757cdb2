"""Probes of all layers of a run: what they are trained on, what is refused, and what is warned of."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import pytest
import torch
from torch import Tensor

from stageline.workers.extras.recording.linear_probe import Pool
from stageline.workers.extras.recording.probe import ProbeChoice, ProbeRefused, probe
from stageline.workers.extras.recording.reading import Activations, NoTaps, TappedMicrobatch, Taps, TapsUnusable

COUNT = 200


@dataclass
class MadeTaps:
    """In place of a run's: layers "noise" and "signal", of which the second is the class, in each of two epochs."""

    targets: Activations | None
    signal: Tensor
    samples: Tensor | None
    layers: tuple[str, ...] = ("noise", "signal")
    unwritten: int = 0
    held_out: bool = False

    class run:  # noqa: N801  # a path, of which the name is read
        name = "made"

    def count(self, *, evaluation: bool = False) -> int:
        return 2 if evaluation is self.held_out else 0

    def microbatches(self, layer: str, *, evaluation: bool = False) -> Iterator[TappedMicrobatch]:
        for epoch in range(self.count(evaluation=evaluation)):
            noise = torch.randn(self.signal.shape, generator=torch.Generator().manual_seed(epoch))
            activations = noise if layer == "noise" else self.signal + 0.01 * noise
            yield TappedMicrobatch(epoch, 0, evaluation, activations, self.samples, self.targets)


def made(**changes: object) -> Taps:
    classes = torch.randint(3, (COUNT,), generator=torch.Generator().manual_seed(5))
    signal = torch.nn.functional.one_hot(classes, 3).float()
    return cast(Taps, replace(MadeTaps(10 * classes - 7, signal, torch.arange(COUNT)), **changes))


def test_the_layer_that_has_the_class_is_the_best() -> None:
    began: list[str] = []
    report = probe(made(), ProbeChoice(), began.append)
    assert began == [each.layer for each in report.layers] == ["noise", "signal"]
    assert (report.best.layer, report.best.score, report.best.features) == ("signal", 1.0, 3)
    assert report.layers[0].score < 0.6
    assert (report.score, report.classes, report.rows, report.samples) == ("accuracy", 3, "training", COUNT)
    assert report.train_rows + report.test_rows == 2 * COUNT
    assert report.warnings == ()
    assert probe(made(), ProbeChoice()) == report


def test_layers_rows_and_pools_are_chosen() -> None:
    assert [each.layer for each in probe(made(), ProbeChoice(layers=["sig*"])).layers] == ["signal"]
    assert probe(made(held_out=True), ProbeChoice()).rows == "evaluation"
    sequences = torch.nn.functional.pad(made().signal[:, None], (0, 0, 3, 0))  # type: ignore[attr-defined]
    for pool, features in ((Pool.LAST, 3), (Pool.FLATTEN, 12), (None, 3)):
        report = probe(made(signal=sequences), ProbeChoice(layers=["signal"], pool=pool))
        assert (report.best.features, report.best.score) == (features, 1.0)


def test_numbers_are_told_by_the_share_of_their_variance() -> None:
    wanted = made().signal.double() @ torch.tensor([1.0, 5.0, -2.0], dtype=torch.float64)  # type: ignore[attr-defined]
    report = probe(made(targets=wanted.float()), ProbeChoice())
    assert (report.score, report.classes, report.best.layer) == ("r2", None, "signal")
    assert report.best.score > 0.99
    assert report.best.baseline <= 0 < 0.3 > report.layers[0].score


def test_a_part_of_the_targets_is_chosen_by_its_place_or_its_name() -> None:
    classes = made().targets  # type: ignore[attr-defined]
    several = {"['label']": classes, "[1]": torch.ones(COUNT, 4, dtype=torch.int64)}
    assert probe(made(targets=several), ProbeChoice(target="label")).best.score == 1.0
    assert probe(made(targets=several), ProbeChoice(target="['label']")).best.score == 1.0
    with pytest.raises(ProbeRefused, match=r"the targets are \['label'\], \[1\]: say which with --target"):
        probe(made(targets=several), ProbeChoice())
    with pytest.raises(ProbeRefused, match=r'--target "box" is none of them'):
        probe(made(targets=several), ProbeChoice(target="box"))
    with pytest.raises(ProbeRefused, match=r"int64 \[400, 4\]; expected one class for each row"):
        probe(made(targets=several), ProbeChoice(target="1"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"targets": torch.ones(COUNT, dtype=torch.int64)}, r"all 400 rows have the class 1: a probe needs two"),
        ({"targets": torch.ones(COUNT)}, r"float32 \[400\], and the same for all rows"),
        ({"targets": torch.full((COUNT,), float("inf"))}, "and some are not finite"),
        ({"targets": torch.ones(COUNT, dtype=torch.complex64)}, r"complex64 \[400\]; expected one class"),
        ({"targets": None}, "no targets were stored"),
        (
            {"targets": torch.tensor([0, 1]), "signal": torch.ones(2, 3), "samples": torch.tensor([1, 2])},
            "2 samples are too few: none is left to choose the penalty with|2 samples are too few",
        ),
    ],
)
def test_what_no_probe_can_be_trained_on_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ProbeRefused, match=reason):
        probe(made(**changes), ProbeChoice())


def test_layers_and_rows_that_are_not_there_are_refused() -> None:
    with pytest.raises(NoTaps, match='no tapped layer matches "head"; there are noise, signal'):
        probe(made(), ProbeChoice(layers=["head"]))
    with pytest.raises(NoTaps, match="nothing of layer noise was stored there"):
        probe(made(), ProbeChoice(evaluation=True))


def test_layers_of_other_widths_for_other_rows_are_refused() -> None:
    class Ragged(MadeTaps):
        """Sequences as long as they are."""

        def microbatches(self, layer: str, *, evaluation: bool = False) -> Iterator[TappedMicrobatch]:
            for place, part in enumerate(super().microbatches(layer, evaluation=evaluation)):
                yield replace(part, activations=torch.ones(COUNT, 2 + place, 3))

    plain = made()
    ragged = cast(Taps, Ragged(plain.targets, plain.signal, plain.samples))  # type: ignore[attr-defined]
    with pytest.raises(TapsUnusable, match="returned 6 numbers for some rows and 9 for others: use --pool mean"):
        probe(ragged, ProbeChoice(pool=Pool.FLATTEN))


def test_what_makes_scores_doubtful_is_warned_of() -> None:
    [unknown] = probe(made(samples=None), ProbeChoice()).warnings
    assert "one that was seen twice may be trained on and tested on" in unknown
    [unwritten] = probe(made(unwritten=3), ProbeChoice()).warnings
    assert "3 microbatches are not yet written" in unwritten
    few = {"targets": torch.arange(30) % 2, "signal": torch.randn(30, 90), "samples": torch.arange(30)}
    wide, coarse = probe(made(**few), ProbeChoice()).warnings
    assert "2 of 2 layers have more features than there are rows to train on" in wide
    assert "rows to test on are few" in coarse
