"""A plain CUDA training script runs, and loses nothing against the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hasten


def small_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def losses(device: str, optimizer: str, steps: int = 4) -> list[float]:
    torch.manual_seed(0)
    net = small_net().to(device)
    made = getattr(torch.optim, optimizer)(net.parameters(), lr=0.01)
    found = []
    for _ in range(steps):
        data = torch.randn(4, 3, 8, 8).to(device)
        labels = torch.randint(0, 10, (4,)).to(device)
        loss = nn.functional.cross_entropy(net(data), labels)
        made.zero_grad()
        loss.backward()
        made.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
def test_losses_are_the_cpus_to_the_bit(optimizer):
    on_cpu = losses("cpu", optimizer)
    with hasten.simulate():
        assert losses("cuda", optimizer) == on_cpu


def test_a_backward_on_the_cpu_before_does_not_matter():
    # The engine makes its queues at the first backward of a process, before the device is known.
    x = torch.ones(2, requires_grad=True)
    (x * x).sum().backward()
    with hasten.simulate(2):
        y = torch.ones(2, device="cuda:1", requires_grad=True)
        (y * y).sum().backward()
        assert y.grad.device == torch.device("cuda:1")


def test_moving_a_module_keeps_its_parameters():
    with hasten.simulate():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        weight = model.weight
        model(torch.ones(1, 3)).sum().backward()
        grad = weight.grad
        model.cuda()
        assert model.weight is weight and type(weight) is nn.Parameter
        assert weight.is_cuda and weight.grad is grad and grad.is_cuda
        before = weight.detach().cpu().clone()
        optimizer.step()  # made before the move, and still right
        assert not torch.equal(weight.detach().cpu(), before)
        assert model.cpu().weight is weight and not weight.is_cuda


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_pins_and_copies_do_not_block(workers):
    with hasten.simulate() as simulation:
        data = TensorDataset(torch.arange(8.0).view(8, 1), torch.arange(8))
        seen = []
        for x, y in DataLoader(data, batch_size=4, pin_memory=True, num_workers=workers):
            assert x.is_pinned() and y.is_pinned()
            seen += x.to("cuda", non_blocking=True).flatten().tolist()
        copies = [e for e in simulation.events if isinstance(e, hasten.simulate.Copy)]
        up = [e for e in copies if e.direction == "h2d"]
        assert seen == list(range(8))
        assert len(up) == 2 and all(e.pinned and e.non_blocking for e in up)


def test_autocast_and_the_scaler():
    with hasten.simulate():
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        x, y = torch.randn(3, 4, device="cuda"), torch.zeros(3, 2, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(x)
            loss = nn.functional.mse_loss(out, y)
        assert out.dtype is torch.float16 and loss.dtype is torch.float32
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert all(p.grad.dtype is torch.float32 for p in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        assert model(x).dtype is torch.float32
        with torch.autocast("cuda"), pytest.raises(RuntimeError, match="unsafe to autocast"):
            nn.functional.binary_cross_entropy(out.sigmoid(), y)


def test_data_parallel_uses_its_devices():
    with hasten.simulate(2):
        seen = []
        net = small_net()
        net.register_forward_hook(lambda module, given, out: seen.append(out.device.index))
        parallel = nn.DataParallel(net).cuda()
        out = parallel(torch.randn(4, 3, 8, 8))  # from the host: scattered
        out.sum().backward()
        assert out.shape == (4, 10) and out.device == torch.device("cuda:0")
        assert sorted(seen) == [0, 1]
        assert all(p.grad.device.index == 0 for p in net.parameters())
        assert next(iter(parallel.state_dict())).startswith("module.")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_runs_the_forward_again_under_the_same_names(reentrant):
    from torch.utils.checkpoint import checkpoint

    with hasten.simulate():
        layer = nn.Linear(3, 3).cuda()
        runs = []

        def forward(x):
            runs.append(x.device)
            return layer(x) * torch.ones(3, device="cuda")

        x = torch.randn(2, 3, device="cuda", requires_grad=True)
        checkpoint(forward, x, use_reentrant=reentrant).sum().backward()
        assert runs == [torch.device("cuda:0")] * 2 and x.grad.is_cuda


def test_recurrent_networks_agree_with_the_cpu():
    def run(device, kind):
        torch.manual_seed(0)
        net = kind(3, 4, num_layers=2, bidirectional=True).to(device)
        x = torch.randn(5, 2, 3).to(device)
        out, _ = net(x)
        out.square().sum().backward()
        return out.detach().cpu(), net.weight_hh_l0.grad.cpu()

    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        expected = run("cpu", kind)
        with hasten.simulate():
            found = run("cuda", kind)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_a_hook_that_raises_is_an_error_and_not_an_abort():
    def hook(grad):
        raise ValueError("from the hook")

    with hasten.simulate():
        x = torch.ones(2, device="cuda", requires_grad=True)
        x.register_hook(hook)
        with pytest.raises(ValueError, match="from the hook"):
            (x * 2).sum().backward()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, hook):
            y = torch.ones(2, device="cuda", requires_grad=True)
            loss = (y * y).sum()
        with pytest.raises(ValueError, match="from the hook"):
            loss.backward()
