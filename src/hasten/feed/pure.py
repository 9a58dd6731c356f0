"""What code may do and leave nothing behind, as data: functions, methods and attributes by name.

What is not named here counts as a function that may write anywhere. A number after a name is how
many arguments it may be given by place, where one behind them is written to (numpy's ``out``, a
decoder's ``buffer``) or changes what the function does (``inplace``). Arguments given by name are
only those of `KEYWORDS`: ``out``, ``inplace``, ``copy``, ``key``, ``closefd`` are not among them.
(`open` may be given a ``mode``, which `harmless` looks at.)
"""

from __future__ import annotations

import ast
import importlib
import pathlib
import random
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

MANY = 1 << 30
"""As many arguments by place as one likes."""

_KEYWORDS_WORDS = (
    "dtype axis axes dim dims keepdim keepdims device requires_grad sep count offset encoding"
    " errors newline value fill_value padding size shape stride scale_factor align_corners"
    " antialias start stop end step num p ord n d reverse strict ndmin base signed resample box"
    " reducing_gap decimals rounding side descending stable largest sorted num_classes eps k shifts"
    " repeats correction ddof unbiased weights_only memory_format alpha other colorspace fastdct"
    " fastupsample min_height min_width min_factor maxsplit keepends indent ensure_ascii"
    " separators sort_keys batch_first padding_value minlength min max a_min a_max byteorder mode"
    " buffering"
)
KEYWORDS = frozenset(_KEYWORDS_WORDS.split())
"""Names of arguments that nothing is written to, and that are not called."""


@dataclass(frozen=True)
class Given:
    """What a function is called with.

    Attributes:
        places: arguments given by place; None where that is not known.
        named: whether all given by name are of `KEYWORDS`.
    """

    places: int | None
    named: bool = True

    @classmethod
    def to(cls, node: ast.Call) -> Given:
        """What is given there."""
        spread = any(isinstance(each, ast.Starred) for each in node.args)
        named = {keyword.arg for keyword in node.keywords}
        return cls(None if spread else len(node.args), named <= KEYWORDS)

    def fits(self, most: int) -> bool:
        """Whether nothing is given that may be written to, where so many places are not."""
        if self.places is None:
            return self.named and most == MANY
        return self.named and self.places <= most


_FUNCTIONS = {
    "builtins": "int:2 float:1 complex:2 bool:1 str:3 bytes:3 len range enumerate zip min max abs"
    " sum round tuple:1 list:1 dict:1 set:1 frozenset:1 sorted:1 reversed:1 isinstance ord chr"
    " divmod pow slice any:1 all:1 open:3 hash:1 hex oct bin repr:1",
    "time": "sleep time time_ns perf_counter perf_counter_ns monotonic process_time thread_time",
    "math": "*",
    "json": "load:1 loads:1 dumps:1",
    "struct": "unpack unpack_from pack calcsize",
    "zlib": "decompress:3 crc32 adler32",
    "base64": "b64decode:1 b64encode:1",
    "os.path": "join basename dirname splitext split normpath isabs exists isfile isdir getsize"
    " getmtime",
    "io": "BytesIO:1 StringIO:1 open:3",
    "PIL.Image": "open:1 fromarray:2",
    "simplejpeg": "decode_jpeg:7 decode_jpeg_header is_jpeg",
    "numpy": "array:2 asarray:2 ascontiguousarray:2 asanyarray:2 zeros:2 ones:2 full:3 empty:2"
    " arange:4 linspace:3 eye:3 identity:2 zeros_like:2 ones_like:2 full_like:3 empty_like:2"
    " frombuffer:4 fromfile:4 load:1 where:3 clip:3 stack:2 concatenate:2 vstack:1 hstack:1"
    " dstack:1 expand_dims:2 squeeze:2 transpose:2 moveaxis:3 swapaxes:3 reshape:3 ravel:2 flip:2"
    " fliplr:1 flipud:1 rot90:3 roll:3 pad:3 repeat:3 tile:2 take:3 sum:3 mean:3 std:3 var:3"
    " min:2 max:2 amin:2 amax:2 argmin:2 argmax:2 prod:3 cumsum:3 any:2 all:2 median:2 sort:2"
    " argsort:2 unique:1 searchsorted:3 bincount:3 diff:3 dot:2 outer:2 tensordot:3 einsum round:2"
    " around:2 broadcast_to:2 atleast_1d atleast_2d atleast_3d split:3 array_split:3 meshgrid"
    " nonzero:1 count_nonzero:2 argwhere:1 percentile:3 quantile:3 interp:3 allclose:4"
    " array_equal:2 isin:2 digitize:3 convolve:3 trace:4 tril:2 triu:2 isscalar ndim shape size"
    " dtype:1 issubdtype iinfo finfo",
    "numpy.linalg": "norm:3 inv:1 det:1 solve:2",
    "numpy.fft": "fft:3 ifft:3 rfft:3 irfft:3 fft2:3 ifft2:3 rfft2:3 fftshift:2"
    " ifftshift:2 fftfreq:2",
    "torch": "tensor as_tensor from_numpy frombuffer zeros ones full empty arange linspace eye"
    " zeros_like ones_like full_like empty_like stack cat concat hstack vstack where clamp clip abs"
    " neg sum mean min max amin amax argmin argmax std var prod any all sqrt rsqrt exp log log2"
    " log10 log1p sin cos tan atan2 sign sort argsort topk unique squeeze unsqueeze reshape flatten"
    " permute transpose movedim flip fliplr flipud roll rot90 tile repeat_interleave gather"
    " index_select take masked_select bincount cumsum cumprod matmul mm bmm mv dot einsum outer"
    " norm isnan isinf isfinite eq ne lt le gt ge logical_and logical_or logical_not add sub mul"
    " div true_divide floor_divide remainder pow square floor ceil round sigmoid tanh relu softmax"
    " log_softmax split chunk unbind meshgrid tril triu numel is_tensor equal allclose"
    " searchsorted bucketize nonzero count_nonzero maximum minimum lerp complex view_as_real"
    " view_as_complex real imag median quantile diff broadcast_to no_grad inference_mode Size"
    " device",
    "torch.nn.functional": "pad:4 one_hot:2 interpolate:7 normalize:4 relu:1 softmax:2"
    " log_softmax:2 sigmoid:1 tanh:1 avg_pool2d:7 unfold:5 grid_sample:5 affine_grid:3",
    "torch.fft": "fft ifft rfft irfft fft2 ifft2 rfft2 irfft2 fftshift ifftshift fftfreq",
    "torch.nn.utils.rnn": "pad_sequence:3",
    "torch.utils.data": "default_collate:1 default_convert:1",
}

_DRAWING = {
    "torch": "randperm randint rand randn multinomial bernoulli normal Generator",
    "numpy.random": "default_rng RandomState Generator PCG64 Philox SeedSequence",
    "random": "Random",
}
"""Functions that draw from torch's global generator, and makers of generators."""

_METHODS_WORDS = (
    # of tensors and arrays, which may be one or the other
    "float double half long int short byte bool item tolist numpy clone copy:1 to:4 type:1"
    " astype:2 view reshape flatten:2 permute transpose unsqueeze:1 squeeze:1 contiguous sum:2"
    " mean:2 min:1 max:1 std:2 clamp:2 abs flip roll repeat expand argmax:1 argmin:1 any:1 all:1"
    " round:1 cumsum:2 size:1 dim:0 numel:0 cpu:0"
    # of text, bytes, lists and dicts
    " strip lstrip rstrip split rsplit splitlines partition rpartition lower upper title"
    " capitalize join encode decode startswith endswith isdigit isalpha isspace zfill format find"
    " rfind index count get keys values items hex"
    # of a path, of a file or an image that the sample has opened
    " read_bytes:0 read_text:2 exists is_file with_suffix joinpath read:1 readline:1 readlines:1"
    " seek:2 tell:0 close:0 convert:1 crop:1"
)
_VALUES_WORDS = "shape dtype ndim size T real imag device name stem suffix parent width height mode"
_IMAGE_WORDS = "convert:1 crop:1 resize:3 rotate:3 transpose:1 getchannel:1 copy:0"


def _limits(words: str) -> dict[str, int]:
    pairs = (word.partition(":") for word in words.split())
    return {name: int(limit) if limit else MANY for name, _, limit in pairs}


VALUES = frozenset(_VALUES_WORDS.split())
"""Attributes of plain values and of images."""

METHODS = _limits(_METHODS_WORDS)
"""Of plain values: the arguments that each may be given by place."""

IMAGE_METHODS = _limits(_IMAGE_WORDS)
"""Of an image of PIL's, none of which it is changed by."""


def places(target: Any) -> int | None:
    """How many arguments a function or class may be given by place; None where it is not known."""
    same, most = _known().get(id(target), (None, None))
    if same is not None and same is target:
        return most
    if isinstance(target, np.ufunc):  # those of numpy itself: others may be of Python code
        known = getattr(np, target.__name__, None) is target
        return target.nin if known else None
    if isinstance(target, type):
        if issubclass(target, np.generic) and target.__module__ == "numpy":
            return MANY
        if issubclass(target, pathlib.PurePath) and target.__module__.startswith("pathlib"):
            return MANY
    return None


_found: dict[int, tuple[Any, int]] = {}
_looked: set[str] = set()


def _known() -> dict[int, tuple[Any, int]]:
    """Of those modules that are imported by now: a function is looked up in its own."""
    for module, words in _FUNCTIONS.items():
        if module in _looked:
            continue
        home = sys.modules.get(module)
        if home is None and not module.startswith(("torch", "numpy")):
            continue
        home = home or importlib.import_module(module)
        _looked.add(module)
        for name, limit in _named(home, words):
            target = getattr(home, name, None)
            if target is not None:
                _found[id(target)] = target, limit
    return _found


def _named(home: types.ModuleType, words: str) -> Iterator[tuple[str, int]]:
    if words == "*":
        yield from (
            (n, MANY) for n, f in vars(home).items() if isinstance(f, types.BuiltinFunctionType)
        )
    else:
        yield from _limits(words).items()


def opens_images(target: Any) -> bool:
    """Whether it gives an image of PIL's."""
    home = sys.modules.get("PIL.Image")
    return home is not None and target in (home.open, home.fromarray)


def draws(target: Any) -> bool:
    """Whether it draws from a global generator, or makes another generator."""
    owner = getattr(target, "__self__", None)
    if owner is getattr(random.random, "__self__", 0) or owner is np.random.mtrand._rand:
        return True
    return any(
        target is getattr(sys.modules[home], name, None)
        for home, names in _DRAWING.items()
        for name in names.split()
    )
