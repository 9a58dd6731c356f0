"""Data sets, loaders and the batches that come out of them."""

from __future__ import annotations

import libcst as cst

from hasten.script.flow.tensors import Tensors
from hasten.script.flow.values import (
    SOME,
    Const,
    Dict,
    Function,
    Instance,
    Lib,
    Loader,
    Seq,
    Tensor,
    Thing,
    Unknown,
    Value,
)

LOADER = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader",
          "torch_geometric.loader.DataLoader", "torch_geometric.data.DataLoader")  # fmt: skip
_POSITIONS = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers",
              "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn")  # fmt: skip


class Loading(Tensors):
    """Model loaders."""

    def make_loader(
        self, node: cst.CSTNode, path: str, args: list[Value], kwargs: dict[str, Value], loose: bool
    ) -> Value:
        """A `DataLoader`."""
        settings = dict(zip(_POSITIONS, args, strict=False)) | kwargs
        dataset = settings.pop("dataset", Unknown())
        if path.startswith("torch_geometric"):
            settings["collate_fn"] = Unknown("geometric")
        loader = Loader(dataset, settings, origin=self.origin("loader", node))
        loader.extra["loose"] = loose
        loader.extra["node"] = node
        self.note("loader", node, receiver=loader, kwargs=settings)
        return loader

    def batch(self, loader: Loader, node: cst.CSTNode) -> Value:
        """What a loop over the loader gets: all of it on the CPU."""
        self.note("loader-use", node, receiver=loader)
        if "batch" in loader.extra:
            return self._from_loader(loader.extra["batch"], node, loader)
        collate = loader.settings.get("collate_fn")
        with self.within("dataset", loader.extra["node"]):
            sample = self.sample(loader.dataset, loader.extra["node"])
            if isinstance(collate, Function):
                made = self.call_function(
                    loader.extra["node"], collate, [Seq("list", None, sample)], {}
                )
            elif collate is None or (isinstance(collate, Const) and collate.value is None):
                made = self._collated(sample)
            else:
                made = Unknown("batch")
        loader.extra["batch"] = made
        for tensor in self.flat([made]):
            if tensor.place == "dev":
                self.note("loader-dev", loader.extra["node"], receiver=loader, args=(tensor,))
        return self._from_loader(made, node, loader)

    def sample(self, dataset: Value, node: cst.CSTNode) -> Value:
        """One sample of a data set."""
        if isinstance(dataset, Instance) and dataset.cls is not None:
            for name in ("__getitem__", "__iter__"):
                method = dataset.cls.find(name)
                if isinstance(method, Function):
                    got = self.call_function(
                        node,
                        method.bind(dataset),
                        [Unknown("index")] if name == "__getitem__" else [],
                        {},
                    )
                    return got if name == "__getitem__" else self.item_of(got, node)
            return Unknown("sample")
        if isinstance(dataset, Thing):
            if dataset.lib.endswith("TensorDataset"):
                return Seq("tuple", [self.item_of(part, node) for part in dataset.parts])
            if dataset.lib.endswith(("Subset", "ConcatDataset")) and dataset.parts:
                inner = dataset.parts[0]
                return self.sample(
                    self.item_of(inner, node) if isinstance(inner, Seq) else inner, node
                )
            if dataset.extra.get("pair"):
                return Seq("tuple", [Tensor("cpu", SOME), Const(0)])
        if isinstance(dataset, (Seq, Tensor)):
            return self.item_of(dataset, node)
        return Unknown("sample")

    def _collated(self, sample: Value) -> Value:
        tensor = self.tensor(sample)
        if tensor is not None:
            # What a worker gives is on the host, unless the data set put it on the device itself.
            ndim = tensor.ndim + 1 if tensor.ndim is not None and tensor.ndim >= 0 else SOME
            return Tensor(
                tensor.place, ndim, origin=tensor.origin if tensor.place == "dev" else None
            )
        if isinstance(sample, Const):
            if isinstance(sample.value, (int, float)):
                return Tensor("cpu", SOME)
            return Unknown("sample")
        if isinstance(sample, Seq):
            items = sample.items
            if items is not None:
                return Seq(
                    "tuple" if sample.kind == "tuple" else "list",
                    [self._collated(v) for v in items],
                )
            return Seq("list", None, self._collated(self.join_all(self.elements(sample))))
        if isinstance(sample, Dict):
            elem = sample.fields["elem"]
            return Dict(
                {k: self._collated(v) for k, v in sample.known().items()},
                None if elem is None else self._collated(elem),
            )
        if isinstance(sample, Unknown) and sample.key == "index":
            return Tensor("cpu", SOME)
        return Unknown("sample")

    def _from_loader(self, value: Value, node: cst.CSTNode, loader: Loader) -> Value:
        """The batch, each tensor knowing that it came from the loader here."""
        origin = self.origin("batch", node, owner=loader)
        tensor = self.tensor(value)
        if tensor is not None:
            return tensor.but(origin=origin) if tensor.place == "cpu" else tensor
        if isinstance(value, Seq):
            items, elem = value.items, value.fields["elem"]
            return Seq(
                value.kind,
                None if items is None else [self._from_loader(v, node, loader) for v in items],
                None if elem is None else self._from_loader(elem, node, loader),
                origin=origin,
            )
        if isinstance(value, Dict):
            elem = value.fields["elem"]
            known = {k: self._from_loader(v, node, loader) for k, v in value.known().items()}
            return Dict(
                known,
                None if elem is None else self._from_loader(elem, node, loader),
                origin=origin,
            )
        if isinstance(value, Instance):
            copy = Instance(value.cls, origin=origin)
            copy.fields.update(
                {
                    k: self._from_loader(v, node, loader) if isinstance(v, Value) else v
                    for k, v in value.fields.items()
                }
            )
            copy.extra["assigned"] = dict(value.extra.get("assigned", {}))
            return copy
        if isinstance(value, Unknown):
            return Unknown(value.key, value.place, origin)
        return value


__all__ = ["LOADER", "Lib", "Loading"]
