"""Models from elsewhere: timm, torchvision, and functions in the user's own files."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hasten.errors import UsageError

_FILE = re.compile(r"(?P<path>.+\.py):(?P<factory>[^:/\\]+)", re.DOTALL)

_WITH_HELPERS = ("googlenet", "inception_v3")
"""Those of torchvision that give several scores while training, unless told not to."""


def names_a_file(name: str) -> bool:
    """Whether a model's name is a Python file, with or without the function it needs."""
    return ".py:" in name or name.endswith(".py")


def suggest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean …?)`` for the closest of the known names, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def from_timm(name: str, *, classes: int, channels: int, image_size: int) -> nn.Module:
    """A model of timm with fresh weights.

    Raises:
        UsageError: timm is not installed, has no such model, or the model cannot take the images.
    """
    timm = _library("timm", "timm")
    if not timm.is_model(name):
        raise UsageError(f"timm has no model {name!r}{suggest(name, timm.list_models())}")
    options: dict[str, Any] = {"num_classes": classes, "in_chans": channels, "pretrained": False}
    try:
        # Transformers need the size; convolutional networks refuse the word.
        try:
            model = timm.create_model(name, img_size=image_size, **options)
        except TypeError:
            model = timm.create_model(name, **options)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise _cannot_build(f"timm:{name}", channels, image_size, error) from error
    what = f"timm:{name}"
    return _tried(
        _module(model, what), what, classes=classes, channels=channels, image_size=image_size
    )


def from_torchvision(name: str, *, classes: int, channels: int, image_size: int) -> nn.Module:
    """A classifier of torchvision with fresh weights; its first convolution takes ``channels``.

    Raises:
        UsageError: torchvision is not installed, has no such classifier, or it cannot be adapted.
    """
    models = _library("torchvision.models", "torchvision")
    known = models.list_models(module=models)
    if name not in known:
        raise UsageError(f"torchvision has no classifier {name!r}{suggest(name, known)}")
    options: dict[str, Any] = {"weights": None, "num_classes": classes}
    if name.startswith("vit_"):
        options["image_size"] = image_size
    if name in _WITH_HELPERS:
        options |= {"aux_logits": False, "init_weights": True}
    try:
        model = _module(models.get_model(name, **options), f"torchvision:{name}")
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise _cannot_build(f"torchvision:{name}", channels, image_size, error) from error
    if channels != 3:
        _replace_first_convolution(model, channels, f"torchvision:{name}")
    what = f"torchvision:{name}"
    return _tried(model, what, classes=classes, channels=channels, image_size=image_size)


def from_file(spec: str, **sizes: int) -> nn.Module:
    """Run ``path/to/file.py`` and call its ``factory`` with those of ``sizes`` that it takes.

    Raises:
        UsageError: no such file or function, it failed (its own error is the cause, with its
            traceback), or it gave no module.
    """
    match = _FILE.fullmatch(spec)
    if match is None:
        raise UsageError(f"--model {spec}: write path/to/file.py:factory, the function's name last")
    path, name = Path(match["path"]), match["factory"]
    if not path.is_file():
        raise UsageError(f"--model {spec}: there is no file {path}")
    module = _load(path, spec)
    factory = getattr(module, name, None)
    if not callable(factory):
        functions = [key for key, value in vars(module).items() if _is_own(value, module)]
        there = f"; it has {', '.join(functions)}" if functions else ""
        raise UsageError(
            f"--model {spec}: {path} has no function {name!r}{suggest(name, functions)}{there}"
        )
    try:
        model = factory(**_accepted(factory, sizes))
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise UsageError(
            f"--model {spec}: {name} failed{_where(error, path)}: {_told(error)}"
        ) from error
    return _tried(_module(model, f"--model {spec}"), f"--model {spec}", path=path, **sizes)


def failure(spec: str, error: BaseException) -> str | None:
    """Where and how a model of the user's file failed; None if the error is not from there.

    Args:
        spec: the model's name, of any kind.
        error: what was raised while the model was used.
    """
    match = _FILE.fullmatch(spec)
    if match is None or not (where := _where(error, Path(match["path"]))):
        return None
    return f"--model {spec} failed{where}: {_told(error)}"


def _load(path: Path, spec: str) -> ModuleType:
    path = path.resolve()
    module_name = "hasten_model_" + re.sub(r"\W", "_", str(path))
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None:
        raise UsageError(f"--model {spec}: {path} is no Python file")
    module = importlib.util.module_from_spec(module_spec)
    # Dataclasses and pickles of the file's classes look their module up here.
    sys.modules[module_name] = module
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        del sys.modules[module_name]
        raise UsageError(
            f"--model {spec}: {path} cannot be run{_where(error, path)}: {_told(error)}"
        ) from error
    return module


def _accepted(factory: Callable[..., Any], sizes: dict[str, int]) -> dict[str, int]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # a callable without a signature gets everything
        return sizes
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return sizes
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {key: value for key, value in sizes.items() if key in named}


def _told(error: BaseException) -> str:
    said = str(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _where(error: BaseException, path: Path) -> str:
    """`` at line N`` of the user's file, the last line of it that the error came through."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    trace = error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename) == path.resolve():
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" at line {line}" if line is not None else ""


def _is_own(value: Any, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _module(value: Any, what: str) -> nn.Module:
    if not isinstance(value, nn.Module):
        hint = " (return Model(), not Model)" if isinstance(value, type) else ""
        raise UsageError(f"{what} gave {type(value).__name__}, not a torch.nn.Module{hint}")
    return value


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError, OSError) as error:
        absent = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        if absent.split(".")[0] == package:
            raise UsageError(
                f"{package}:NAME needs {package}, which is not installed: pip install {package}"
            ) from error
        raise UsageError(
            f"{package} is installed and cannot be imported ({error}): is it of the release that "
            f"goes with torch {torch.__version__}? pip install --upgrade torch {package}"
        ) from error


def _tried(
    model: nn.Module,
    what: str,
    *,
    classes: int,
    channels: int,
    image_size: int,
    path: Path | None = None,
) -> nn.Module:
    """Run one black image through: what is wrong with a model is said before any work is done.

    Many networks have a smallest size and no word for it, and a model of the user's may do
    anything. In evaluation mode and without gradients, so that neither weights nor counters
    change; the generator of random numbers is put back.
    """
    parameter = next(model.parameters(), torch.empty(0))
    if any(is_lazy(each) for each in model.parameters()):
        return model  # shapes are taken at the first call, which is not to be this one
    if parameter.is_meta:
        raise UsageError(f"{what} is on the device meta, which holds shapes without numbers")
    images = torch.zeros(1, channels, image_size, image_size, device=parameter.device)
    training = model.training
    try:
        # Not inference mode: tensors that a model keeps from its first call must serve training.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            scores = model.eval()(images)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        where = _where(error, path) if path is not None else ""
        raise UsageError(
            f"{what} cannot take images of {channels} channels and"
            f" {image_size}×{image_size}{where}: {_told(error)}"
        ) from error
    if not isinstance(scores, torch.Tensor) or scores.shape != (1, classes):
        kind = type(scores).__name__
        given = list(scores.shape) if isinstance(scores, torch.Tensor) else f"a {kind}"
        raise UsageError(
            f"{what} gives {given} for images {list(images.shape)}; it must give scores"
            f" [B, classes], here {[1, classes]}"
        )
    return model.train(training)


def _cannot_build(what: str, channels: int, image_size: int, error: Exception) -> UsageError:
    return UsageError(
        f"{what} cannot take images of {channels} channels and {image_size}×{image_size}: {error}"
    )


def _replace_first_convolution(model: nn.Module, channels: int, what: str) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            if module.in_channels != 3 or module.groups != 1:
                break
            replacement = nn.Conv2d(
                channels,
                module.out_channels,
                kernel_size=module.kernel_size,  # type: ignore[arg-type]
                stride=module.stride,  # type: ignore[arg-type]
                padding=module.padding,  # type: ignore[arg-type]
                dilation=module.dilation,  # type: ignore[arg-type]
                bias=module.bias is not None,
                padding_mode=module.padding_mode,
            )
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, replacement)
            return
    raise UsageError(f"{what} takes images of 3 channels only, these have {channels}")
