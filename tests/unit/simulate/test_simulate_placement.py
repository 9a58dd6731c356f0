"""Mixing devices is refused where CUDA refuses it, in its words, and allowed elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hasten
from hasten.simulate import Mismatch

TWO = "Expected all tensors to be on the same device, but found at least two devices, "


@pytest.fixture
def sim():
    with hasten.simulate() as simulation:
        yield simulation


def on_cuda(*shape):
    return torch.ones(*shape, device="cuda")


REFUSED = {
    "add": (lambda: on_cuda(3) + torch.ones(3), TWO + "cuda:0 and cpu!"),
    "linear": (
        lambda: nn.Linear(4, 2).cuda()(torch.ones(1, 4)),
        TWO + "cuda:0 and cpu! (when checking argument for argument mat1 in method "
        "wrapper_CUDA_addmm)",
    ),
    "matmul": (lambda: torch.ones(2, 2) @ on_cuda(2, 2), TWO + "cpu and cuda:0!"),
    "in place, from the host": (lambda: on_cuda(3).mul_(torch.ones(3)), TWO + "cuda:0 and cpu!"),
    "in place, on the host": (lambda: torch.ones(3).add_(on_cuda(3)), TWO),
    "out": (lambda: torch.add(on_cuda(3), on_cuda(3), out=torch.empty(3)), TWO),
    "cat": (lambda: torch.cat([on_cuda(2), torch.ones(2)]), "in method wrapper_CUDA_cat"),
    "embedding": (
        lambda: F.embedding(torch.tensor([0]), on_cuda(2, 2)),
        "argument index in method wrapper_CUDA__index_select",
    ),
    "gather": (
        lambda: on_cuda(1, 2).gather(0, torch.zeros(1, 2, dtype=torch.long)),
        "argument index in method wrapper_CUDA_gather",
    ),
    "class targets": (
        lambda: F.cross_entropy(on_cuda(2, 3), torch.tensor([0, 1])),
        "argument target in method wrapper_CUDA_nll_loss_forward",
    ),
    "weights of a convolution": (
        lambda: nn.Conv2d(1, 1, 1)(on_cuda(1, 1, 2, 2)),
        "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the "
        "same",
    ),
    "device indices into a host tensor": (
        lambda: torch.ones(3)[torch.tensor([1], device="cuda")],
        "indices should be either on cpu or on the same device as the indexed tensor (cpu)",
    ),
    "a mask": (
        lambda: on_cuda(3).masked_fill(torch.ones(3) > 0, 1.0),
        "expected self and mask to be on the same device, but got mask on cpu and self on cuda:0",
    ),
    "a condition": (lambda: torch.where(torch.ones(3) > 0, on_cuda(3), on_cuda(3)), TWO),
    "a number where none is taken": (lambda: on_cuda(3).logaddexp(torch.tensor(1.0)), TWO),
    "packed lengths on the device": (
        lambda: nn.utils.rnn.pack_padded_sequence(
            on_cuda(2, 3, 1), torch.tensor([3, 2], device="cuda"), batch_first=True
        ),
        "'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:0 Long tensor",
    ),
    "indices of the device into the host": (
        lambda: torch.ones(3)[torch.tensor([0], device="cuda")],
        "indices should be either on cpu or on the same device as the indexed tensor (cpu)",
    ),
    "values of the device into the host": (
        lambda: torch.ones(3).index_put_((torch.tensor([0]),), on_cuda(1)),
        "found at least two devices, cuda:0 and cpu!",
    ),
    # clamp.Tensor declares no exemption from the check of devices, and its TensorIterator takes no
    # numbers of the CPU either (TensorCompare.cpp).
    "a bound of clamp": (
        lambda: on_cuda(3).clamp(max=torch.tensor(1.0)),
        "(when checking argument for argument max in method wrapper_CUDA_clamp_Tensor)",
    ),
    "a vector to fill with": (
        lambda: on_cuda(3).fill_(torch.ones(1)),
        "fill_ only supports 0-dimension value tensor but got tensor with 1 dimensions.",
    ),
    "a storage of the host": (
        lambda: on_cuda(3).set_(torch.ones(3)),
        'Attempted to set the storage of a tensor on device "cuda:0" to a storage on different '
        'device "cpu"',
    ),
    "pinned memory on the device": (
        lambda: torch.ones(3, device="cuda", pin_memory=True),
        "Only dense CPU tensors can be pinned",
    ),
    "hidden state": (lambda: nn.GRU(1, 1).cuda()(on_cuda(2, 1, 1), torch.ones(1, 1, 1)), "device"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(sim, name):
    call, words = REFUSED[name]
    with pytest.raises(RuntimeError) as caught:
        call()
    assert words in str(caught.value) and caught.type is RuntimeError
    assert "privateuse" not in str(caught.value).lower()


ALLOWED = {
    "a number on the host": lambda: on_cuda(3) * torch.tensor(2.0),
    "a number on the host first": lambda: torch.tensor(2.0) - on_cuda(3),
    "host indices": lambda: on_cuda(3)[torch.tensor([0, 1])],
    "a host mask as index": lambda: on_cuda(3)[torch.ones(3) > 0],
    "a number written": lambda: on_cuda(3).index_put_((torch.tensor([0]),), torch.tensor(5.0)),
    "copy to the device": lambda: on_cuda(3).copy_(torch.zeros(3)),
    "assignment from the host": lambda: on_cuda(3).__setitem__(slice(None), torch.zeros(3)),
    "where with a number": lambda: torch.where(on_cuda(3) > 0, on_cuda(3), torch.tensor(0.0)),
    "filled with a number": lambda: on_cuda(3).masked_fill(on_cuda(3) > 0, torch.tensor(1.0)),
    "where by a condition of the host": lambda: torch.where(
        torch.tensor(True), on_cuda(3), torch.tensor(0.0)
    ),
    "where between two numbers": lambda: torch.where(
        on_cuda(3) > 0, torch.tensor(1.0), torch.tensor(0.0)
    ),
    "an exponent of ldexp": lambda: on_cuda(3).ldexp(torch.tensor(2.0)),
    "the host filled with a number of the device": lambda: torch.ones(3).fill_(on_cuda(1)[0]),
    "a number of the device written through a host mask": lambda: torch.ones(3).__setitem__(
        torch.ones(3) > 0, on_cuda(1)[0]
    ),
    "a weight of lerp": lambda: on_cuda(3).lerp(on_cuda(3), torch.tensor(0.5)),
    "packed lengths on the host": lambda: nn.utils.rnn.pack_padded_sequence(
        on_cuda(2, 3, 1), torch.tensor([3, 2]), batch_first=True
    ),
    "lengths of a CTC loss": lambda: F.ctc_loss(
        on_cuda(5, 1, 3).log_softmax(2), on_cuda(1, 2).long(), torch.tensor([5]), torch.tensor([2])
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(sim, name):
    ALLOWED[name]()
    assert not [e for e in sim.events if isinstance(e, Mismatch)]


def test_copy_to_the_host_is_allowed_and_is_a_copy(sim):
    target = torch.zeros(3)
    target.copy_(on_cuda(3))
    target[0] = on_cuda(1)[0] * 5
    assert target.tolist() == [5, 1, 1]


@pytest.mark.parametrize("convert", [lambda x: x.numpy(), np.asarray, np.array])
def test_numpy_on_the_device_is_a_type_error(sim, convert):
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        convert(on_cuda(2))
    assert convert(on_cuda(2).cpu()).tolist() == [1, 1]


def test_a_mismatch_is_recorded_with_its_line(sim):
    with pytest.raises(RuntimeError):
        on_cuda(2) + torch.ones(2)
    [event] = [e for e in sim.events if isinstance(e, Mismatch)]
    assert event.op == "add" and not event.repaired
    assert event.location.file == __file__


def test_repairing_goes_on_and_gradients_reach_the_host():
    asked = []

    def repair(info):
        asked.append((info.op, {o.role: o.device for o in info.operands}))
        return "repair"

    with hasten.simulate(on_mismatch=repair) as simulation:
        layer = nn.Linear(3, 2)
        out = layer(on_cuda(1, 3))
        out.sum().backward()
        assert out.is_cuda and layer.weight.grad.device.type == "cpu"
        host = torch.ones(2)
        host.add_(on_cuda(2))
        assert host.tolist() == [2, 2]
        lstm = nn.LSTM(3, 2)  # refused by a check before any operator runs
        lstm(on_cuda(1, 1, 3))[0].sum().backward()
        assert lstm.weight_ih_l0.grad is not None
        nn.utils.rnn.pack_padded_sequence(
            on_cuda(1, 3, 1), torch.tensor([3], device="cuda"), batch_first=True
        )
        assert all(e.repaired for e in simulation.events if isinstance(e, Mismatch))
    assert asked[0] == ("addmm", {"self": "cpu", "mat1": "cuda:0", "mat2": "cpu"})
    assert [op for op, _ in asked] == ["addmm", "add_", "lstm", "_pack_padded_sequence"]


def test_origins_name_the_users_line():
    with hasten.simulate(track_origins=True) as simulation:
        x = torch.zeros(2)
        model = nn.Linear(2, 2)
        origin = simulation.origin(x)
        made = simulation.origin(model.weight)
    assert (origin.file, origin.how) == (__file__, "zeros")
    assert made.file == __file__ and made.line == origin.line + 1
