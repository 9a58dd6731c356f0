"""What follows from the facts of machines whose accelerators PyTorch cannot use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hasten.devices import advice
from hasten.devices.advising import Facts, advise, gather, mend
from hasten.devices.hardware import Card, Driver

H200 = Card(vendor="NVIDIA", name="NVIDIA H200")
NEW, MIDDLE, OLD = (
    Driver(version="580.65.06", cuda=(13, 0)),
    Driver(version="550.54.15", cuda=(12, 4)),
    Driver(version="470.57.02", cuda=(11, 4)),
)
NVIDIA = Facts(cards=(H200, H200), driver=NEW, build="cpu", torch_version="2.13.0+cpu")
AMD = Facts(cards=(Card(vendor="AMD", device_id="0x74a1"),), amd_driver=True, build="rocm 6.4")
INTEL = Facts(cards=(Card(vendor="Intel", device_id="0x56a0"),), build="xpu")
MAC = Facts(apple_silicon=True, python_machine="arm64", build="mps")


@pytest.mark.parametrize(
    ("facts", "parts"),
    [
        (NVIDIA, ["2 × NVIDIA H200", "2.13.0+cpu", "built for the CPU alone", "cu130"]),
        (replace(NVIDIA, driver=MIDDLE), ["cu126"]),
        (replace(NVIDIA, driver=OLD), ["update NVIDIA's driver (525 or later)"]),
        (replace(NVIDIA, build="rocm 6.4"), ["built for rocm 6.4", "cu130"]),
        (replace(NVIDIA, driver=None), ["no driver", "install NVIDIA's driver", "cu130"]),
        (replace(NVIDIA, driver=None, container=True), ["docker run --gpus all"]),
        (
            replace(NVIDIA, build="cuda 13.0", driver=MIDDLE),
            ["550.54.15", "too old", "cuda 13.0", "update NVIDIA's driver", "cu126"],
        ),
        (
            replace(NVIDIA, build="cuda 13.0", environ={"CUDA_VISIBLE_DEVICES": ""}),
            ["hidden by", "CUDA_VISIBLE_DEVICES=''", "unset it"],
        ),
        (
            replace(NVIDIA, build="cuda 13.0", environ={"CUDA_VISIBLE_DEVICES": "2,0"}),
            ["hidden by", "CUDA_VISIBLE_DEVICES='2,0'"],
        ),
        (
            replace(NVIDIA, build="cuda 13.0", environ={"CUDA_VISIBLE_DEVICES": "1"}),
            ["does not see it"],
        ),
        (
            replace(NVIDIA, build="cuda 13.0", driver=OLD, environ={"CUDA_VISIBLE_DEVICES": ""}),
            ["too old", "update NVIDIA's driver"],
        ),
        (
            replace(NVIDIA, build="cuda 12.8", driver=MIDDLE, failure="RuntimeError: error 802"),
            ["does not see it", "error 802", "nvidia-smi"],
        ),
        (replace(AMD, build="cpu"), ["AMD GPU 0x74a1", "install the ROCm build"]),
        (replace(AMD, build="cuda 13.0", seen=frozenset({"cuda"})), ["built for cuda 13.0"]),
        (replace(AMD, amd_driver=False), ["/dev/kfd is absent", "amdgpu"]),
        (replace(AMD, amd_driver=False, container=True), ["--device /dev/kfd"]),
        (replace(AMD, environ={"HIP_VISIBLE_DEVICES": "-1"}), ["HIP_VISIBLE_DEVICES='-1'"]),
        (AMD, ["does not see it", "rocminfo"]),
        (replace(INTEL, build="cpu"), ["Intel GPU 0x56a0", "XPU build"]),
        (replace(INTEL, environ={"ZE_AFFINITY_MASK": ""}), ["ZE_AFFINITY_MASK"]),
        (INTEL, ["sycl-ls"]),
        (replace(MAC, python_machine="x86_64"), ["arm64 Python"]),
        (replace(MAC, build="cpu"), ["this Mac's GPU", "pip install"]),
        (MAC, ["update macOS"]),
    ],
)
def test_each_accelerator_left_unused_gets_its_reason_and_remedy(facts, parts):
    [line] = advise(facts)
    assert [part for part in parts if part not in line] == []
    assert "\n" not in line


@pytest.mark.parametrize(
    "facts",
    [
        Facts(),
        replace(NVIDIA, build="cuda 13.0", seen=frozenset({"cuda"})),
        replace(AMD, seen=frozenset({"cuda"})),
        replace(INTEL, seen=frozenset({"xpu"})),
        replace(MAC, seen=frozenset({"mps"})),
    ],
)
def test_nothing_is_said_where_nothing_is_left_unused(facts):
    assert advise(facts) == []


def test_a_newer_driver_of_the_same_major_version_is_no_obstacle():
    facts = replace(NVIDIA, build="cuda 12.8", driver=MIDDLE)
    assert "too old" not in advise(facts)[0]


def test_several_makers_are_each_spoken_of():
    assert len(advise(replace(NVIDIA, cards=(H200, *INTEL.cards)))) == 2


def test_this_machine_is_asked_without_harm():
    facts = gather()
    assert set(facts.environ) <= {
        *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        *("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
    }
    assert advice() == advise(facts)


@pytest.mark.parametrize(
    ("reason", "part"),
    [
        ("CUDA error: no kernel image is available for execution on the device", "has kernels for"),
        ("CUDA out of memory. Tried to allocate 2.00 MiB", "another process holds its memory"),
        ("all CUDA-capable devices are busy or unavailable", "has it to itself"),
        ("CUDA driver version is insufficient for CUDA runtime version", "too old"),
        ("Cannot re-initialize CUDA in forked subprocess", "spawn"),
    ],
)
def test_common_failures_are_mended(reason, part):
    assert part in mend(reason)


def test_an_unknown_failure_gets_no_made_up_remedy():
    assert mend("the moon is full") == ""
