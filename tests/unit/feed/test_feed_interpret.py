"""Which data sets are seen to only index tensors, and which only seem to."""

from __future__ import annotations

import hashlib
import random
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from hasten.errors import DataError
from hasten.feed import Loader, interpret
from hasten.feed import recognise as recognise_module
from hasten.feed.compare import identical
from hasten.feed.recognise import recognise

COUNT = 50


def images() -> torch.Tensor:
    return torch.arange(COUNT * 12, dtype=torch.uint8).reshape(COUNT, 3, 4)


class Base(Dataset[Any]):
    """Images and labels under names of their own."""

    def __init__(self, transform: Any = None) -> None:
        self.pictures = images()
        self.digits = torch.arange(COUNT) % 7
        self.grey = images().numpy().copy()
        self.classes = (np.arange(COUNT) % 5).astype(np.uint8)
        self.names = [number * 3 for number in range(COUNT)]
        self.store = {"x": torch.randn(COUNT, 2), "scale": 2.0}
        self.transform = transform
        self.asked = 0

    def __len__(self) -> int:
        return COUNT


class Tuple(Base):
    def __getitem__(self, index: int) -> Any:
        """A tuple of rows."""
        return self.pictures[index], self.digits[index]


class PythonInt(Base):
    def __getitem__(self, index: int) -> Any:
        image, label = self.grey[index], int(self.classes[index])
        return image, label


class Item(Base):
    def __getitem__(self, index: int) -> Any:
        return self.pictures[index], self.digits[index].item(), self.classes[index]


class Listed(Base):
    def __getitem__(self, index: int) -> Any:
        label = self.names[int(index)]
        return [self.pictures[index], label]


class Dictionary(Base):
    def __getitem__(self, index: int) -> Any:
        return {"image": self.store["x"][index], "label": self.names[index], "from": "here", "n": 3}


class Named(NamedTuple):
    image: Any
    rest: Any


class AsNamed(Base):
    def __getitem__(self, index: int) -> Any:
        return Named(self.pictures[index], rest=(self.digits[index], float(self.classes[index])))


class Transformed(Base):
    def __getitem__(self, index: int) -> Any:
        image = self.pictures[index]
        if self.transform is not None:
            image = self.transform(image)
        return image, self.digits[index]


class Helping(Base):
    def _image(self, number: int) -> Any:
        return torch.from_numpy(self.grey[number])

    def __getitem__(self, index: int) -> Any:
        return self._image(index).to(torch.float32), torch.tensor(int(self.classes[index]))


class Inherited(Transformed):
    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return label, image


class Normalise:
    def __init__(self, mean: float, std: float) -> None:
        self.mean = mean
        self.std = std

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return (image.float() / 255 - self.mean) / self.std


def scaled(image: torch.Tensor) -> torch.Tensor:
    return image.float() / 255.0


class Numpy(Base):
    def __getitem__(self, index: int) -> Any:
        return self.grey[index].astype(np.float32) * 0.5, self.classes[index]


SEEN = {
    "tuple": Tuple,
    "python int": PythonInt,
    "item": Item,
    "list": Listed,
    "dict": Dictionary,
    "named": AsNamed,
    "no transform": Transformed,
    "function": lambda: Transformed(scaled),
    "lambda": lambda: Transformed(lambda image: -image.float().clamp(0, 9)),
    "object": lambda: Transformed(Normalise(0.5, 0.25)),
    "helping": Helping,
    "inherited": lambda: Inherited(scaled),
    "numpy": Numpy,
    "subset": lambda: Subset(PythonInt(), [3, -1, 3, 0]),
    "concat": lambda: ConcatDataset([PythonInt(), PythonInt()]),
}


@pytest.mark.parametrize("name", SEEN)
def test_seen_to_only_index(name: str) -> None:
    dataset = SEEN[name]()
    assert recognise(dataset, None) is not None
    options: dict[str, Any] = {"batch_size": 7, "shuffle": True, "seed": 4}
    with Loader(dataset, **options) as ours, Loader(dataset, plan="inline", **options) as plain:
        assert ours.plan.name == "gather"
        for _ in range(2):  # the first epoch compares, the second does not
            assert all(identical(a, b) for a, b in zip(ours, plain, strict=True))
        assert ours.plan.name == "gather"


def rare(index: int) -> bool:
    return hashlib.blake2b(str(index).encode()).digest()[0] == 0


class Counting(Base):
    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return self.pictures[index], self.digits[index]


class Writing(Base):
    def __getitem__(self, index: int) -> Any:
        image = self.pictures[index]
        image += 1
        return image


class InPlace(Base):
    def __getitem__(self, index: int) -> Any:
        return self.pictures[index].add_(1)


class EveryThird(Base):
    def __getitem__(self, index: int) -> Any:
        if index % 3 == 2:
            return self.pictures[index] + 1
        return self.pictures[index]


class Hashed(Base):
    def __getitem__(self, index: int) -> Any:
        return self.pictures[index] + (1 if rare(index) else 0)


class ByLabel(Base):
    def __getitem__(self, index: int) -> Any:
        return self.pictures[index] if self.digits[index] != 6 else self.pictures[0]


class Random(Base):
    def __getitem__(self, index: int) -> Any:
        image = self.pictures[index]
        if random.random() < 0.001:
            image = image.flip(0)
        return image


class Other(Base):
    def __getitem__(self, index: int) -> Any:
        return self.pictures[index - 1]


class Both(Base):
    def __getitem__(self, index: int) -> Any:
        return self.pictures[index], self.names[self.names[index] // 3]


class ItsIndex(Base):
    def __getitem__(self, index: int) -> Any:
        return self.pictures[index], index


class Logging(Base):
    log: ClassVar[list[int]] = []

    def __getitem__(self, index: int) -> Any:
        self.log.append(index)
        return self.pictures[index]


class Global(Base):
    def __getitem__(self, index: int) -> Any:
        global _calls
        _calls = _calls + 1
        return self.pictures[index]


class Property(Base):
    @property
    def data(self) -> Any:
        self.asked += 1
        return self.pictures

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


class Getting(Base):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.asked += 1
        return self.pictures

    def __getitem__(self, index: int) -> Any:
        return self.whatever[index]


class Longer(Base):
    def __len__(self) -> int:
        return COUNT - 1

    def __getitem__(self, index: int) -> Any:
        return self.pictures[index]


def cached(function: Any) -> Any:
    def wrapper(self: Any, index: int) -> Any:
        self.asked += 1
        return function(self, index)

    return wrapper


class Decorated(Base):
    @cached
    def __getitem__(self, index: int) -> Any:
        return self.pictures[index]


class Made(Base):
    exec("def __getitem__(self, index): return self.pictures[index]")


class Overridden(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return tuple(value + (index == 17) for value in super().__getitem__(index))


class Indexing(torch.Tensor):
    def __getitem__(self, index: Any) -> Any:  # type: ignore[override]
        return torch.Tensor.__getitem__(self.as_subclass(torch.Tensor), index) + 1


class Subclass(Tuple):
    def __init__(self) -> None:
        super().__init__()
        self.pictures = images().as_subclass(Indexing)


class Holder(Base):
    """Truthy or not by what it holds: an empty nn.Sequential is neither None nor true."""

    def __getitem__(self, index: int) -> Any:
        image = self.pictures[index].float()
        return self.transform(image) if self.transform else image


class ListArithmetic(Base):
    def __getitem__(self, index: int) -> Any:
        return self.pictures[index], self.names[index] * 2**62


class Raising(Base):
    def __getitem__(self, index: int) -> Any:
        if index == 31:
            raise IndexError
        return self.pictures[index]


_calls = 0

ONLY_SEEMS = {
    "counts": Counting,
    "writes": Writing,
    "writes by a method": InPlace,
    "every third": EveryThird,
    "a few by a hash": Hashed,
    "by its label": ByLabel,
    "random": Random,
    "another row": Other,
    "an index of an index": Both,
    "its own index": ItsIndex,
    "logs": Logging,
    "a global": Global,
    "a property": Property,
    "__getattr__": Getting,
    "longer columns": Longer,
    "decorated": Decorated,
    "no source": Made,
    "a tensor data set": lambda: Overridden(images(), torch.arange(COUNT)),
    "a tensor of its own": Subclass,
    "an empty container": lambda: Holder(torch.nn.Sequential()),
    "big numbers": ListArithmetic,
    "raises": Raising,
    "per sample": lambda: Transformed(lambda image: image / image.max()),
    "least": lambda: Transformed(lambda image: image - image.min()),
    "order of axes": lambda: Transformed(lambda image: image.permute(1, 0)),
    "a draw": lambda: Transformed(lambda image: image + torch.rand(1)),
    "a module": lambda: Transformed(torch.nn.Dropout(0.0)),
    "a builtin": lambda: Transformed(sorted),
    "concat of two ways": lambda: ConcatDataset([Transformed(), Transformed(scaled)]),
    "concat with another": lambda: ConcatDataset([Tuple(), EveryThird()]),
    "subset of another": lambda: Subset(Counting(), [1, 2]),
}


@pytest.mark.parametrize("name", ONLY_SEEMS)
def test_what_only_seems_to_is_left_alone(name: str) -> None:
    global _calls
    _calls = 0
    dataset = ONLY_SEEMS[name]()
    assert recognise(dataset, None) is None
    assert getattr(dataset, "asked", 0) == 0 and _calls == 0 and not Logging.log
    loader = Loader(ONLY_SEEMS[name](), 5)
    assert loader.plan.name not in ("gather", "resident")


def test_source_that_is_not_what_runs_is_not_believed(tmp_path: Any) -> None:
    """The file was edited after it was imported."""
    file = tmp_path / "mine.py"
    text = "class Mine:\n    def __getitem__(self, index):\n        return self.x[index]{}\n"
    file.write_text(text.format(" + 1"))
    names: dict[str, Any] = {"__name__": "mine"}
    exec(compile(file.read_text(), str(file), "exec", dont_inherit=True), names)
    file.write_text(text.format(""))
    dataset = names["Mine"]()
    dataset.x = torch.arange(5)
    type(dataset).__len__ = lambda self: 5
    assert recognise(dataset, None) is None
    file.write_text(text.format(" + 1"))
    import linecache

    linecache.checkcache(str(file))
    found = recognise(dataset, None)
    assert found is not None
    assert found.batch(np.array([1, 3])).tolist() == [2, 4]


@pytest.mark.parametrize("change", ["tensor", "transform", "list", "attribute", "subset"])
def test_a_data_set_that_changes_between_epochs_is_looked_at_again(change: str) -> None:
    inner = Transformed() if change != "list" else Listed()
    dataset: Any = Subset(inner, list(range(20))) if change == "subset" else inner
    loader = Loader(dataset, 5)
    assert loader.plan.name == "gather"
    list(loader)
    if change == "tensor":
        inner.pictures = inner.pictures.flip(0)
    elif change == "transform":
        inner.transform = scaled
    elif change == "list":
        inner.names[3] = 1000
    elif change == "attribute":
        inner.transform = lambda image: image.sum()
    else:
        dataset.indices[4] = 45
    assert all(map(identical, loader, Loader(dataset, 5, plan="inline")))
    assert (loader.plan.name == "gather") == (change != "attribute")


def test_writing_to_the_tensors_shows_in_the_next_batch() -> None:
    dataset = Tuple()
    batches = iter(Loader(dataset, 10))
    next(batches)
    dataset.pictures.fill_(9)
    assert next(batches)[0].eq(9).all()


def test_a_sample_that_differs_after_all_is_caught_in_its_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rules for reading code may be wrong; here they are, to see the last line of defence."""
    monkeypatch.setattr(recognise_module, "_trials", lambda rows: [np.array([0, 1])])
    right = recognise_module.layout_of(Tuple())
    monkeypatch.setattr(recognise_module, "layout_of", lambda dataset: right)

    class Late(Tuple):
        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return image + (index >= 30), label

    late = Late()
    assert right is not None
    late.pictures, late.digits = (part.column.rows for part in right.shape)
    loader = Loader(late, 10)
    assert loader.plan.name == "gather"
    expected = list(Loader(late, 10, plan="inline"))
    assert all(map(identical, loader, expected))
    assert loader.plan.name == "inline"
    assert "sample 33 is not what indexing the tensors gives" in str(loader.plan)


def test_a_sampler_of_ones_own_and_negative_indices() -> None:
    for batches in ([[0, 1], [-1, 4]], [[3]]):
        ours = list(Loader(PythonInt(), batch_sampler=batches))
        assert all(map(identical, ours, Loader(PythonInt(), batch_sampler=batches, plan="inline")))


class Numbers(Dataset[Any]):
    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return self.values[index]


@pytest.mark.parametrize(
    "values", [[0, -1, 2**63 - 1, -(2**63)], [0.1, float("inf"), -0.0, float("nan")]]
)
def test_lists_of_numbers_are_columns_of_all_their_bits(values: list[Any]) -> None:
    table = recognise(Numbers(values), None)
    assert table is not None
    assert identical(table.batch(np.arange(4)), torch.utils.data.default_collate(values))


@pytest.mark.parametrize("values", [[1, 2**63], [0.1, 1], [True, 1], [1, None], [1, "2"]])
def test_lists_of_others_are_not(values: list[Any]) -> None:
    assert recognise(Numbers(values), None) is None


class Whole(Dataset[Any]):
    """Labels that are floats, as a table with gaps gives them."""

    def __init__(self, labels: Any) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return int(self.labels[index])


class WholeTensor(Whole):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor(int(self.labels[index]))


class Converted(Whole):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor(self.labels[index], dtype=torch.long)


class Bytes(Whole):
    def __getitem__(self, index: int) -> Any:
        return torch.as_tensor(self.labels[index].item(), dtype=torch.uint8)


class Array(Whole):
    def __getitem__(self, index: int) -> Any:
        return np.asarray(int(self.labels[index]), dtype=np.int8)


GAPS = [float("nan"), float("inf"), -float("inf"), 1e30]
KINDS = [Whole, WholeTensor, Converted, Bytes, Array]


@pytest.mark.parametrize(
    ("kind", "odd"),
    [*((kind, odd) for kind in KINDS for odd in GAPS), (Bytes, 300), (Array, -129), (Bytes, 256.0)],
)
@pytest.mark.parametrize("hold", [torch.tensor, np.array])
@pytest.mark.filterwarnings("ignore:To copy construct")
def test_a_number_that_is_no_integer_of_its_type_raises_as_it_would(
    hold: Any, kind: type[Whole], odd: float
) -> None:
    """A gap in the labels was given as -9223372036854775808."""
    labels = [type(odd)(each % 100) for each in range(1000)]
    good, bad = kind(hold(labels)), kind(hold([*labels[:777], odd, *labels[778:]]))
    assert recognise(good, None) is not None
    if kind is Converted and hold is torch.tensor:  # of one tensor another, which never raises
        assert identical(list(Loader(bad, 8)), list(DataLoader(bad, 8)))
        return
    assert recognise(bad, None) is None
    for loader in (DataLoader(bad, 8), Loader(bad, 8), Loader.from_dataloader(DataLoader(bad, 8))):
        with pytest.raises((ValueError, OverflowError, RuntimeError, DataError)):
            list(loader)


def test_integers_that_all_fit_are_not_looked_through() -> None:
    dataset = WholeTensor(torch.arange(100, dtype=torch.int32))
    layout = interpret.layout_of(dataset)
    assert layout is not None
    assert not layout._fitting


def test_an_integer_of_a_float_that_becomes_none_raises_as_it_would() -> None:
    labels = torch.arange(100.0)
    dataset = Whole(labels)
    with Loader(dataset, 8) as loader:
        assert loader.plan.name == "gather"
        list(loader)
        labels[50] = float("nan")
        with pytest.raises(DataError, match="sample 50"):
            list(loader)
    labels[50] = 5.0
    taken = Loader.from_dataloader(DataLoader(dataset, 8))
    iterator = iter(taken)
    next(iterator)
    labels[50] = float("nan")
    with pytest.raises(DataError, match="sample 50"):
        list(iterator)


class Wrapped(Dataset[Any]):
    """A transform over another data set, as people split and then augment."""

    def __init__(self, inner: Any, transform: Any) -> None:
        self.inner = inner
        self.transform = transform

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        image, label = self.inner[index]
        return self.transform(image), label


def scale(image: torch.Tensor) -> torch.Tensor:
    return image.float() / 255


def brighter(image: torch.Tensor) -> torch.Tensor:
    return image * 2


@pytest.mark.parametrize("twice", [False, True])
def test_a_transform_over_another_data_set_is_seen_through(twice: bool) -> None:
    inner: Any = TensorDataset(images(), torch.arange(COUNT))
    dataset = Wrapped(Wrapped(inner, scale) if twice else inner, brighter if twice else scale)
    assert recognise(dataset, None) is not None
    with Loader(dataset, 8) as loader:
        assert loader.plan.name == "gather"
        assert identical(list(loader), list(DataLoader(dataset, 8)))
        inner.tensors = (images() + 1, torch.arange(COUNT))
        assert identical(list(loader), list(DataLoader(dataset, 8)))
        dataset.transform = torch.relu
        assert identical(list(loader), list(DataLoader(dataset, 8)))


def test_a_transform_over_a_data_set_of_another_length_is_left_alone() -> None:
    class Fewer(Wrapped):
        def __len__(self) -> int:
            return COUNT - 1

    inner: Any = TensorDataset(images(), torch.arange(COUNT))
    assert recognise(Fewer(inner, scale), None) is None
    assert recognise(Wrapped(Subset(inner, [3, 2, 1]), scale), None) is None


class Sampled(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return tuple(tensor[index % 3] for tensor in self.tensors)


def test_a_kind_of_tensordataset_is_not_taken_for_one() -> None:
    inner = Sampled(images(), torch.arange(COUNT))
    assert recognise(Wrapped(inner, scale), None) is None
