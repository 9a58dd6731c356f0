"""To a script the device is cuda: in what it says, asks, copies, saves and loads."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn

import hasten

FACTORIES = {
    "zeros": (2,),
    "ones": (2,),
    "empty": (2,),
    "rand": (2,),
    "randn": (2,),
    "randint": (0, 3, (2,)),
    "full": ((2,), 3.0),
    "arange": (3,),
    "linspace": (0, 1, 3),
    "eye": (2,),
    "randperm": (4,),
    "tensor": ([1.0],),
    "as_tensor": ([1.0],),
}


@pytest.fixture
def sim():
    with hasten.simulate() as simulation:
        yield simulation


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), 0])
def test_factories_take_the_name(sim, name, device):
    made = getattr(torch, name)(*FACTORIES[name], device=device)
    assert made.device == torch.device("cuda:0") and made.is_cuda and made.get_device() == 0


def test_new_tensors_follow_their_model(sim):
    x = torch.ones(2, device="cuda")
    made = [x.new_zeros(3), x.new_tensor([1.0]), x.new_full((1,), 2), torch.rand_like(x), x + 1]
    assert all(y.is_cuda for y in made)
    assert torch.zeros_like(x, device="cpu").device.type == "cpu"


def test_to_and_cuda_return_the_tensor_itself_where_it_is(sim):
    x = torch.ones(2)
    y = x.cuda()
    assert y is not x and y.cuda() is y and y.to("cuda") is y and y.to(y) is y
    assert y.to(device="cuda", dtype=torch.float32) is y
    assert y.to("cuda", copy=True) is not y
    assert y.to(torch.float64).dtype is torch.float64
    assert x.to("cuda", torch.half).dtype is torch.half
    assert y.cpu().device.type == "cpu" and y.to(x).device.type == "cpu"


def test_it_prints_as_cuda(sim):
    x = torch.arange(2.0, device="cuda")
    assert repr(x) == "tensor([0., 1.], device='cuda:0')"
    assert str(x.device) == "cuda:0" and x.type() == "torch.cuda.FloatTensor"
    assert f"{x[1]:.1f}" == "1.0"


def test_old_type_names(sim):
    x = torch.cuda.FloatTensor([1, 2])
    assert x.is_cuda and isinstance(x, torch.cuda.FloatTensor)
    assert not isinstance(x.cpu(), torch.cuda.FloatTensor)
    assert torch.cuda.LongTensor(3).shape == (3,)
    assert torch.ones(1).type(torch.cuda.HalfTensor).dtype is torch.half
    assert x.type("torch.DoubleTensor").device.type == "cpu"


def test_device_contexts_and_the_default_device(sim):
    with torch.device("cuda"):
        assert torch.ones(1).is_cuda and nn.Linear(2, 2).weight.is_cuda
        assert torch.get_default_device().type == "cuda"
    torch.set_default_device("cuda")
    try:
        assert torch.ones(1).is_cuda
    finally:
        torch.set_default_device(None)
    assert not torch.ones(1).is_cuda


def test_the_module_answers(sim):
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    assert torch.cuda.get_device_name() == torch.cuda.get_device_properties(0).name
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device="cuda:1")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.cuda.set_device(3)


def test_several_devices():
    with hasten.simulate(3):
        with torch.cuda.device(1):
            assert torch.ones(1, device="cuda").device.index == 1
        torch.cuda.set_device(2)
        x = torch.ones(1).cuda()
        assert x.device.index == 2 and torch.cuda.current_device() == 2
        assert x.to("cuda:0").device.index == 0
        with pytest.raises(RuntimeError, match="at least two devices, cuda:2 and cuda:0!"):
            x + x.to("cuda:0")
        w = torch.ones(1, device="cuda:0", requires_grad=True)
        (w.to("cuda:2") * x).sum().backward()
        assert w.grad.device.index == 0


def test_threads_know_the_name(sim):
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.ones(1, device="cuda").is_cuda))
    thread.start()
    thread.join()
    assert found == [True]


def test_copies_and_pickles(sim):
    model = nn.Linear(2, 2).cuda()
    twin = copy.deepcopy(model)
    assert twin.weight.is_cuda and type(twin.weight) is nn.Parameter
    assert twin.weight.data_ptr() != model.weight.data_ptr()
    tied = copy.deepcopy([model.weight, model.weight])
    assert tied[0] is tied[1]
    back = pickle.loads(pickle.dumps(model.weight))
    assert isinstance(back, nn.Parameter) and back.is_cuda and torch.equal(back, model.weight)


def test_a_checkpoint_is_the_file_that_cuda_writes():
    buffer = io.BytesIO()
    with hasten.simulate():
        model = nn.Linear(2, 2).cuda()
        torch.save(model.state_dict(), buffer)
        weight = model.weight.detach().cpu()
        for location in (None, "cuda", "cuda:0", torch.device("cuda")):
            buffer.seek(0)
            assert torch.load(buffer, map_location=location)["weight"].is_cuda
        for place in ("cpu", lambda storage, tag: storage, {"cuda:0": "cpu"}):
            buffer.seek(0)
            assert torch.load(buffer, map_location=place)["weight"].device.type == "cpu"
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, map_location="cpu")["weight"], weight)
    if not torch.cuda.is_available():
        buffer.seek(0)
        with pytest.raises(RuntimeError, match="deserialize object on a CUDA device"):
            torch.load(buffer)


def test_generators_are_the_devices_own(sim):
    torch.manual_seed(3)
    first = torch.rand(3, device="cuda")
    torch.manual_seed(3)
    host = torch.rand(2)  # does not move the device's generator
    assert torch.equal(torch.rand(3, device="cuda"), first)
    torch.manual_seed(3)
    torch.rand(3, device="cuda")
    assert torch.equal(torch.rand(2), host)
    state = torch.cuda.get_rng_state()
    drawn = nn.functional.dropout(torch.ones(50, device="cuda"))
    torch.cuda.set_rng_state(state)
    assert torch.equal(nn.functional.dropout(torch.ones(50, device="cuda")), drawn)
    generator = torch.Generator(device="cuda").manual_seed(1)
    assert generator.device.type == "cuda" and isinstance(generator, torch.Generator)
    one = torch.randn(2, device="cuda", generator=generator)
    assert torch.equal(torch.randn(2, device="cuda", generator=generator.manual_seed(1)), one)
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        torch.randn(2, device="cuda", generator=torch.Generator())


def test_layout_and_views_are_the_devices_own(sim):
    x = torch.arange(6.0, device="cuda").view(2, 3)
    x[0].fill_(7)
    assert x.sum() == 7 * 3 + 3 + 4 + 5
    assert x.t_().shape == (3, 2) and x.stride() == (1, 3)
    y = x.T
    assert y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    out = torch.empty(0, device="cuda")
    torch.add(y, 1, out=out)
    assert out.shape == (2, 3)
    assert x.resize_(4, 4).shape == (4, 4)
    image = torch.ones(2, 3, 4, 4).to("cuda", memory_format=torch.channels_last)
    assert nn.Conv2d(3, 2, 1).cuda()(image).is_contiguous(memory_format=torch.channels_last)


def test_compile_runs_uncompiled_and_looks_compiled(sim):
    model = torch.compile(nn.Linear(2, 2).cuda())
    assert model(torch.ones(1, 2, device="cuda")).is_cuda
    assert "_orig_mod.weight" in model.state_dict()
