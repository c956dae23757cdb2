"""Timetables as SVG, of planned and of measured schedules."""

import runpy
from xml.etree import ElementTree

import pytest

from stageline.pipeline.program import Costs, Timed, check_schedule
from stageline.pipeline.schedule import Action, Kind, make_schedule, schedule_names, v_shaped
from stageline.workers.extras.drawing import draw_svg
from support.paths import DOCS
from support.shapes import looped
from support.timetables import measured, planned

SVG = "{http://www.w3.org/2000/svg}"


def drawn(image: str) -> ElementTree.Element:
    return ElementTree.fromstring(image)  # noqa: S314 (our own)


@pytest.mark.parametrize("name", schedule_names())
def test_an_image_has_a_box_with_a_hover_text_for_every_action(name: str) -> None:
    window = (4, 3, 2, 1) if name == "window" else None
    placement = v_shaped(2) if name in ("zb-v", "dualpipe-v") else looped(2, 2)
    verdict = check_schedule(make_schedule(name, placement, 4, window=window), Costs.even(4, update=1))
    boxes = drawn(draw_svg(verdict.timed, title=name)).findall(f"{SVG}g")
    assert len(boxes) == len(verdict.timed)
    labels = [box.findtext(f"{SVG}title", "").split(":")[0] for box in boxes]
    assert sorted(labels) == sorted(str(each.action) for each in verdict.timed)


def test_boxes_lie_in_their_rows_in_order_and_within_the_image() -> None:
    for seed in range(20):
        root = drawn(draw_svg(measured(seed, workers=3), title="measured", seconds=True))
        rows: dict[str, list[tuple[float, float]]] = {}
        for box in root.findall(f"{SVG}g/{SVG}rect"):
            rows.setdefault(box.attrib["y"], []).append((float(box.attrib["x"]), float(box.attrib["width"])))
        assert len(rows) == 3
        for boxes in rows.values():
            assert boxes == sorted(boxes)
            assert all(x > 0 and x + width < float(root.attrib["width"]) for x, width in boxes)


def test_hovering_an_action_shows_its_details() -> None:
    root = drawn(draw_svg([Timed(1, Action(Kind.BACKWARD, 2, 7), 10.5, 10.75, step=4)], title="one", seconds=True))
    assert root.findtext(f"{SVG}g/{SVG}title") == (
        "2B7: backward of microbatch 7 at stage 2, step 4\nworker 1, 0 ms to 250 ms"
    )
    assert root.findtext(f"{SVG}g/{SVG}text") == "B7"


def test_a_title_is_text_and_never_markup() -> None:
    root = drawn(draw_svg(planned(), title='<script>"&'))
    assert root.findtext(f"{SVG}title") == '<script>"&'
    assert root.find(f".//{SVG}script") is None


def test_an_image_has_both_themes_and_needs_nothing_from_elsewhere() -> None:
    image = draw_svg(planned(), title="1F1B")
    assert "@media(prefers-color-scheme:dark)" in image
    assert "href" not in image
    assert "url(" not in image


def test_stages_of_a_worker_have_tones_of_their_own() -> None:
    root = drawn(draw_svg(check_schedule(make_schedule("1f1b", looped(2, 2), 2)).timed, title="two stages each"))
    tones = {
        (box.findtext(f"{SVG}title", "")[0], box.find(f"{SVG}rect").attrib["class"][-2:])  # type: ignore[union-attr]
        for box in root.findall(f"{SVG}g")
    }
    assert tones == {("0", "t0"), ("1", "t0"), ("2", "t1"), ("3", "t1")}


def test_an_image_of_nothing_is_still_an_image() -> None:
    assert drawn(draw_svg([], title="nothing yet")).findall(f"{SVG}g") == []


def test_the_documented_pictures_are_what_is_drawn() -> None:
    images = DOCS / "images"
    drawn_now = runpy.run_path(str(images / "draw.py"))["pictures"]()
    assert {image.name: image.read_text(encoding="utf-8") for image in images.glob("*.svg")} == drawn_now
