"""What `torch.cuda` and `torch.accelerator` answer: figures, errors and refusals."""

import warnings

import pytest
import torch
from torch import nn

import hasten


@pytest.fixture
def sim():
    with hasten.simulate(devices=2) as simulation:
        yield simulation


def test_properties_have_cudas_fields_and_its_text(sim):
    found = torch.cuda.get_device_properties("cuda:1")
    assert (found.major, found.minor) == torch.cuda.get_device_capability(1)
    assert found.max_threads_per_block == 1024 and found.shared_memory_per_multiprocessor > 0
    assert repr(found).startswith(f"_CudaDeviceProperties(name='{found.name}', major=")
    with pytest.raises(AssertionError, match="Invalid device id"):
        torch.cuda.get_device_name(2)
    with pytest.raises(AssertionError, match="Invalid device id"):
        nn.DataParallel(nn.Linear(1, 1).cuda(), device_ids=[0, 5])


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.ones(1, device="cuda:5"),
        lambda: torch.ones(1).cuda(5),
        lambda: torch.cuda.set_device(5),
        lambda: torch.Generator("cuda:5"),
    ],
)
def test_a_device_that_is_not_there_is_refused_in_cudas_words(sim, call):
    with pytest.raises(
        torch.AcceleratorError, match="CUDA error: invalid device ordinal"
    ) as caught:
        call()
    assert "CUDA_LAUNCH_BLOCKING=1" in str(caught.value)


def test_memory_figures_are_those_of_the_caching_allocator(sim):
    small, large = torch.ones(8, device="cuda"), torch.ones(1 << 19, device="cuda")
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == 512 + (2 << 20)
    assert stats["allocated_bytes.small_pool.current"] == 512
    assert stats["allocation.large_pool.current"] == 1
    del large
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.freed"] == 2 << 20
    assert stats["active_bytes.all.peak"] == torch.cuda.max_memory_allocated()
    assert "PyTorch CUDA memory summary" in torch.cuda.memory_summary()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    stats = torch.cuda.memory_stats_as_nested_dict()
    assert stats["allocated_bytes"]["all"] == {
        "current": 512, "peak": 512, "allocated": 512, "freed": 0,
    }  # fmt: skip
    assert torch.accelerator.memory_stats()["allocated_bytes.all.peak"] == 512
    assert small.is_cuda and torch.cuda.memory_snapshot() == []
    torch.accelerator.empty_host_cache()  # PyTorch's own ends the process here


def test_memory_that_a_process_may_have_is_limited(sim):
    with pytest.raises(ValueError, match="Allowed range: 0~1"):
        torch.cuda.set_per_process_memory_fraction(2.0)
    torch.cuda.set_per_process_memory_fraction(0.25)
    assert torch.cuda.get_per_process_memory_fraction() == 0.25


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.empty(10**13, device="cuda"),
        lambda: torch.zeros(10**13, device="cuda"),
        lambda: torch.empty(1).expand(10**13).to("cuda"),
        lambda: torch.ones(1, device="cuda").expand(10**13) + 1,
    ],
)
def test_more_than_the_device_and_this_machine_have_is_out_of_memory(sim, call):
    with pytest.raises(
        torch.cuda.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate"
    ):
        call()
    assert torch.cuda.memory_stats()["num_ooms"] == 1


def test_what_the_device_has_and_this_machine_has_not_is_said():
    with (
        hasten.simulate(memory_bytes=1 << 60),
        pytest.raises(MemoryError, match="the machine that plays it has not"),
    ):
        torch.empty(10**15, device="cuda")


def test_waits_are_warned_of_or_refused_when_asked(sim):
    x = torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("warn")
    assert torch.cuda.get_sync_debug_mode() == 1
    with pytest.warns(UserWarning, match="called a synchronizing CUDA operation"):
        x.item()
    torch.cuda.set_sync_debug_mode("error")
    for call in (x.item, x.cpu, x.nonzero, torch.cuda.current_stream().synchronize):
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            call()
    x + 1
    torch.cuda.synchronize()  # CUDA does not count it
    torch.cuda.set_sync_debug_mode(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x.item()


def test_events_are_not_ready_before_their_time_and_who_polls_gets_on(sim):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    assert repr(start) == "<torch.cuda.Event uninitialized>"
    start.record()
    torch.ones(2000, 2000, device="cuda") @ torch.ones(2000, 2000, device="cuda")
    end.record()
    with pytest.raises(torch.AcceleratorError, match="CUDA error: device not ready"):
        start.elapsed_time(end)
    polls = 0
    while not end.query():
        polls += 1
        assert polls < 10_000
    assert polls and start.elapsed_time(end) > 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: torch.randn(2, generator=torch.Generator("cuda")), "'cpu' device type"),
        (lambda: torch.randperm(2, generator=torch.Generator("cuda")), "'cpu' device type"),
        (lambda: torch.ones(2).normal_(generator=torch.Generator("cuda")), "'cpu' device type"),
        (lambda: torch.randn(2, device="cuda", generator=torch.Generator()), "'cuda' device type"),
    ],
)
def test_a_generator_serves_its_own_device(sim, call, words):
    with pytest.raises(RuntimeError, match=f"Expected a {words} for generator but found"):
        call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: torch.cuda.CUDAGraph(), "CUDA graphs"),
        (lambda: torch.cuda.graph(None), "CUDA graphs"),
        (lambda: torch.cuda.make_graphed_callables(nn.ReLU(), ()), "CUDA graphs"),
        (lambda: torch.cuda.MemPool(), "memory pools"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(1).cuda(), 1.0, 0, torch.quint8),
            "quantized",
        ),
        (lambda: torch.nested.nested_tensor([torch.ones(1)], device="cuda"), "nested tensors"),
        (lambda: torch.export.export(nn.Linear(1, 1).cuda(), (torch.ones(1).cuda(),)), "fake"),
        (lambda: torch.ones(2, device="cuda").to_mkldnn(), "mkldnn"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(sim, call, words):
    with pytest.raises(NotImplementedError, match=r"docs/simulate\.md") as caught:
        call()
    assert words in str(caught.value)


def test_what_cuda_has_no_kernel_for_is_refused(sim):
    with pytest.raises(NotImplementedError, match=r"'aten::histogram\.bin_ct'.*the 'CUDA' backend"):
        torch.histogram(torch.ones(2, device="cuda"), 3)
    assert torch.histc(torch.ones(2, device="cuda")).is_cuda


def test_parts_that_nobody_measures_answer(sim):
    torch.cuda.profiler.start()
    torch.cuda.profiler.stop()
    torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
    assert torch.cuda.cudart().cudaMemGetInfo(0) == torch.cuda.mem_get_info(0)
    assert torch.cuda.utilization() == 0 and torch.cuda.temperature(1) > 0
    assert torch.backends.cudnn.is_available() and torch.backends.cudnn.version() > 90000
    assert torch.float16 in torch.accelerator.get_device_capability()["supported_dtypes"]
    assert torch.cuda.get_allocator_backend() == "native"


def test_the_modules_of_torch_cuda_answer_as_it_does(sim):
    x = torch.ones(8, device="cuda")
    assert torch.cuda.memory.memory_allocated() == torch.cuda.memory_allocated() == 512
    assert torch.accelerator.memory.memory_allocated() == 512 and x.is_cuda
    assert isinstance(torch.cuda.streams.Stream(), torch.cuda.Stream)


def test_everything_is_put_back():
    before = {name: value for name, value in vars(torch._C).items() if name.startswith("_cuda")}
    graph, version = torch.cuda.CUDAGraph, torch.backends.cudnn.version
    with hasten.simulate():
        torch.ones(1, device="cuda")
    after = {name: value for name, value in vars(torch._C).items() if name.startswith("_cuda")}
    assert before == after
    assert torch.cuda.CUDAGraph is graph and torch.backends.cudnn.version is version
    assert not torch.cuda._initialized
