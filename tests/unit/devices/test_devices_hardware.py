"""GPUs and drivers of machines that a test lays out."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.devices import hardware
from hasten.devices.hardware import Driver, cards, nvidia_driver

H200 = {"vendor": "0x10de", "device": "0x2335", "class": "0x030200"}


def machine(root: Path, *functions: dict[str, str], files: dict[str, str] | None = None) -> Path:
    """A file system with PCI functions at 0000:01:00.0, 0000:02:00.0, …, and further files."""
    laid = {
        f"sys/bus/pci/devices/0000:{place:02}:00.0/{name}": text
        for place, function in enumerate(functions, 1)
        for name, text in function.items()
    }
    for name, text in {**laid, **(files or {})}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def silent(command):
    return None


def found(root, ask=silent):
    return [str(card) for card in cards(root=root, ask=ask)]


def test_gpus_are_found_on_the_bus_without_any_driver(tmp_path):
    server_console = {"vendor": "0x1a03", "device": "0x2000", "class": "0x030000"}
    network = {"vendor": "0x10de", "device": "0x2335", "class": "0x020000"}
    assert found(machine(tmp_path, H200, server_console, network)) == ["NVIDIA GPU 0x2335"]


def test_a_loaded_driver_names_them(tmp_path):
    name = "proc/driver/nvidia/gpus/0000:01:00.0/information"
    root = machine(tmp_path, H200, files={name: "Model: \t\t NVIDIA H200\nIRQ: 5"})
    assert found(root) == ["NVIDIA H200"]


def test_gpus_without_a_bus_are_asked_of_nvidia_smi(tmp_path):
    assert found(tmp_path, lambda command: "NVIDIA GeForce RTX 4090\n") == [
        "NVIDIA GeForce RTX 4090"
    ]
    assert found(tmp_path, lambda command: "NVIDIA-SMI has failed because …\n") == []


@pytest.mark.parametrize(
    ("device", "expected"),
    [("0x56a0", 1), ("0xe20b", 1), ("0x7d55", 1), ("0x64a0", 1), ("0x3e92", 0), ("0x9a49", 0)],
)
def test_intel_graphics_count_where_pytorch_drives_them(tmp_path, device, expected):
    card = {"vendor": "0x8086", "device": device, "class": "0x030000"}
    assert len(found(machine(tmp_path, card))) == expected


@pytest.mark.parametrize(
    ("class_id", "version", "expected"),
    [
        ("0x120000", None, 1),  # MI300X, no driver loaded
        ("0x030000", None, 0),  # maybe a processor's own display
        ("0x030000", 90402, 1),  # gfx942
        ("0x030000", 100300, 1),  # gfx1030
        ("0x030000", 90012, 0),  # gfx90c: a processor's own display
    ],
)
def test_amd_graphics_count_where_rocm_drives_them(tmp_path, class_id, version, expected):
    card = {"vendor": "0x1002", "device": "0x1", "class": class_id}
    nodes = "sys/class/kfd/kfd/topology/nodes"
    files = {f"{nodes}/0/properties": "cpu_cores_count 8\ngfx_target_version 0"}
    if version:
        files[f"{nodes}/1/properties"] = f"simd_count 1\ngfx_target_version {version}"
    assert len(found(machine(tmp_path, card, files=files))) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15",
            Driver(version="535.183.01", cuda=(12, 0)),
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build",
            Driver(version="580.65.06", cuda=(13, 0)),
        ),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13",
            Driver(version="470.57.02", cuda=(11, 0)),
        ),
    ],
)
def test_the_kernel_tells_the_driver(tmp_path, text, expected):
    root = machine(tmp_path, files={"proc/driver/nvidia/version": text})
    assert nvidia_driver(root=root, ask=silent) == expected


def test_nvidia_smi_tells_the_driver(tmp_path):
    header = "| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: 12.4  |"
    found = nvidia_driver(root=tmp_path, ask=lambda command: header)
    assert found == Driver(version="550.54.15", cuda=(12, 4))
    assert nvidia_driver(root=tmp_path, ask=silent) is None


def test_containers_and_amds_driver_leave_marks(tmp_path):
    assert not hardware.in_container(root=tmp_path)
    assert not hardware.amd_driver(root=tmp_path)
    machine(tmp_path, files={".dockerenv": "", "dev/kfd": ""})
    assert hardware.in_container(root=tmp_path)
    assert hardware.amd_driver(root=tmp_path)


def test_apples_chips_are_known_behind_an_intel_python():
    def apple(**named):
        return hardware.is_apple_silicon(**named)

    assert apple(system="Darwin", machine="arm64", ask=silent)
    assert apple(system="Darwin", machine="x86_64", ask=lambda command: "1\n")
    assert not apple(system="Darwin", machine="x86_64", ask=lambda command: "0\n")
    assert not apple(system="Linux", machine="arm64", ask=silent)


def test_a_tool_that_is_absent_or_fails_says_nothing():
    assert hardware.ask(["no-such-tool-anywhere"]) is None
    assert hardware.ask(["false"]) is None
    assert hardware.ask(["echo", "words"]) == "words\n"
