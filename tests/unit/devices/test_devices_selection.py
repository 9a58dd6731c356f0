"""What a spec means on machines of all kinds, none of which needs to be here."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

import hasten
from hasten.devices import selection
from hasten.devices.selection import DeviceWarning, choose
from hasten.errors import DeviceUnavailable, UsageError


@dataclass
class Machine:
    here: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    hints: list[str] = field(default_factory=list)

    def devices(self):
        return [torch.device(name) for name in self.here]

    def current(self, kind):
        return next(device for device in self.devices() if device.type == kind)

    def name(self, device):
        return f"the {device.type} of a test"

    def trial(self, device):
        return self.broken.get(str(device))

    def mend(self, reason):
        return "ask its owner" if "memory" in reason else ""

    def advice(self):
        return self.hints


TWO = Machine(here=["cuda:0", "cuda:1"])
BARE = Machine()


def chosen(spec, machine, environ=None):
    return str(choose(spec, machine=machine, environ=environ or {}).device)


@pytest.mark.parametrize("spec", ["auto", None, "AUTO", " auto "])
def test_auto_is_the_best_there_is(spec):
    assert chosen(spec, TWO) == "cuda:0"
    assert chosen(spec, Machine(here=["mps:0"])) == "mps:0"
    assert chosen(spec, Machine(here=["xpu:0"])) == "xpu:0"
    assert chosen(spec, BARE) == "cpu"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("cuda", "cuda:0"),
        ("cuda:1", "cuda:1"),
        ("CUDA:1", "cuda:1"),
        (torch.device("cuda"), "cuda:0"),
        (torch.device("cuda", 1), "cuda:1"),
        (1, "cuda:1"),
        ("1", "cuda:1"),
        ("cpu", "cpu"),
        ("cpu:0", "cpu"),
        (torch.device("cpu"), "cpu"),
    ],
)
def test_explicit_specs_get_an_index(spec, expected):
    assert chosen(spec, TWO) == expected


def test_a_device_that_does_not_work_is_passed_over_and_said():
    machine = Machine(here=["cuda:0", "cuda:1"], broken={"cuda:0": "out of memory"})
    choice = choose("auto", machine=machine, environ={})
    assert str(choice.device) == "cuda:1"
    [note] = choice.notes
    assert "cuda:0 (the cuda of a test) is passed over" in note
    assert "out of memory (ask its owner)" in note


def test_where_none_works_the_cpu_is_chosen_and_each_reason_is_said():
    broken = {"cuda:0": "no kernel image", "cuda:1": "driver crashed"}
    choice = choose("auto", machine=Machine(here=[*broken], broken=broken), environ={})
    assert str(choice.device) == "cpu"
    assert [reason in note for reason, note in zip(broken.values(), choice.notes, strict=True)] == [
        True,
        True,
    ]


def test_an_accelerator_that_pytorch_cannot_use_is_never_passed_over_in_silence():
    machine = Machine(hints=["AMD GPU is in the machine but this PyTorch is built for the CPU"])
    choice = choose("auto", machine=machine, environ={})
    assert str(choice.device) == "cpu"
    assert choice.notes == (
        "using the CPU, although AMD GPU is in the machine but this PyTorch is built for the CPU",
    )
    assert choose("cpu", machine=machine, environ={}).notes == ()  # asked for: nothing to say


def test_the_environment_decides_where_the_program_does_not():
    environ = {"HASTEN_DEVICE": "cuda:1"}
    assert chosen("auto", TWO, environ) == "cuda:1"
    assert chosen(None, TWO, environ) == "cuda:1"
    assert chosen("cpu", TWO, environ) == "cpu"
    assert chosen("auto", TWO, {"HASTEN_DEVICE": ""}) == "cuda:0"
    assert chosen("auto", TWO, {"HASTEN_DEVICE": "auto"}) == "cuda:0"
    with pytest.raises(DeviceUnavailable, match="HASTEN_DEVICE"):
        chosen("auto", BARE, environ)


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("cuda:7", ["there is no cuda:7", "cuda:0 (the cuda of a test)", "cuda:1", "cpu"]),
        (7, ["no accelerator of index 7", "cuda:0", "cuda:1", "cpu"]),
        (-1, ["index -1"]),
        ("mps", ["there is no 'mps'", "cuda:0"]),
        ("cpu:1", ["'cpu:1'"]),
        ("foo", ["unknown device 'foo'", "cuda:0", "cpu"]),
        ("rocm", ["calls AMD's GPUs cuda", "cuda:0"]),
        ("meta", ["nothing can be trained"]),
        ("", ["names no device"]),
        ("cuda:", ["names no device"]),
        ("cuda:x", ["names no device"]),
    ],
)
def test_an_absent_or_unknown_device_names_those_that_are_here(spec, parts):
    with pytest.raises(DeviceUnavailable) as caught:
        chosen(spec, TWO)
    assert [part for part in parts if part not in str(caught.value)] == []
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("spec", ["cuda", "cuda:0", 0])
def test_an_absent_device_says_how_to_mend_it(spec):
    machine = Machine(hints=["an H200 is here but this is a CPU build: install another"])
    with pytest.raises(DeviceUnavailable, match="an H200 is here but this is a CPU build"):
        chosen(spec, machine)


def test_a_device_asked_for_by_name_that_does_not_work_is_refused():
    machine = Machine(here=["cuda:0", "cuda:1"], broken={"cuda:1": "out of memory"})
    with pytest.raises(DeviceUnavailable) as caught:
        chosen("cuda:1", machine)
    assert "does not work: out of memory (ask its owner)" in str(caught.value)
    assert "Also here: cuda:0, cpu" in str(caught.value)


@pytest.mark.parametrize("spec", [True, 1.0, [], object])
def test_what_names_no_device_is_wrong_usage(spec):
    with pytest.raises(UsageError, match="a device is a name"):
        chosen(spec, TWO)


def test_the_public_function_warns_of_what_it_passed_over(monkeypatch):
    monkeypatch.setattr(selection.choose, "__kwdefaults__", {"machine": TWO, "environ": {}})
    assert str(hasten.device()) == "cuda:0"
    broken = Machine(here=["cuda:0"], broken={"cuda:0": "broken"})
    monkeypatch.setattr(selection.choose, "__kwdefaults__", {"machine": broken, "environ": {}})
    with pytest.warns(DeviceWarning, match="cuda:0 .* is passed over") as caught:
        assert str(hasten.device()) == "cpu"
    assert caught[0].filename == __file__


def test_a_device_that_passed_is_not_tried_again(monkeypatch):
    tried = []
    monkeypatch.setattr(selection.runtime, "trial", lambda device: tried.append(device))
    here = selection.Here()
    assert here.trial(torch.device("cpu")) is None
    assert here.trial(torch.device("cpu")) is None
    assert len(tried) == 1
