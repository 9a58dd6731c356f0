"""A model's weights: reading them from any common file, fitting them to a model, exporting them."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hasten
from hasten.errors import CheckpointError, UsageError
from hasten.train import atomic, checkpoint, fitting, manifest, tensor_file, unpickle

_WRAPPINGS = ("state_dict", "model_state_dict", "model", "model_state", "module", "weights", "net")
_EXTRA = "_extra_state"
_RESERVED = {"format", "hasten", "tied"}


def plain(model: nn.Module) -> nn.Module:
    """The user's own module inside DataParallel, DistributedDataParallel and torch.compile."""
    while (name := _wrapped_name(model)) is not None:
        model = getattr(model, name)
    return model


def state_of(model: nn.Module) -> dict[str, Any]:
    """``model.state_dict()`` by the names that the model has without wrappers, at any depth.

    The tensors are the model's own, not copies. Names are taken apart by the modules themselves:
    a module of the user's that happens to be called ``module`` keeps its name.
    """
    state = model.state_dict()
    prefixes = _wrapper_prefixes(model)
    renamed: OrderedDict[str, Any] = OrderedDict(
        (_without(prefixes, name), value) for name, value in state.items()
    )
    versions = getattr(state, "_metadata", None)
    if versions is not None:  # versions of the modules, which old files are converted by
        renamed_versions = {_without(prefixes, f"{k}.")[:-1]: v for k, v in versions.items()}
        renamed._metadata = renamed_versions  # type: ignore[attr-defined]
    return renamed


def read(path: str | Path, map_location: Any = "cpu", *, trust: bool = False) -> dict[str, Any]:
    """Read weights without running code from the file, unless it is trusted.

    Args:
        path: a run's folder (its best checkpoint, or the newest where none is marked), a
            checkpoint's folder, a ``.safetensors`` file, or a ``torch.save`` file of a
            ``state_dict``, bare or as ``{"state_dict": …}``, ``{"model": …}`` and the like.
        map_location: the device to read onto, whatever device it was saved from.
        trust: True lets a ``torch.save`` file run whatever program it holds, with all that you
            may do on this machine; a whole module that was saved then gives its weights.

    Raises:
        CheckpointError: missing, cut, altered, unsafe, or no weights; names the file.
    """
    path = Path(path)
    if path.is_dir():
        found = checkpoint.find(path, "best")
        return checkpoint.load(found, map_location=map_location, training=False).model
    if path.name == manifest.NAME:
        return read(path.parent, map_location, trust=trust)
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise CheckpointError(f"{path} is no regular file")
        if path.suffix == ".safetensors":
            return _read_safetensors(path, size, map_location)
        with path.open("rb") as file:
            value = unpickle.read(
                file, str(path), size=size, map_location=map_location, trust=trust
            )
    except OSError as error:
        raise manifest.failure("read", path, error) from error
    if isinstance(value, nn.Module):
        return dict(state_of(value))
    if isinstance(value, dict):
        value = {key: state_of(v) if isinstance(v, nn.Module) else v for key, v in value.items()}
    return _unwrap(value, str(path))


def load_into(
    model: nn.Module,
    state: Mapping[str, Any],
    *,
    source: str,
    part: Callable[[Any, Any], Any] = lambda target, value: value,
) -> list[str]:
    """Copy weights into a model, all of them or none.

    The names may carry prefixes of DataParallel, DistributedDataParallel (``module.``) and
    torch.compile (``_orig_mod.``) on either side, in any order and at any depth. Other dtypes are
    cast to the model's. A name that the file lacks is no loss when the model ties it to one that
    the file has.

    Args:
        model: on any device, wrapped or not.
        state: tensors by name.
        source: where they come from, for messages.
        part: gives, of a tensor of the model and its new value, what this process holds of that.

    Returns:
        What is worth telling a person (casts, counters that old files lack); often nothing.

    Raises:
        CheckpointError: names or shapes do not fit; names them and the likely cause. The model is
            as it was.
    """
    targets = state_of(model)
    original = dict(zip(targets, model.state_dict(), strict=True))
    matched = fitting.match(targets, state, source=source, model=type(plain(model)).__name__)
    renamed: OrderedDict[str, Any] = OrderedDict(
        (original[name], part(targets[name], value)) for name, value in matched.values.items()
    )
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        modules = {fitting.normal(name): name for name, _ in model.named_modules()}
        renamed._metadata = {  # type: ignore[attr-defined]
            modules[fitting.normal(k)]: v
            for k, v in versions.items()
            if fitting.normal(k) in modules
        }
    try:
        model.load_state_dict(renamed, strict=not matched.absent)
    except RuntimeError as error:
        raise CheckpointError(f"{source} could not be loaded into the model: {error}") from error
    return matched.notes


def export(
    model: nn.Module | Mapping[str, Any], path: str | Path, metadata: Mapping[str, str]
) -> None:
    """Write the weights as a safetensors file, whole or not at all, with a checksum in it.

    The same weights give the same bytes.

    Tied tensors are written once (``metadata["tied"]`` says which names were left out, as JSON);
    tensors that overlap otherwise are written apart.

    Args:
        model: on any device, wrapped or not, in any memory format; or its state.
        path: the file; replaced when it is there.
        metadata: strings kept in the file's header; ``hasten`` (the version) and ``format`` are
            added.

    Raises:
        CheckpointError: the disk is full, the folder is read-only and the like; a file that was
            there is as it was.
        UsageError: ``metadata`` holds something else than strings.
    """
    path = Path(path)
    wrong = [key for key, value in metadata.items() if not isinstance(value, str)]
    if wrong or _RESERVED & metadata.keys():
        raise UsageError(
            f"metadata of {path} must be strings, and not named {', '.join(sorted(_RESERVED))}: "
            f"{', '.join(wrong) or ', '.join(sorted(_RESERVED & metadata.keys()))}"
        )
    state = state_of(model) if isinstance(model, nn.Module) else dict(model)
    tensors, tied = _apart(state, path)
    header = dict(metadata) | {"format": "pt", "hasten": hasten.__version__}
    if tied:
        header["tied"] = json.dumps(tied)
    try:
        with atomic.new_file(path) as temporary, temporary.open("wb") as file:
            tensor_file.write(file, tensors, header)
    except OSError as error:
        raise manifest.failure("save", path, error) from error


def _wrapped_name(module: nn.Module) -> str | None:
    """The attribute that holds the wrapped module, when this one is a wrapper."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return "module"
    # torch.compile's OptimizedModule, without importing the compiler to ask for its class.
    return "_orig_mod" if "_orig_mod" in module._modules else None


def _wrapper_prefixes(model: nn.Module) -> list[str]:
    """Dotted names of the wrapped modules inside their wrappers, deepest first."""
    found = []
    for name, module in model.named_modules(remove_duplicate=False):
        child = _wrapped_name(module)
        if child is not None:
            found.append(f"{name}.{child}." if name else f"{child}.")
    return sorted(found, key=len, reverse=True)


def _without(prefixes: Iterable[str], name: str) -> str:
    for prefix in prefixes:
        if name.startswith(prefix):
            outer = prefix[: prefix.rstrip(".").rfind(".") + 1]
            name = outer + name[len(prefix) :]
    return name


def _unwrap(value: Any, source: str) -> dict[str, Any]:
    for _ in range(3):
        if not isinstance(value, dict):
            break
        inner = next((value[k] for k in _WRAPPINGS if isinstance(value.get(k), dict)), None)
        if inner is None:
            break
        value = inner
    problem = _no_weights(value)
    if problem:
        raise CheckpointError(
            f"{source} holds no weights: {problem}. Save them with "
            "torch.save(model.state_dict(), path)"
        )
    return value  # type: ignore[no-any-return]


def _no_weights(value: Any) -> str | None:
    if not isinstance(value, dict):
        return f"it is a {type(value).__name__}, not a dictionary"
    if not value:
        return "its dictionary is empty"
    for key, item in value.items():
        if not isinstance(key, str):
            return f"its dictionary has the key {key!r}"
        if not isinstance(item, torch.Tensor) and not key.endswith(_EXTRA):
            return f"{key!r} is a {type(item).__name__}, not a tensor"
    return None


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise UsageError(
            "safetensors is needed for .safetensors files and is not installed: "
            "pip install safetensors"
        ) from error
    return safetensors


def _read_safetensors(path: Path, size: int, map_location: Any) -> dict[str, Any]:
    library = _safetensors()
    tensor_file.check(path, size)
    try:
        tensors = library.torch.load_file(str(path), device="cpu")
    except (library.SafetensorError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors: {error}. It is cut or altered; use another copy"
        ) from error
    return {name: tensor.to(map_location) for name, tensor in tensors.items()}


def _apart(state: Mapping[str, Any], path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Contiguous host tensors that share no memory, and the names left out with what they are."""
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    storages: set[Any] = set()
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"{name} is no tensor and cannot go into {path}; use a checkpoint")
        key = fitting.identity(tensor)
        if key in first:
            tied[name] = first[key]
            continue
        first[key] = name
        host = tensor.detach().cpu().contiguous()
        storage = host.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() != host.nbytes:
            host = host.clone()
        storages.add(host.untyped_storage().data_ptr())
        tensors[name] = host
    return tensors, tied
