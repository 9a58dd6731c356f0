"""Sparse tensors of the simulated device: the CPU's numbers, CUDA's placement."""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import hasten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

INDICES = torch.tensor([[0, 1, 1], [2, 0, 0]])
VALUES = torch.tensor([3.0, 4.0, 5.0])
DENSE = torch.arange(6.0).reshape(3, 2) - 2
LAYOUTS = {
    "coo": lambda x: x,
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
    "bsr": lambda x: x.to_sparse_bsr((1, 1)),
}


@pytest.fixture(autouse=True)
def simulation() -> Iterator[hasten.simulate.Simulation]:
    with hasten.simulate(devices=2) as running:
        yield running


def sparse(device: str = "cpu") -> torch.Tensor:
    """Two rows and three columns, with one place named twice."""
    return torch.sparse_coo_tensor(INDICES, VALUES, (2, 3), device=device)


def trained(device: str, model: nn.Module, optimizer: Callable[..., Any]) -> torch.Tensor:
    torch.manual_seed(0)
    nn.init.normal_(model.weight)
    model.to(device)
    optimize = optimizer(list(model.parameters()), lr=0.1)
    tokens = torch.arange(24).reshape(8, 3) % 7
    for step in range(4):
        optimize.zero_grad(set_to_none=step % 2 == 0)
        model(tokens.to(device)).pow(2).mean().backward()
        assert model.weight.grad.is_sparse
        assert model.weight.grad.device.type == device
        optimize.step()
    return model.weight.detach().cpu()


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        torch.optim.SparseAdam,
        torch.optim.Adagrad,
        lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    ],
    ids=["sgd", "sparse-adam", "adagrad", "momentum"],
)
def test_sparse_gradients_train_as_on_the_cpu(make: Any, optimizer: Any) -> None:
    kind = {"mode": "sum"} if make is nn.EmbeddingBag else {}
    on_cpu = trained("cpu", make(20, 4, sparse=True, **kind), optimizer)
    on_device = trained("cuda", make(20, 4, sparse=True, **kind), optimizer)
    assert torch.equal(on_cpu, on_device)


def test_gradients_of_two_backward_passes_add_up() -> None:
    model = nn.Embedding(5, 2, sparse=True).cuda()
    for token in (1, 1, 3):
        model(torch.tensor([token], device="cuda")).sum().backward()
    expected = torch.zeros(5, 2)
    expected[1], expected[3] = 2, 1
    assert torch.equal(model.weight.grad.to_dense().cpu(), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_round_trip_keeps_values_and_layout(layout: str) -> None:
    host = LAYOUTS[layout](sparse())
    there = host.to("cuda:1")
    assert (there.device, there.layout) == (torch.device("cuda:1"), host.layout)
    assert there.is_cuda
    assert there.values().device == there.device if layout != "coo" else True
    assert torch.equal(there.cpu().to_dense(), host.to_dense())
    assert torch.equal(there.to("cuda:0").to_dense().cpu(), host.to_dense())
    assert "device='cuda:1'" in repr(there)


def test_constructors_put_their_parts_on_the_device() -> None:
    made = sparse("cuda:1")
    assert (made.device, made._indices().device) == (torch.device("cuda:1"),) * 2
    whole = made.coalesce()
    assert whole.is_coalesced()
    assert whole.indices().cpu().tolist() == [[0, 1], [2, 0]]
    assert whole.values().cpu().tolist() == [3, 9]
    rows = torch.sparse_csr_tensor([0, 1, 2], [1, 0], [1.0, 2.0], (2, 2), device="cuda")
    assert rows.crow_indices().is_cuda
    assert rows.to_dense().tolist() == [[0, 1], [2, 0]]


OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mm": lambda s, d: torch.sparse.mm(s, d),
    "matmul": lambda s, d: s @ d,
    "mv": lambda s, d: s @ d[:, 0],
    "sparse-sparse": lambda s, d: torch.sparse.mm(s, s.t()),
    "add": lambda s, d: d.t() + s,
    "add-in-place": lambda s, d: d.t().contiguous().add_(s, alpha=-0.5),
    "sparse-add-in-place": lambda s, d: s.clone().add_(s),
    "mul": lambda s, d: s * 2,
    "mul-in-place": lambda s, d: s.coalesce().mul_(3),
    "neg-in-place": lambda s, d: s.clone().neg_(),
    "zero-in-place": lambda s, d: s.clone().zero_(),
    "sum": lambda s, d: torch.sparse.sum(s, 0),
    "softmax": lambda s, d: torch.sparse.softmax(s.coalesce(), 1),
    "to-sparse": lambda s, d: d.to_sparse(),
    "mask": lambda s, d: d.t().sparse_mask(s.coalesce()),
    "transpose": lambda s, d: s.t(),
    "cat": lambda s, d: torch.cat([s, s]),
    "row": lambda s, d: s[1],
    "bmm": lambda s, d: torch.bmm(torch.stack([s, s]), d.expand(2, 3, 2)),
    "norm": lambda s, d: s.coalesce().norm(),
    "csr-mm": lambda s, d: s.to_sparse_csr() @ d,
    "csr-add": lambda s, d: s.to_sparse_csr() + s.to_sparse_csr(),
    "double": lambda s, d: s.double(),
    "deepcopy": lambda s, d: copy.deepcopy(s),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_agree_with_the_cpu(name: str) -> None:
    operator = OPERATORS[name]
    on_cpu = operator(sparse(), DENSE)
    on_device = operator(sparse("cuda"), DENSE.cuda())
    assert on_device.is_cuda
    assert on_device.layout == on_cpu.layout
    assert torch.equal(on_device.to_dense().cpu(), on_cpu.to_dense())


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_product_has_the_cpus_gradients(layout: str) -> None:
    found = []
    for device in ("cpu", "cuda"):
        left = LAYOUTS[layout](sparse()).to(device).requires_grad_()
        right = DENSE.clone().to(device).requires_grad_()
        torch.sparse.mm(left, right).pow(2).sum().backward()
        assert left.grad is not None and right.grad is not None
        assert left.grad.device.type == right.grad.device.type == device
        found.append((left.grad.to_dense().cpu(), right.grad.cpu()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


MIXED: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse-dense": (
        lambda: torch.sparse.mm(sparse("cuda"), DENSE),
        r"two devices, cpu and cuda:0! .*wrapper_SparseCUDA_addmm",
    ),
    "dense-sparse": (
        lambda: torch.sparse.mm(sparse(), DENSE.cuda()),
        r"two devices, cuda:0 and cpu! .*argument mat1 in method wrapper_SparseCUDA_addmm",
    ),
    "csr": (
        lambda: sparse("cuda").to_sparse_csr() @ DENSE,
        r"cuda:0 and cpu! .*argument mat2 in method wrapper_SparseCsrCUDA_mm",
    ),
    "add": (
        lambda: DENSE.t().cuda() + sparse(),
        "add: expected 'other' to be a CUDA tensor, but got a CPU tensor",
    ),
    "parts": (
        lambda: torch.sparse_coo_tensor(INDICES, VALUES.cuda(), (2, 3)),
        r"backend of indices \(CPU\) must match backend of values \(CUDA\)",
    ),
    "two-devices": (
        lambda: sparse("cuda:0") @ DENSE.to("cuda:1"),
        "two devices, cuda:0 and cuda:1!",
    ),
    "numpy": (lambda: sparse("cuda").to_dense().numpy(), "can't convert cuda:0 device type"),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixing_is_refused_in_cudas_words(name: str) -> None:
    call, words = MIXED[name]
    with pytest.raises((RuntimeError, TypeError), match=words):
        call()


def test_files_hold_what_cuda_would_write() -> None:
    file = io.BytesIO()
    torch.save({"a": sparse("cuda:1")}, file)
    for map_location, device in ((None, "cuda:1"), ("cpu", "cpu")):
        file.seek(0)
        back = torch.load(file, map_location=map_location)["a"]
        assert back.device == torch.device(device)
        assert torch.equal(back.to_dense().cpu(), sparse().to_dense())


def test_coalescing_waits_and_memory_is_given_back(
    simulation: hasten.simulate.Simulation,
) -> None:
    before = simulation.memory(0).allocated_bytes
    there = sparse("cuda")
    assert simulation.memory(0).allocated_bytes > before
    del simulation.events[:]
    there.coalesce()
    waits = [x.kind for x in simulation.events if isinstance(x, hasten.simulate.Sync)]
    assert waits == ["unique"]
    there.add_(there)
    del there
    assert simulation.memory(0).allocated_bytes == before


def test_a_module_moves_its_sparse_buffer_and_pins_its_parts() -> None:
    module = nn.Module()
    module.register_buffer("graph", sparse())
    module.cuda()
    assert module.graph.device == torch.device("cuda:0")  # type: ignore[union-attr]
    pinned = sparse().pin_memory()
    assert pinned.is_pinned()
    assert not sparse().is_pinned()


def test_a_repair_moves_a_sparse_operand(simulation: hasten.simulate.Simulation) -> None:
    simulation.on_mismatch = lambda info: "repair"
    found = torch.sparse.mm(sparse(), DENSE.cuda())
    assert torch.equal(found.cpu(), torch.sparse.mm(sparse(), DENSE))
    assert any(isinstance(x, hasten.simulate.Mismatch) for x in simulation.events)


def test_what_cuda_has_no_sparse_kernel_for_is_refused() -> None:
    rows = sparse("cuda").to_sparse_csr()
    with pytest.raises(NotImplementedError, match=r"_sparse_mm_reduce_impl.*'SparseCsrCUDA'"):
        torch.sparse.mm(rows, DENSE.cuda(), "sum")
