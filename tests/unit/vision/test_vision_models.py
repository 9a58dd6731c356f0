"""Models by name: sizes, shapes, other libraries, the user's own file, and checkpoints' words."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hasten.errors import CheckpointError, UsageError
from hasten.vision import models


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def refused(name: str, **sizes: int) -> str:
    with pytest.raises(UsageError) as error:
        models.create(name, **({"classes": 10, "channels": 1, "image_size": 28} | sizes))
    return str(error.value)


# --- our own -----------------------------------------------------------------------------------


def test_lesson_is_the_lessons_network() -> None:
    model = models.create("lesson", classes=10, channels=1, image_size=28)
    shapes = {name: list(value.shape) for name, value in model.named_parameters()}
    assert shapes == {
        "conv1.weight": [6, 1, 5, 5],
        "conv1.bias": [6],
        "conv2.weight": [12, 6, 5, 5],
        "conv2.bias": [12],
        "fc1.weight": [120, 192],
        "fc1.bias": [120],
        "fc2.weight": [60, 120],
        "fc2.bias": [60],
        "out.weight": [10, 60],
        "out.bias": [10],
    }
    assert count(model) == 32_998


def test_lesson_computes_what_the_lesson_computes() -> None:
    model = models.create("lesson", classes=10, channels=1, image_size=28)
    layers = dict(model.named_children())
    plain = nn.Sequential(
        *(layers["conv1"], nn.ReLU(), nn.MaxPool2d(2, 2)),
        *(layers["conv2"], nn.ReLU(), nn.MaxPool2d(2, 2), nn.Flatten()),
        *(layers["fc1"], nn.ReLU(), layers["fc2"], nn.ReLU(), layers["out"]),
    )
    images = torch.randn(3, 1, 28, 28)
    assert torch.equal(model(images), plain(images))


@pytest.mark.parametrize("image_size", [16, 17, 28, 32, 65])
@pytest.mark.parametrize("channels", [1, 3])
def test_lesson_adapts(image_size: int, channels: int) -> None:
    model = models.create("lesson", classes=7, channels=channels, image_size=image_size)
    assert model(torch.randn(2, channels, image_size, image_size)).shape == (2, 7)


def test_too_small_images_are_refused_with_what_to_do() -> None:
    assert "16×16 or more, these are 15×15; choose --model small" in refused(
        "lesson", image_size=15
    )
    assert "at most 512×512, these are 513×513" in refused("lesson", image_size=513)
    assert "8×8 or more, these are 7×7" in refused("small", image_size=7)


@pytest.mark.parametrize("image_size", [8, 9, 16, 28, 32, 64, 97, 224])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_small_takes_any_image(image_size: int, channels: int) -> None:
    model = models.create("small", classes=5, channels=channels, image_size=image_size)
    scores = model(torch.randn(2, channels, image_size, image_size))
    assert scores.shape == (2, 5)
    scores.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_small_does_not_cost_more_than_its_image_is_worth() -> None:
    sides = {}
    for image_size in (8, 28, 64, 128, 224):
        model = models.create("small", classes=5, channels=3, image_size=image_size).eval()
        with torch.no_grad():
            features = model.features[:-1](torch.randn(1, 3, image_size, image_size))
        sides[image_size] = features.shape[-1]
    assert sides == {8: 2, 28: 7, 64: 16, 128: 16, 224: 14}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("resnet18", 11_689_512), ("resnet34", 21_797_672), ("resnet50", 25_557_032)],
)
def test_resnets_have_the_known_sizes(name: str, parameters: int) -> None:
    assert count(models.create(name, classes=1000, channels=3, image_size=224)) == parameters


@pytest.mark.parametrize(("image_size", "side"), [(32, 4), (64, 8), (65, 3), (224, 7)])
def test_resnets_are_sized_to_the_image(image_size: int, side: int) -> None:
    model = models.create("resnet18", classes=10, channels=1, image_size=image_size)
    shapes = []
    model.layer4.register_forward_hook(lambda *args: shapes.append(args[2].shape))
    assert model.eval()(torch.randn(1, 1, image_size, image_size)).shape == (1, 10)
    assert shapes == [(1, 512, side, side)]


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_resnet_blocks_start_as_their_shortcuts(name: str) -> None:
    model = models.create(name, classes=10, channels=3, image_size=32)
    block = model.layer2[1]
    features = torch.rand(2, 512 if name == "resnet50" else 128, 8, 8)
    assert torch.equal(block(features), features)


@pytest.mark.parametrize("name", ["lesson", "small", "resnet18"])
def test_the_seed_decides_the_weights(name: str) -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(models.create(name, classes=10, channels=1, image_size=28).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("name", ["small", "resnet18"])
def test_channels_last_gives_the_same_scores(name: str) -> None:
    model = models.create(name, classes=10, channels=3, image_size=32).eval()
    images = torch.randn(2, 3, 32, 32)
    plain = model(images)
    model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(
        model(images.to(memory_format=torch.channels_last)), plain, rtol=1e-4, atol=1e-5
    )


def test_names_are_those_that_can_be_created() -> None:
    assert models.names() == ["lesson", "small", "resnet18", "resnet34", "resnet50"]
    for name in models.names():
        assert isinstance(models.create(name, classes=2, channels=1, image_size=28), nn.Module)


def test_unknown_names_say_what_there_is() -> None:
    message = refused("resnet81")
    assert "no model named 'resnet81' (did you mean resnet18" in message
    assert "lesson, small, resnet18, resnet34, resnet50, timm:NAME" in message
    assert "did you mean" not in refused("zzz")


def test_impossible_sizes_are_refused() -> None:
    for what in ("classes", "channels", "image_size"):
        assert f"{what} must be 1 or more, not 0" in refused("small", **{what: 0})


# --- other libraries ---------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_an_absent_library_gives_the_line_to_install_it(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in list(sys.modules):
        if module.split(".")[0] == library:
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    assert f"pip install {library}" in refused(f"{library}:resnet18")


def test_an_error_inside_a_library_is_not_taken_for_its_absence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "timm.py").write_text("import a_module_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    message = refused("timm:resnet18")
    assert "timm is installed and cannot be imported" in message
    assert "a_module_that_is_not_there" in message


def test_a_library_for_another_torch_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator timm::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    message = refused("timm:resnet18")
    assert "operator timm::nms does not exist" in message
    assert f"goes with torch {torch.__version__}" in message


class FakeTimm(types.ModuleType):
    """What hasten asks of timm, with timm's manners."""

    known = ("resnet18", "resnet26", "vit_tiny_patch16_224")

    def __init__(self) -> None:
        super().__init__("timm")
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def is_model(self, name: str) -> bool:
        return name in self.known

    def list_models(self) -> list[str]:
        return list(self.known)

    def create_model(self, name: str, **options: Any) -> nn.Module:
        if "img_size" in options and not name.startswith("vit"):
            raise TypeError("unexpected keyword argument 'img_size'")
        if options.get("img_size", 16) < 16:
            raise AssertionError("image smaller than a patch")
        self.calls.append((name, options))
        side = 3 if name == "resnet26" else 1
        return nn.Sequential(
            nn.Conv2d(options["in_chans"], options["num_classes"], side),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )


def test_timm_gets_classes_channels_and_where_it_takes_it_the_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeTimm()
    monkeypatch.setitem(sys.modules, "timm", fake)
    for name in ("resnet18", "vit_tiny_patch16_224"):
        models.create(f"timm:{name}", classes=7, channels=2, image_size=32)
    common = {"num_classes": 7, "in_chans": 2, "pretrained": False}
    assert fake.calls == [
        ("resnet18", common),
        ("vit_tiny_patch16_224", common | {"img_size": 32}),
    ]
    assert "timm has no model 'resnet19' (did you mean resnet1" in refused("timm:resnet19")
    message = refused("timm:resnet26", image_size=2)
    assert (
        "timm:resnet26 cannot take images of 1 channels and 2×2: RuntimeError: Calculated padded"
        in message
    )
    message = refused("timm:vit_tiny_patch16_224", image_size=8)
    assert "cannot take images of 1 channels and 8×8: image smaller than a patch" in message


def test_real_timm() -> None:
    pytest.importorskip("timm")
    model = models.create("timm:resnet10t", classes=7, channels=1, image_size=32)
    assert model.eval()(torch.randn(2, 1, 32, 32)).shape == (2, 7)
    assert "did you mean" in refused("timm:resnet10x")


def test_real_torchvision() -> None:
    pytest.importorskip("torchvision")
    model = models.create("torchvision:resnet18", classes=7, channels=1, image_size=64)
    assert model.eval()(torch.randn(2, 1, 64, 64)).shape == (2, 7)
    assert "did you mean" in refused("torchvision:resnet81")


def test_torchvision_models_take_other_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_model(name: str, *, num_classes: int, **_: Any) -> nn.Module:
        first = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=name == "biased")
        inner: nn.Module = nn.Linear(3, 4) if name == "flat" else nn.Sequential(first, nn.ReLU())
        return nn.Sequential(
            inner, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes)
        )

    fake = types.ModuleType("torchvision.models")
    fake.list_models = lambda module: ["biased", "plain", "flat"]  # type: ignore[attr-defined]
    fake.get_model = get_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", fake)
    for name, bias in (("biased", True), ("plain", False)):
        model = models.create(f"torchvision:{name}", classes=7, channels=1, image_size=28)
        assert model(torch.randn(2, 1, 28, 28)).shape == (2, 7)
        assert (model[0][0].bias is not None) is bias
        assert (model[0][0].stride, model[0][0].padding) == ((2, 2), (1, 1))
    assert "takes images of 3 channels only" in refused("torchvision:flat")
    assert "no classifier 'plane' (did you mean plain" in refused("torchvision:plane")


# --- the user's own file -----------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "my models" / "nét.py"
    path.parent.mkdir()
    path.write_text(
        """
from __future__ import annotations
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class Sizes:
    inputs: int
    outputs: int

class Net(nn.Module):
    def __init__(self, classes, channels, image_size):
        super().__init__()
        self.sizes = Sizes(channels * image_size**2, classes)
        self.layer = nn.Linear(self.sizes.inputs, self.sizes.outputs)
    def forward(self, x):
        return self.layer(x.flatten(1))

class Pooled(nn.Module):
    def __init__(self, axis, inputs, outputs):
        super().__init__()
        self.axis = axis
        self.layer = nn.Linear(inputs, outputs)
    def forward(self, x):
        return self.layer(x.mean(self.axis))

def some(classes, image_size=1):
    return Pooled((1, 2), image_size, classes)

def everything(**sizes):
    return Pooled((2, 3), sizes["channels"], sizes["classes"])

def nothing():
    return Pooled((2, 3), 3, 7)

def fails(classes):
    return nn.Linear(1, classes / 0)

def gives_class():
    return Net

def gives_number():
    return 3
"""
    )
    return path


@pytest.mark.parametrize(
    ("factory", "inputs", "outputs"),
    [("Net", 3 * 4 * 4, 7), ("some", 4, 7), ("everything", 3, 7), ("nothing", 3, 7)],
)
def test_a_factory_gets_the_sizes_that_it_takes(
    own: Path, factory: str, inputs: int, outputs: int
) -> None:
    model = models.create(f"{own}:{factory}", classes=7, channels=3, image_size=4)
    assert (model.layer.in_features, model.layer.out_features) == (inputs, outputs)


def test_what_is_wrong_with_a_file_is_said(own: Path) -> None:
    assert "there is no file" in refused(f"{own.parent}/other.py:Net")
    assert "write path/to/file.py:factory" in refused(str(own))
    message = refused(f"{own}:Nut")
    assert "has no function 'Nut' (did you mean Net?); it has Sizes, Net, Pooled" in message
    assert "gave int, not a torch.nn.Module" in refused(f"{own}:gives_number")
    assert "(return Model(), not Model)" in refused(f"{own}:gives_class")


def test_an_error_of_the_user_keeps_its_place(own: Path) -> None:
    with pytest.raises(UsageError) as error:
        models.create(f"{own}:fails", classes=7, channels=3, image_size=4)
    line = own.read_text().splitlines().index("    return nn.Linear(1, classes / 0)") + 1
    assert f"fails failed at line {line}: ZeroDivisionError: division by zero" in str(error.value)
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert error.value.__cause__.__traceback__ is not None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1\nimport a_module_that_is_not_there", "at line 2: ModuleNotFoundError"),
        ("x = 1\n\ndef (", "at line 3: SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_run_is_named(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    before = set(sys.modules)
    message = refused(f"{path}:make")
    assert f"{path} cannot be run {reason}" in message
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return self.layer(x)", r"4×4 at line 8: RuntimeError: mat1 and mat2"),
        ("return self.nothere(x)", r"4×4 at line 8: AttributeError"),
        ("raise SystemExit", r"4×4 at line 8: SystemExit$"),
        ("return self.layer(x.flatten(1))[:, :3]", r"gives \[1, 3\] for images \[1, 3, 4, 4\]"),
        ("return (x,)", r"gives a tuple for .*; it must give scores \[B, classes\], here \[1, 7\]"),
    ],
)
def test_a_model_of_a_file_is_tried_before_any_work(tmp_path: Path, body: str, reason: str) -> None:
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(48, 7)\n"
        "        self.drop = torch.nn.Dropout()\n"
        "    def forward(self, x):\n"
        f"        {body}\n"
    )
    with pytest.raises(UsageError, match=reason):
        models.create(f"{path}:Net", classes=7, channels=3, image_size=4)


def test_the_trial_leaves_a_model_and_the_generator_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer, self.kept = torch.nn.Linear(48, 7), None\n"
        "        self.norm = torch.nn.BatchNorm1d(48)\n"
        "    def forward(self, x):\n"
        "        if self.kept is None:\n"
        "            self.kept = torch.rand(48)\n"
        "        return self.layer(self.norm(x.flatten(1)) * self.kept)\n"
    )
    torch.manual_seed(0)
    model = models.create(f"{path}:Net", classes=7, channels=3, image_size=4)
    drawn = torch.rand(1)
    torch.manual_seed(0)
    nn.Linear(48, 7)
    assert torch.equal(drawn, torch.rand(1))
    assert model.training
    assert model.norm.num_batches_tracked == 0
    model(torch.rand(2, 3, 4, 4)).sum().backward()  # what it kept serves training


@pytest.mark.parametrize(
    ("text", "where"), [("", " cannot be run at line 2"), ("def make():\n ", "")]
)
def test_a_file_that_exits(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "leaves.py"
    path.write_text(f"import sys\n{text}sys.exit(3)\n")
    assert f"{where}: SystemExit: 3" in refused(f"{path}:make").replace(" failed at line 3", "")


def test_shapes_without_numbers_and_without_a_size(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(
        "from torch import nn\n"
        "def lazy(): return nn.Sequential(nn.Flatten(), nn.LazyLinear(7))\n"
        "def meta(): return nn.Sequential(nn.Flatten(), nn.Linear(48, 7, device='meta'))\n"
    )
    assert "is on the device meta" in refused(f"{path}:meta")
    lazy = models.create(f"{path}:lazy", classes=7, channels=3, image_size=4)
    assert isinstance(lazy[1], nn.LazyLinear)  # the trainer has words for it


def test_where_a_model_failed_later(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text("def late():\n    raise ValueError('too late')\n")
    scope: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    try:
        scope["late"]()
    except ValueError as error:
        said = models.failure(f"{path}:Net", error)
        assert models.failure(f"{tmp_path}/other.py:Net", error) is None
        assert models.failure("small", error) is None
    assert said == f"--model {path}:Net failed at line 2: ValueError: too late"


# --- from a checkpoint's description -----------------------------------------------------------


def test_a_description_builds_the_same_model() -> None:
    described = models.describe("small", classes=7, channels=3, image_size=16)
    described = json.loads(json.dumps(described))
    model = models.from_description(described)
    twin = models.create("small", classes=7, channels=3, image_size=16)
    assert {k: v.shape for k, v in model.state_dict().items()} == {
        k: v.shape for k, v in twin.state_dict().items()
    }


def test_a_description_never_runs_a_file_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "evil.py"
    path.write_text(f"open({str(tmp_path / 'harmed')!r}, 'w').close()\ndef make(): ...")
    described = models.describe(f"{path}:make", classes=7, channels=3, image_size=16)
    with pytest.raises(UsageError, match=r"pass --model .*evil\.py:make"):
        models.from_description(described)
    assert not (tmp_path / "harmed").exists()


def test_the_file_that_was_asked_for_is_the_one_that_runs(own: Path, tmp_path: Path) -> None:
    described = models.describe("elsewhere/net.py:Net", classes=7, channels=3, image_size=4)
    model = models.from_description(described, allow_file=f"{own}:Net")
    assert model.layer.in_features == 48


@pytest.mark.parametrize(
    "described",
    [{}, {"name": "small"}, {"name": 3, "classes": 1, "channels": 1, "image_size": 8}],
)
def test_a_broken_description_is_refused(described: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="describes its model"):
        models.from_description(described)


@pytest.mark.parametrize("what", ["classes", "channels", "image_size"])
def test_a_description_of_absurd_size_is_refused(what: str) -> None:
    sizes = {"classes": 10, "channels": 3, "image_size": 224} | {what: 10**9}
    with pytest.raises(CheckpointError, match=f"which cannot be: {what}$"):
        models.from_description(models.describe("resnet50", **sizes))


def test_the_package_imports_no_other_library() -> None:
    code = (
        "import sys, hasten.vision.models; "
        "print('timm' in sys.modules, 'torchvision' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
