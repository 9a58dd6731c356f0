"""One fault is one finding: what reading and running both see is joined, wherever each sees it."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from hasten.script.findings import Finding, Related, joined_by_loader, merge
from hasten.script.rehearsal import Request, rehearse
from hasten.script.rules import check_file

START = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data = TensorDataset(torch.randn(64, 2000), torch.randint(0, 3, (64,)))
"""
MODEL = """\
model = nn.Linear(2000, 3).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
TAIL = """\
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def found(folder: Path, text: str) -> list[Finding]:
    """What a check finds in a script, read and run."""
    (folder / "script.py").write_text(text)
    before = Path.cwd()
    os.chdir(folder)
    try:
        with Path(os.devnull).open("w") as nowhere:
            outcome = rehearse(Request(script="script.py"), output=nowhere)
        assert (outcome.ending, outcome.error) == ("finished", "")
        return merge(check_file("script.py"), outcome.findings)
    finally:
        os.chdir(before)


def line_of(text: str, words: str) -> int:
    return next(i for i, line in enumerate(text.splitlines(), 1) if words in line)


@pytest.mark.parametrize("extra", ["", ", non_blocking=True"])
def test_a_loader_that_does_not_pin_is_named_once_with_its_copies(
    tmp_path: Path, extra: str
) -> None:
    text = (
        START
        + "loader = DataLoader(\n    data,\n    batch_size=8,\n)\n"
        + MODEL
        + "for x, y in loader:\n"
        + f"    x = x.to(device{extra})\n"
        + f"    y = y.to(device{extra})\n"
        + TAIL
    )
    (loader,) = found(tmp_path, text)
    assert (loader.code, loader.line, loader.found_by) == (
        "HST124",
        line_of(text, "loader = DataLoader("),
        "both",
    )
    assert line_of(text, "x = x.to(") in [place.line for place in loader.related]


def test_a_loader_in_a_function_is_named_where_it_is_made(tmp_path: Path) -> None:
    text = (
        START
        + "def loaders():\n    first = DataLoader(data, batch_size=8)\n"
        + "    return {'train': first}\n"
        + MODEL
        + "def batches(loader):\n    for batch in loader:\n"
        + "        yield [part.to(device) for part in batch]\n"
        + "for x, y in batches(loaders()['train']):\n"
        + TAIL
    )
    (loader,) = found(tmp_path, text)
    assert (loader.code, loader.line) == ("HST124", line_of(text, "first = DataLoader("))
    assert line_of(text, "part.to(device)") in [place.line for place in loader.related]


def test_a_batch_that_no_loader_made_is_named_at_its_copy(tmp_path: Path) -> None:
    text = (
        START
        + MODEL
        + "images, labels = data.tensors\n"
        + "for first in range(0, 64, 8):\n"
        + "    x = images[first : first + 8].to(device, non_blocking=True)\n"
        + "    y = labels[first : first + 8].to(device)\n"
        + TAIL
    )
    (copy,) = found(tmp_path, text)
    assert (copy.code, copy.line) == ("HST126", line_of(text, "non_blocking"))


def test_data_made_anew_in_memory_that_was_freed_is_not_the_same_data(tmp_path: Path) -> None:
    text = (
        START
        + MODEL
        + "def step():\n"
        + "    x = torch.randn(8, 2000)\n"
        + "    x = x.to(device)\n"
        + "    y = torch.zeros(8, dtype=torch.long, device=device)\n"
        + TAIL
        + "for _ in range(8):\n    step()\n"
    )
    assert {f.code for f in found(tmp_path, text)} == {"HST137"}


def test_what_a_module_on_the_cpu_computes_is_no_copy_of_its_parameters(tmp_path: Path) -> None:
    text = (
        START
        + "class Net(nn.Module):\n"
        + "    def __init__(self):\n"
        + "        super().__init__()\n"
        + "        self.blocks = [nn.Linear(2000, 20)]\n"
        + "        self.head = nn.Linear(20, 3)\n"
        + "    def forward(self, x):\n"
        + "        for block in self.blocks:\n"
        + "            x = block(x)\n"
        + "        return self.head(x)\n"
        + "model = Net().to(device)\n"
        + "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        + "for x, y in DataLoader(data, batch_size=8, pin_memory=True):\n"
        + "    x.to(device)\n"
        + "    y = y.to(device)\n"
        + TAIL
    )
    findings = {f.code: f for f in found(tmp_path, text)}
    assert set(findings) == {"HST103", "HST106"}
    assert findings["HST103"].line == line_of(text, "    x.to(device)")
    assert findings["HST106"].line == line_of(text, "self.blocks = ")
    assert findings["HST106"].found_by == "both"


def test_a_module_on_the_cpu_is_named_by_what_it_computes(tmp_path: Path) -> None:
    text = (
        START
        + "encoder = nn.Linear(2000, 2000)\n"
        + MODEL
        + "for x, y in DataLoader(data, batch_size=8, pin_memory=True):\n"
        + "    x, y = encoder(x), y.to(device)\n"
        + TAIL
    )
    (tmp_path / "script.py").write_text(text)
    with Path(os.devnull).open("w") as nowhere:
        outcome = rehearse(Request(script=str(tmp_path / "script.py")), output=nowhere)
    errors = [(f.code, f.line) for f in outcome.findings if f.severity == "error"]
    assert errors == [("HST111", line_of(text, "encoder = "))]


def test_advice_on_a_copy_that_is_thrown_away_is_not_given() -> None:
    def at(code: str, line: int, by: str) -> Finding:
        return Finding(code=code, file="a.py", line=line, message=code, found_by=by)  # type: ignore[arg-type]

    joined = merge(
        [at("HST103", 4, "static")],
        [at("HST137", 4, "rehearsal"), at("HST137", 5, "rehearsal"), at("HST120", 4, "rehearsal")],
    )
    assert [(f.code, f.line) for f in joined] == [("HST103", 4), ("HST120", 4), ("HST137", 5)]


MANY = (
    START
    + """\
loader = DataLoader(data, batch_size=8, num_workers=2)
mean = torch.zeros(2000)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(2000)
        self.body = nn.Linear(2000, 8)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        mask = torch.ones(
            x.shape
        )
        x = (
            x
            * mask
            * self.scale
        )
        return self.head(self.drop(self.body(x)))


net = Net()
net.to(device)
optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda", enabled=device.type == "cuda")
criterion = nn.CrossEntropyLoss(
    weight=torch.ones(3),
)
losses, total = [], 0
for epoch in range(2):
    for x, y in loader:
        x = x.to(device)
        y = y.to(device)
        loss = criterion(
            net(x - mean.to(device)),
            y,
        )
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(
            net.parameters(),
            1.0,
        )
        scaler.step(optimizer)
        scaler.update()
        total += loss
        losses.append(
            loss,
        )
        print(
            "loss",
            loss.item(),
        )
        torch.cuda.empty_cache()
    torch.save(
        {"model": net.state_dict(), "optimizer": optimizer.state_dict()},
        "saved.pt",
    )
saved = torch.load(
    "saved.pt",
)
net.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
"""
)


def test_many_faults_in_calls_of_many_lines_are_each_named_once(tmp_path: Path) -> None:
    findings = found(tmp_path, MANY)
    both = {f.code for f in findings if f.found_by == "both"}
    assert both >= {
        "HST104", "HST105", "HST108", "HST117", "HST120", "HST121", "HST122", "HST124", "HST125",
        "HST134", "HST135", "HST136",
    }  # fmt: skip
    counts = Counter(f.code for f in findings if f.code in both)
    assert {code for code, count in counts.items() if count > 1} == {"HST122"}
    kept = [f.line for f in findings if f.code == "HST122"]
    assert kept == [line_of(MANY, "total += loss"), line_of(MANY, "losses.append(")]


def test_copies_join_their_own_loader_alone() -> None:
    def at(code: str, line: int, *places: int, by: str = "static") -> Finding:
        related = tuple(Related("a.py", place, "") for place in places)
        return Finding(
            code=code,
            severity="suggestion",
            file="a.py",
            line=line,
            message=code,
            found_by=by,  # type: ignore[arg-type]
            related=related,
        )

    joined = joined_by_loader(
        [at("HST124", 3), at("HST124", 4), at("HST126", 9, 4), at("HST126", 10, 5)]
    )
    assert [(f.code, f.line) for f in joined] == [("HST124", 3), ("HST124", 4), ("HST126", 10)]
    assert [place.line for place in joined[1].related] == [9]
    (once,) = merge([at("HST124", 4), at("HST126", 9, 4)], [at("HST124", 4, 9, by="rehearsal")])
    assert (once.found_by, [place.line for place in once.related]) == ("both", [9])
