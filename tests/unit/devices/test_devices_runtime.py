"""What runtime says of the CPU, of builds, of number formats, and of errors of memory."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import hasten
from hasten import devices
from hasten.devices import dtypes, runtime
from hasten.devices.runtime import builds, presence, queues

CPU = torch.device("cpu")
BF16, FP16 = torch.bfloat16, torch.float16


def test_the_public_names_are_these():
    assert devices.__all__ == [
        "DeviceInfo",
        "Rates",
        "advice",
        "describe",
        "device",
        "measure",
        "move",
        "runtime",
        "same_device",
    ]
    assert [name for name in devices.__all__ if not hasattr(devices, name)] == []
    assert [name for name in runtime.__all__ if not hasattr(runtime, name)] == []


class Driver:
    """libcuda's answer to how many engines copy."""

    def __init__(self, status, engines):
        self.status, self.engines, self.asked = status, engines, []

    def cuDeviceGetAttribute(self, where, attribute, index):
        self.asked.append((attribute, index))
        where._obj.value = self.engines
        return self.status


@pytest.mark.parametrize(("status", "engines", "told"), [(0, 2, 2), (0, 0, 0), (3, 2, None)])
def test_the_driver_tells_how_many_engines_copy(monkeypatch, status, engines, told):
    driver = Driver(status, engines)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(queues, "_driver", lambda: driver)
    assert runtime.copy_engines(torch.device("cuda", 1)) == told
    assert driver.asked == [(40, 1)]
    monkeypatch.setattr(queues, "_driver", lambda: None)
    assert runtime.copy_engines(torch.device("cuda", 1)) is None


def test_others_do_not_tell_how_many_engines_copy(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert runtime.copy_engines(torch.device("cuda", 0)) is None
    assert runtime.copy_engines(torch.device("mps")) is None
    assert runtime.copy_engines(CPU) is None


def test_the_host_needs_no_stream_event_or_pinning():
    assert runtime.is_host(CPU)
    assert runtime.stream(CPU) is None
    assert runtime.current_stream(CPU) is None
    assert runtime.event(CPU, timing=True) is None
    assert not runtime.can_pin(CPU)
    assert not runtime.can_overlap(CPU)
    assert runtime.peak_bytes(CPU) is None
    assert runtime.allocated_bytes(CPU) is None
    assert runtime.rng_state(CPU) is None
    runtime.synchronize(CPU)
    runtime.reset_peak(CPU)
    runtime.empty_cache(CPU)
    runtime.set_rng_state(CPU, None)
    with runtime.on_stream(None), runtime.float32_products(CPU, tf32=True):
        pass


def test_the_hosts_generator_is_seeded():
    before = torch.get_rng_state()
    runtime.manual_seed(CPU, 5)
    first = torch.rand(3)
    runtime.manual_seed(CPU, 5)
    assert torch.equal(torch.rand(3), first)
    torch.set_rng_state(before)


def test_the_host_has_a_name_and_memory():
    assert runtime.name(CPU)
    memory = runtime.memory(CPU)
    assert memory is not None
    assert 0 < memory.free_bytes <= memory.total_bytes


def test_the_cpu_has_no_index_and_others_have_one():
    assert runtime.with_index(torch.device("cpu", 0)) == CPU
    assert runtime.with_index(torch.device("cuda")).index is not None
    assert runtime.with_index(torch.device("cuda", 3)).index == 3


def test_a_type_that_is_absent_counts_none():
    assert runtime.count("cpu") == 1
    assert runtime.count("xpu" if torch.version.cuda else "cuda") == 0
    assert runtime.count("no such type") == 0


def test_a_trial_says_why_a_device_does_not_work():
    assert runtime.trial(CPU) is None
    assert "meta" in (runtime.trial(torch.device("meta")) or "")
    absent = torch.device("xpu" if torch.version.cuda else "cuda", 0)
    assert runtime.trial(absent)


def test_an_absent_device_answers_every_question_with_nothing():
    absent = torch.device("xpu" if torch.version.cuda else "cuda", 0)
    assert runtime.memory(absent) is None
    assert runtime.properties(absent) is None
    assert runtime.capability(absent) is None
    assert runtime.multiprocessors(absent) is None
    assert runtime.name(absent) == str(absent)
    assert not runtime.can_pin(absent)


@pytest.mark.parametrize(
    ("type_", "overlaps"),
    [("cpu", False), ("mps", False), ("meta", False), ("cuda", True), ("xpu", True)],
)
def test_which_devices_copy_beside_their_computation(type_, overlaps, monkeypatch):
    """None is here: PyTorch answers as if all were."""
    monkeypatch.setattr(queues, "ask", lambda default, function, *given, **named: object())
    monkeypatch.setattr(queues, "_pinning", lambda kind: True)
    device = torch.device(type_, 0)
    assert runtime.can_overlap(device) is overlaps
    assert runtime.can_pin(device) is overlaps
    assert (runtime.stream(device) is not None) is overlaps


def test_nothing_is_pinned_for_a_simulated_device_that_is_gone():
    with hasten.simulate():
        assert runtime.can_pin(torch.device("cuda", 0))
    assert runtime.can_pin(torch.device("cuda", 0)) is torch.cuda.is_available()


def test_a_cuda_build_without_a_gpu_has_no_accelerator(monkeypatch):
    """There ``torch.accelerator`` names the compiled-for device unless it is told to look."""

    def current(check_available=False):
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert runtime.compiled_for() == "cuda"
    assert runtime.accelerator() is None
    assert runtime.devices() == []
    assert runtime.count("cuda") == 0
    assert runtime.with_index(torch.device("cuda")) == torch.device("cuda", 0)


def test_siblings_follow_the_current_device_and_other_types_follow_those(monkeypatch):
    class Xpu:
        is_available = staticmethod(lambda: True)
        device_count = staticmethod(lambda: 1)

    own = {"cuda": torch.cuda, "xpu": Xpu}
    monkeypatch.setattr(presence, "module", own.get)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [str(device) for device in runtime.devices()] == ["cuda:1", "cuda:0", "xpu:0"]


def test_the_build_is_named():
    assert runtime.build().split()[0] in {"cpu", "cuda", "rocm", "xpu", "mps"}
    assert builds.first_line(ValueError("one\ntwo")) == "ValueError: one"
    assert builds.first_line(ValueError()) == "ValueError: no message"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
        RuntimeError("Native API failed: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)"),
        MemoryError("Unable to allocate 1.0 TiB for an array"),
    ],
)
def test_memory_that_ran_out_is_known_in_every_dialect(error):
    assert runtime.is_out_of_memory(error)
    outer = ValueError("the batch failed")
    outer.__cause__ = error
    assert runtime.is_out_of_memory(outer)


@pytest.mark.parametrize(
    "error", [RuntimeError("size mismatch"), ValueError("out of memory"), KeyError("x")]
)
def test_other_errors_are_not_of_memory(error):
    error.__cause__ = error  # a circle ends
    assert not runtime.is_out_of_memory(error)


def test_a_real_failure_to_allocate_is_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert runtime.is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (dtypes.of_cuda((6, 1)), "works works no no"),
        (dtypes.of_cuda((7, 5)), "fast works no no"),
        (dtypes.of_cuda((8, 6)), "fast fast no fast"),
        (dtypes.of_cuda((8, 9)), "fast fast fast fast"),
        (dtypes.of_cuda((9, 0)), "fast fast fast fast"),
        (dtypes.of_rocm("gfx942"), "fast fast fast fast"),
        (dtypes.of_rocm("gfx90a"), "fast fast no no"),
        (dtypes.of_rocm("gfx1030"), "fast works no no"),
        (dtypes.of_rocm("gfx803"), "works works no no"),
        (dtypes.of_cpu({}), "works works no no"),
        (dtypes.of_cpu({"avx512_f": True, "avx512_bf16": False}), "works works no no"),
        (dtypes.of_cpu({"avx512_bf16": True}), "works fast no no"),
        (dtypes.of_cpu({"amx_bf16": True, "amx_fp16": True}), "fast fast no no"),
        (dtypes.of_cpu({"bf16": True, "fp16_arith": True}), "fast fast no no"),
        (dtypes.of_xpu(), "fast fast no works"),
        (dtypes.of_mps(), "fast works no no"),
        (dtypes.of_autocast((BF16,)), "no fast no no"),
    ],
)
def test_formats_are_known_by_hardware(found, expected):
    keys = ("float16", "bfloat16", "float8", "tf32")
    assert " ".join(found[key] for key in keys) == expected


def test_instruction_sets_are_asked_one_by_one_where_there_is_no_list(monkeypatch, tmp_path):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_fp16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(dtypes.platform, "machine", lambda: "x86_64")
    assert dtypes.of_cpu(dtypes.cpu_capabilities())["bfloat16"] == "fast"
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(dtypes.platform, "machine", lambda: "aarch64")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("Features : fp asimd fphp asimdhp bf16\n")
    found = dtypes.of_cpu(dtypes.cpu_capabilities(root=tmp_path))
    assert (found["bfloat16"], found["float16"]) == ("fast", "fast")
    assert dtypes.of_cpu(dtypes.cpu_capabilities(root=tmp_path / "no"))["float16"] == "works"


def test_the_cpus_dtypes():
    assert runtime.autocast_dtypes(CPU) == (BF16, FP16)
    assert set(runtime.fast_dtypes(CPU)) <= {BF16, FP16}
    assert runtime.autocast_dtypes(torch.device("meta")) == ()


def test_no_floor_but_this_asks_torch_about_devices():
    """Elsewhere there is no torch.cuda, no torch.accelerator and the like: ask runtime.

    Two floors speak of torch.cuda for what they are: the simulation plays it, and the rehearsal
    watches scripts use it.
    """
    package = Path(hasten.__file__).parent
    exempt = {package / name for name in ("devices", "simulate", "script")}
    kinds = {"cuda", "accelerator", "mps", "xpu"}
    asked = []
    for path in sorted(package.rglob("*.py")):
        if exempt & set(path.parents):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in kinds
                and isinstance(node.value, ast.Name)
                and node.value.id == "torch"
            ):
                asked.append(f"{path.relative_to(package)}:{node.lineno} torch.{node.attr}")
    assert asked == []
