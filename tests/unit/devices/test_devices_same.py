"""Do tensors meet? The device ``meta`` is the other device: any machine has it."""

from __future__ import annotations

import dataclasses
from collections import Counter, namedtuple

import pytest
import torch
import torch._dynamo  # optimizers load it, and it sets a variable that the leak police would see
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import hasten
from hasten.devices import meeting, same_device
from hasten.devices.naming import argument_names
from hasten.devices.places import places
from hasten.errors import DeviceMismatch

CPU, META = torch.device("cpu"), torch.device("meta")


def there(*shape):
    return torch.ones(*shape, device=META)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(2))
        self.mask = torch.ones(2)
        self.note = "a string"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()


def mismatch(call):
    with pytest.raises(DeviceMismatch) as caught:
        call()
    return caught.value


def test_the_device_on_which_all_meet_is_given():
    assert same_device(Model(), [torch.ones(2)], {"x": torch.ones(1)}) == CPU
    assert same_device(there(2), [there(3)]) == META
    assert same_device() is None
    assert same_device("a", 1, None, [], nn.ReLU()) is None


def test_arguments_are_named_as_the_caller_wrote_them():
    model, batch = Model(), {"image": [there(4, 3)]}
    error = mismatch(lambda: same_device(model, batch, batch["image"]))
    assert "batch['image'][0] is on meta (float32 [4, 3])" in str(error)
    assert error.tensors["batch['image'][0]"] == "meta"
    assert error.tensors["model.encoder.layer.weight"] == "cpu"
    assert isinstance(error, RuntimeError)


def test_arguments_without_a_name_are_counted():
    error = mismatch(lambda: same_device(there(2), torch.ones(2)))
    assert set(error.tensors) == {"argument 1", "argument 2"}
    pair = [there(2), torch.ones(2)]
    assert set(mismatch(lambda: same_device(*pair)).tensors) == {"argument 1", "argument 2"}
    assert set(mismatch(lambda: same_device(teacher=pair[0], student=pair[1])).tensors) == {
        "teacher",
        "student",
    }


def test_names_come_from_calls_of_several_lines_and_of_other_letters():
    größe = there(2)
    batch = {"ä": torch.ones(2)}
    with pytest.raises(DeviceMismatch) as caught:
        same_device(
            größe,
            batch["ä"],
        )
    assert set(caught.value.tensors) == {"größe", "batch['ä']"}


def test_arguments_before_a_starred_one_keep_their_names():
    model, rest = Model(), [there(1)]
    paths = mismatch(lambda: same_device(model.encoder, *rest)).tensors
    assert {"model.encoder.scale", "argument 2"} < set(paths)


def test_names_are_plain_where_there_is_no_source():
    scope = {"argument_names": argument_names}
    exec("def ask(*a): return argument_names(len(a))\nfound = ask(print, len)", scope)
    assert scope["found"] == ["argument 1", "argument 2"]


def test_the_same_expression_twice_is_counted():
    x = there(2)
    assert same_device(x, x) == META


def test_a_plain_tensor_attribute_is_to_be_registered_by_name():
    model = Model()
    model.encoder.mask = there(2)
    error = mismatch(lambda: same_device(model))
    assert "model.encoder.mask" in str(error)
    assert 'in Encoder.__init__: self.register_buffer("mask", …)' in str(error)


@pytest.mark.parametrize(
    ("attribute", "advice"),
    [
        ([nn.Linear(2, 2, device=META)], "self.parts = nn.ModuleList(…)"),
        ({"a": nn.Linear(2, 2, device=META)}, "self.parts = nn.ModuleDict(…)"),
        ([nn.Parameter(there(2))], "self.parts = nn.ParameterList(…)"),
        (
            [there(2)],
            'register each tensor of self.parts as a buffer (self.register_buffer("parts_0"',
        ),
        ({"k": (there(2),)}, "register each tensor of self.parts"),
    ],
    ids=["modules in a list", "modules in a dict", "parameters", "tensors", "nested tensors"],
)
def test_what_hides_in_plain_containers_of_a_module_is_found(attribute, advice):
    model = nn.Sequential(nn.Linear(2, 2))
    model.parts = attribute
    error = mismatch(lambda: same_device(model))
    assert advice in str(error)
    assert any(path.startswith("model.parts[") for path in error.tensors)


def test_a_module_kept_out_of_registration_is_found():
    model = nn.Linear(2, 2)
    object.__setattr__(model, "teacher", nn.Linear(2, 2, device=META))
    assert "model.teacher.weight" in str(mismatch(lambda: same_device(model)))


def test_a_plain_list_that_repeats_registered_modules_hides_nothing():
    model = Model()
    model.again = [model.encoder]
    model.mine = list(model.parameters())
    found = places({"model": model})
    assert Counter(place.path for place in found).most_common(1)[0][1] == 1
    assert not [place for place in found if "again" in place.path or "mine" in place.path]


def test_a_submodule_left_behind_is_mended_by_moving_the_model():
    model = Model()
    model.encoder.layer = nn.Linear(2, 2, device=META)
    assert "model.to_empty(device='cpu')" in str(mismatch(lambda: same_device(model)))


def test_a_batch_left_behind_is_mended_by_move():
    lines = mend_lines({"model.weight": "cuda:0", "model.bias": "cuda:0", "batch[0]": "cpu"})
    assert lines == ["batch = hasten.move(batch, 'cuda:0')"]


def test_who_put_anything_on_an_accelerator_means_to_compute_there():
    lines = mend_lines({"model.weight": "cpu", "model.bias": "cpu", "batch": "cuda:0"})
    assert lines == ["model.to('cuda:0')"]
    lines = mend_lines({"model.weight": "cuda:1", "model.bias": "cuda:1", "batch": "cuda:0"})
    assert lines == ["batch = hasten.move(batch, 'cuda:1')"]


class Elsewhere(torch.Tensor):
    """A tensor that says it is on a device that need not be here."""

    device = None


def mend_lines(devices):
    found = []
    for path, name in devices.items():
        root = path.split(".")[0].split("[")[0]
        kind = meeting.Kind.REGISTERED if root == "model" else meeting.Kind.DATA
        tensor = torch.ones(2).as_subclass(Elsewhere)
        tensor.device = torch.device(name)
        found.append(meeting.Place(path, root, kind, tensor))
    counts = Counter(place.device for place in found)
    text = str(meeting._mismatch(found, counts))
    return [line.strip() for line in text.split("What to do:\n")[1].splitlines()]


def test_a_cpu_scalar_agrees_with_any_device():
    assert same_device(there(2), torch.tensor(0.5)) == META
    assert same_device(torch.tensor(0.5)) == CPU
    assert "argument 2" in str(
        mismatch(lambda: same_device(torch.ones(2), torch.tensor(0.5, device=META)))
    )


def test_an_optimizers_state_is_found_by_the_name_of_its_parameter():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert same_device(model, optimizer) == CPU
    state = optimizer.state[model.weight]
    state["exp_avg"] = state["exp_avg"].to(META)
    error = mismatch(lambda: same_device(model, optimizer))
    assert "optimizer.state[model.weight]['exp_avg']" in str(error)
    assert "hasten.move(optimizer, 'cpu')" in str(error)


def test_an_optimizer_alone_shows_its_parameters():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2)), nn.Parameter(there(2))], lr=1)
    assert "optimizer.param_groups[0]['params'][1]" in str(mismatch(lambda: same_device(optimizer)))


def test_paths_speak_the_language_of_each_container():
    point = namedtuple("point", "x y")

    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor
        rest: list

    batch = Batch(torch.ones(2), [point(there(1), torch.ones(2)), {"k": torch.ones(3)}])
    packed = pack_sequence([torch.ones(2)])
    paths = set(mismatch(lambda: same_device(batch, packed)).tensors)
    assert paths == {
        "batch.x",
        "batch.rest[0].x",
        "batch.rest[0].y",
        "batch.rest[1]['k']",
        "packed.data",
    }


def test_a_cycle_ends():
    loop = [torch.ones(2)]
    loop.append(loop)
    assert same_device(loop) == CPU


def test_a_long_list_of_strays_is_cut():
    batch = [torch.ones(1), *[there(1) for _ in range(50)]]
    error = mismatch(lambda: same_device(batch))
    assert "… and 40 more" in str(error)
    assert len(str(error).splitlines()) < 20
    assert len(error.tensors) == 51


def test_it_is_public():
    assert hasten.same_device is same_device
