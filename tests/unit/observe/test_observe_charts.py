from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from hasten.errors import HastenError, UsageError
from hasten.observe import confusion
from hasten.observe.plots import PlotRow, comparison_plot
from hasten.observe.svg import Series, grouped, line_chart, nice_ticks, number, stacked_bars

HOSTILE = "<script>alert('x')</script> & \"$\\frac{\" 日本"


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(svg).iter("text")]


def numbers(svg: str) -> list[float]:
    root = ElementTree.fromstring(svg)
    keys = ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height")
    return [float(node.get(key, "0")) for node in root.iter() for key in keys if key in node.attrib]


def line(*values: float, dots: bool = True) -> Series:
    return Series(name="loss", colour="--s1", points=tuple(enumerate(values, 1)), dots=dots)


@pytest.mark.parametrize(
    "values",
    [
        (1.0,), (0.0,), (-1.0,), (1.0, 1.0), (0.0, 0.0, 0.0), (3e-9, 2e-9), (1e12, 5.0),
        (-3.0, -2.0), (2.0, math.nan, 1.0), (math.inf, 1.0), (1.0, 2.0, 500.0), (7e-7, 1e3),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dots", [True, False])
def test_any_values_stay_inside_the_chart(values: tuple[float, ...], dots: bool):
    svg = line_chart("loss", [line(*values, dots=dots)], x_label="epoch")
    assert all(math.isfinite(n) and -1 <= n <= 461 for n in numbers(svg))


def test_a_value_that_is_not_finite_leaves_a_gap():
    svg = line_chart("loss", [line(3.0, math.nan, 2.0, 1.0)], x_label="epoch")
    path = ElementTree.fromstring(svg).find("path")
    assert path is not None
    assert (path.get("d", "").count("M"), path.get("d", "").count("L")) == (2, 1)


def test_nothing_finite_says_so():
    assert "no finite values to show" in line_chart("loss", [line(math.nan)], x_label="epoch")
    assert "nothing was timed" in stacked_bars("time", [], [], x_label="epoch")


def test_shares_are_shown_in_per_cent_and_never_beyond_the_whole():
    svg = line_chart("accuracy", [line(0.97, 1.0)], x_label="epoch", percent=True)
    ticks = [float(t[:-1]) for t in texts(svg) if t.endswith("%")]
    assert max(ticks) == 100
    assert "loss, 2: 100.00%" in svg


def test_names_are_escaped():
    hostile = Series(name=HOSTILE, colour="--s1", points=((1, 1.0), (2, 2.0)))
    for svg in (
        line_chart(HOSTILE, [hostile], x_label=HOSTILE),
        stacked_bars(HOSTILE, [HOSTILE, "b"], [hostile], x_label=HOSTILE),
        confusion.picture([[1, 1], [0, 1]], [HOSTILE, "b"]),
    ):
        root = ElementTree.fromstring(svg)
        assert not list(root.iter("script"))
        assert "<script" not in svg


def test_stacked_bars_stand_on_one_another():
    parts = [Series(name=n, colour="--s1", points=((0, v),)) for n, v in (("a", 2.0), ("b", 3.0))]
    root = ElementTree.fromstring(stacked_bars("time", ["1"], parts, x_label="epoch"))
    first, second = (node for node in root.iter("rect") if len(node))
    bottom = float(second.get("y", "0")) + float(second.get("height", "0"))
    assert bottom == pytest.approx(float(first.get("y", "0")), abs=0.11)
    ratio = float(second.get("height", "0")) / float(first.get("height", "0"))
    assert ratio == pytest.approx(1.5, rel=0.01)


@pytest.mark.parametrize("epochs", [1, 2, 40, 41, 80, 999])
def test_epochs_are_grouped_into_at_most_forty_bars_and_none_is_lost(epochs: int):
    groups = grouped(epochs)
    assert len(groups) <= 40
    assert [i for group in groups for i in group] == list(range(epochs))


def test_ticks_are_round_and_cover_the_range():
    assert nice_ticks(0, 1, 5) == [0, 0.25, 0.5, 0.75, 1]
    assert nice_ticks(1, 3, 6, whole=True) == [1, 2, 3]
    assert nice_ticks(5, 5, 5) == [5, 6]
    assert [number(v) for v in (0.25, 1000, 0.0, 3e-5, -2.0)] == [
        "0.25",
        "1,000",
        "0",
        "3e-05",
        "-2",
    ]


def test_class_figures():
    cat, dog, none = confusion.per_class([[6, 2, 0], [1, 3, 0], [0, 0, 0]], ["cat", "dog", "none"])
    assert (cat.images, cat.recall, cat.precision) == (8, 0.75, 6 / 7)
    assert cat.f1 == pytest.approx(2 * 0.75 * (6 / 7) / (0.75 + 6 / 7))
    assert (cat.confused_with, cat.confused_count) == ("dog", 2)
    assert (dog.confused_with, dog.confused_count) == ("cat", 1)
    assert none.images == 0
    assert math.isnan(none.recall)
    assert math.isnan(none.f1)
    assert none.confused_with == ""


def test_the_worst_pairs_come_first():
    matrix = [[5, 1, 4], [2, 5, 0], [0, 0, 5]]
    assert confusion.worst_pairs(matrix, ["a", "b", "c"], 2) == [("a", "c", 4), ("b", "a", 2)]


@pytest.mark.parametrize("classes", [1, 2, 20, 21, 60, 61, 200])
def test_matrices_of_any_size_are_pictures_of_bounded_size(classes: int):
    matrix = [[(i * j) % 3 for j in range(classes)] for i in range(classes)]
    svg = confusion.picture(matrix, [f"class {i}" for i in range(classes)])
    ElementTree.fromstring(svg)
    assert len(svg) < 1_500_000
    counts = [t for t in texts(svg) if t.isdigit()]
    assert bool(counts) == (classes <= 20 and any(map(any, matrix)))


def test_short_names_of_columns_stand_upright():
    matrix = [[1, 0], [0, 1]]
    assert "rotate" not in confusion.picture(matrix, ["0", "1"])
    assert "rotate(-90)" in confusion.picture(matrix, ["T-shirt/top", "1"])


def test_a_matrix_too_large_to_see_is_not_drawn():
    assert confusion.picture([[1] * 201] * 201, ["x"] * 201) == ""


@pytest.mark.filterwarnings("error")
def test_a_comparison_is_drawn_whatever_the_labels(tmp_path: Path):
    rows = [
        PlotRow(
            label=f"{HOSTILE} {'long ' * 30} {i}", images_per_s=math.nan if i == 3 else 10.0**i,
            low=9.0, high=11.0, accuracy=None if i == 2 else 0.5, group=f"$ {i % 8}",
        )
        for i in range(9)
    ]  # fmt: skip
    png, svg = tmp_path / "plot.png", tmp_path / "plot.svg"
    comparison_plot(rows, png=png, svg=svg, title=HOSTILE)
    with Image.open(png) as image:
        assert image.width == 1500
    ElementTree.parse(svg)
    first = svg.read_bytes()
    comparison_plot(rows, png=png, svg=svg, title=HOSTILE)
    assert svg.read_bytes() == first


def test_a_plot_grows_with_its_rows(tmp_path: Path):
    def height(count: int) -> int:
        rows = [PlotRow(label=str(i), images_per_s=1.0) for i in range(count)]
        comparison_plot(rows, png=tmp_path / "a.png", svg=tmp_path / "a.svg", title="t")
        with Image.open(tmp_path / "a.png") as image:
            return image.height

    assert height(60) - height(10) == 50 * 45


def test_plots_that_cannot_be_made_say_why(tmp_path: Path):
    with pytest.raises(UsageError, match="no rows"):
        comparison_plot([], png=tmp_path / "a.png", svg=tmp_path / "a.svg", title="t")
    with pytest.raises(HastenError, match=r"gone/a\.png"):
        comparison_plot(
            [PlotRow(label="a", images_per_s=1.0)],
            png=tmp_path / "gone" / "a.png", svg=tmp_path / "a.svg", title="t",
        )  # fmt: skip
