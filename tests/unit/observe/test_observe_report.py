from __future__ import annotations

import base64
import io
import math
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from hasten.errors import HastenError, UsageError
from hasten.observe.records import EpochRecord, StepRecord
from hasten.observe.report import ReportData, SamplePrediction, render, write_report
from hasten.observe.verdict import Verdict

HOSTILE = "</style></title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{7*7}}"
PHASES = {"wait": 1.0, "copy": 0.5, "forward": 3.0, "backward": 5.0, "optimizer": 1.0, "other": 0.5}


def png(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (side, side), 128).save(file, "png")
    return file.getvalue()


def epoch(number: int, **changes: object) -> EpochRecord:
    record = EpochRecord(
        epoch=number, step=100 * number, loss=1 / number, val_loss=1.1 / number,
        val_accuracy=1 - 0.5 / number, seconds=11.0, images_per_s=900.0, phases=PHASES,
        learning_rate=0.1,
    )  # fmt: skip
    return replace(record, **changes)  # type: ignore[arg-type]


def step(number: int) -> StepRecord:
    return StepRecord(
        epoch=1, step=number, batch=number, loss=2.0, learning_rate=0.1, images_per_s=1.0,
        seconds=1.0,
    )  # fmt: skip


FULL = ReportData(
    run="first",
    model="small",
    dataset="digits",
    device="CPU, 2 cores",
    epochs=[epoch(i) for i in (1, 2, 3)],
    steps=[step(i) for i in range(10, 300, 10)],
    planned_epochs=3,
    seconds=34.5,
    images_per_s=900.0,
    saturation=0.97,
    val_accuracy=0.8333,
    parameters=32998,
    train_images=1437,
    val_images=360,
    classes=("cat", "dog"),
    confusion=[[30, 2], [4, 24]],
    samples=[
        SamplePrediction(png=png(8), label="cat", predicted="cat", probability=0.987),
        SamplePrediction(png=png(300), label="dog", predicted="cat", probability=0.6, name="7.png"),
    ],
    verdict=Verdict(
        bound_by="compute", share=0.82, evidence=("saturation 97%",), advice="--precision auto",
        expected_gain=1.7,
    ),
    feed="gather - tensors in memory",
    precision="bfloat16",
    notes=["1 file was skipped"],
    settings={"epochs": 3, "lr": 0.1, "nested": {"a": [1, 2]}, "none": None},
    versions={"torch": "2.13.0"},
    command="hasten train --epochs 3",
    resume_command="hasten train --resume runs/first",
    finished="5 January 2026",
)  # fmt: skip


class Page(HTMLParser):
    """Collects tags and the text that is shown; checks that tags close in order."""

    VOID = frozenset({"meta", "link", "img", "br"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, f"left open: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += data


def test_the_page_holds_what_the_run_was():
    page = Page(render(FULL))
    for part in (
        "83.33%", "34.5 s", "900", "97%", "32,998 parameters", "Bound by compute",
        "82% of the time",
        "--precision auto", "hasten train --epochs 3", "hasten train --resume runs/first",
        "bfloat16", "gather - tensors in memory", "1 file was skipped", "2.13.0", "a=1, 2",
        "Most frequent mistakes", "validation accuracy", "epochs, best 3", "93.8%",
    ):  # fmt: skip
        assert part in page.text, part
    labels = [attributes.get("aria-label") or "" for tag, attributes in page.tags if tag == "svg"]
    assert [label.split()[0] for label in labels] == ["Loss", "Validation", "Seconds", "Confusion"]
    assert "waiting for data 9%, copy 5%, compute 82%, other 5%" in labels[2]


def test_nothing_is_fetched_and_nothing_is_run():
    html = render(FULL)
    page = Page(html)
    for tag, attributes in page.tags:
        assert tag not in {"script", "iframe", "object", "embed", "base", "form"}
        for name in ("src", "href", "data", "srcset", "action", "xlink:href"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")]
    assert "url(" not in html
    assert "@import" not in html
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv"))
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def test_images_are_in_the_page_and_small_ones_keep_their_pixels():
    images = [attributes for tag, attributes in Page(render(FULL)).tags if tag == "img"]
    wrong, right = images
    assert wrong["alt"] == "dog, predicted cat"
    assert wrong["title"] == "7.png"
    assert wrong.get("class") is None
    assert right["class"] == "pixelated"
    assert base64.b64decode((right["src"] or "").partition(",")[2]) == png(8)


def test_hostile_names_are_text():
    record = SamplePrediction(
        png=b"not a png", label=HOSTILE, predicted="dog", probability=math.nan, name=HOSTILE
    )
    data = replace(
        FULL, run=HOSTILE, model=HOSTILE, dataset=HOSTILE, device=HOSTILE, classes=(HOSTILE, "dog"),
        samples=[record], feed=HOSTILE, notes=[HOSTILE], settings={HOSTILE: HOSTILE},
        versions={HOSTILE: HOSTILE}, command=HOSTILE, resume_command=HOSTILE, stopped=HOSTILE,
        verdict=replace(FULL.verdict, evidence=(HOSTILE,), advice=HOSTILE),  # type: ignore[type-var]
    )  # fmt: skip
    page = Page(render(data))
    assert not [tag for tag, _ in page.tags if tag == "script"]
    assert all("onerror" not in attributes for _, attributes in page.tags)
    assert "49" not in page.text
    assert page.text.count(HOSTILE) >= 12


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": [], "steps": [], "verdict": None, "confusion": None, "samples": ()},
        {"epochs": [], "verdict": None},
        {"epochs": [epoch(1)], "steps": []},
        {"epochs": [epoch(1, val_loss=None, val_accuracy=None)], "val_accuracy": None},
        {"epochs": [epoch(1, loss=math.nan, val_loss=math.inf, val_accuracy=math.nan)]},
        {"epochs": [epoch(1, phases={}), epoch(2, phases={"wait": math.nan})]},
        {"epochs": [epoch(1, seconds=math.nan, images_per_s=math.inf)], "seconds": math.nan},
        {"epochs": [epoch(i) for i in range(1, 500)]},
        {"epochs": [epoch(1), epoch(2, metrics={"top5": 0.5, "f1": math.nan})]},
        {"confusion": [[0, 0], [0, 0]]},
        {"saturation": math.nan, "val_accuracy": math.nan},
    ],
)  # fmt: skip
def test_partial_and_broken_data_still_make_a_page(changes: dict[str, object]):
    page = Page(render(replace(FULL, **changes)))  # type: ignore[arg-type]
    assert "hasten train --epochs 3" in page.text
    for word in ("nan", "inf", "None"):
        assert word not in page.text.replace("informed", "").split(), word


def test_the_least_data_makes_a_page():
    page = Page(render(ReportData(run="r", model="m", dataset="d", device="cpu")))
    assert "Details" in page.text
    assert "Do it again" not in page.text


def test_figures_of_ones_own_have_a_column():
    epochs = [epoch(1, metrics={HOSTILE: 0.125}), epoch(2, metrics={"top5": 0.75})]
    text = Page(render(replace(FULL, epochs=epochs))).text
    assert HOSTILE in text
    assert "0.1250" in text
    assert "0.7500" in text


def test_an_interrupted_run_says_so():
    text = Page(render(replace(FULL, stopped="Ctrl-C at step 120.", planned_epochs=10))).text
    assert "The run ended early. Ctrl-C at step 120." in text
    assert "3 of 10" in text


def test_a_matrix_that_does_not_fit_its_classes_is_refused():
    with pytest.raises(UsageError, match="2 by 2"):
        replace(FULL, confusion=[[1]])


def test_many_classes_keep_their_tables_without_a_picture():
    size = 201
    matrix = [[int(i == j) * 5 + int(i + 1 == j) for j in range(size)] for i in range(size)]
    data = replace(FULL, classes=[f"c{i}" for i in range(size)], confusion=matrix)
    text = Page(render(data)).text
    assert "With more than 200 classes" in text
    assert "c200" in text


def test_the_report_replaces_the_one_before_and_leaves_nothing_else(tmp_path: Path):
    path = write_report(tmp_path, FULL)
    assert path == tmp_path / "report.html"
    write_report(tmp_path, replace(FULL, run="日本 second"))
    assert "日本 second" in path.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [path]


def test_a_report_that_cannot_be_written_says_where(tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(HastenError, match=r"file/report\.html: Not a directory"):
        write_report(tmp_path / "file", FULL)


def test_a_folder_that_was_removed_under_the_run_is_made_again_for_its_report(tmp_path: Path):
    path = write_report(tmp_path / "gone", FULL)
    assert [path] == list((tmp_path / "gone").iterdir())


CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


def browse(page: Path, profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    return subprocess.run(
        [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            "--v=0", "--disable-quic", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", "--hide-scrollbars",
            "--disable-dev-shm-usage",
            f"--user-data-dir={profile}", "--virtual-time-budget=2000", *options, page.as_uri(),
        ],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("data", [FULL, replace(FULL, run=HOSTILE, model=HOSTILE, notes=[HOSTILE])])
def test_a_browser_shows_the_page_without_an_error(tmp_path: Path, data: ReportData):
    page = write_report(tmp_path, data)
    done = browse(page, tmp_path / "profile", "--dump-dom")
    assert "CONSOLE" not in done.stderr
    assert "83.33%" in done.stdout
    assert done.stdout.count("<svg") == 4
    assert "<script" not in done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_browser_that_does_find_an_error_fails_the_test_above(tmp_path: Path):
    page = tmp_path / "bad.html"
    page.write_text("<script>undefinedFunction()</script>")
    assert "CONSOLE" in browse(page, tmp_path / "profile", "--dump-dom").stderr


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_page_is_painted_from_top_to_bottom_and_no_wider_than_its_window(tmp_path: Path):
    page = write_report(tmp_path, FULL)
    # A frame is as narrow as a phone; a headless window cannot be.
    phone = tmp_path / "phone.html"
    phone.write_text(
        '<body style="margin:0"><iframe src="report.html" width="390" height="3000" '
        'style="border:0"></iframe><script>onload=()=>{const d=document.querySelector("iframe")'
        ".contentDocument.documentElement;document.title=`${d.scrollWidth}x${d.scrollHeight}`}"
        "</script></body>"
    )
    done = browse(
        phone, tmp_path / "profile", "--dump-dom", "--allow-file-access-from-files",
        "--disable-web-security",
    )  # fmt: skip
    width, height = done.stdout.split("<title>")[1].split("</title>")[0].split("x")
    assert int(width) == 390
    assert int(height) > 2000
    assert page.exists()
