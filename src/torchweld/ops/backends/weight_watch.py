"""Whether tensors have changed: what lets a runner keep views or copies of its weights.

The signals are those of `ops/packing.py`, read from Python. For views: data pointer, shape and
strides. For copies also: the version counter, a sample of the contents, and a rolling comparison of
all contents that takes up to 1,000 calls (longer above 16 MB). The storages are held, so a pointer
cannot be reused for other memory in the meantime. Pointer, shape and strides took 0.25 us per
tensor, sample and version 0.2 us more (one core of an EPYC Zen 4).
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Sequence

import numpy
import torch
from torch import Tensor

from torchweld.core.errors import UnsupportedError
from torchweld.machine import kernel_build

_SAMPLES = 16
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (Tensor, torch.nn.Parameter)


def watchable(tensors: Sequence[Tensor]) -> bool:
    """Whether all are ordinary tensors with their own memory: no subclasses, no transforms."""
    for tensor in tensors:
        if type(tensor) not in _PLAIN or tensor.layout != torch.strided:
            return False
        try:
            tensor.data_ptr()
        except RuntimeError:  # wrapped by a functorch transform
            return False
    return True


def check_watchable(tensors: Sequence[Tensor], who: str) -> None:
    if not watchable(tensors):
        raise UnsupportedError(
            f"{who} keeps a copy of the weights and must see when they change; it cannot with "
            "tensor subclasses, sparse tensors or tensors inside a functorch transform: use "
            "another mode"
        )


class WeightWatch:
    """Remembers `tensors` as they are now; `unchanged` compares them with that.

    `contents`: compare their contents too, which must be in CPU memory.
    """

    def __init__(self, tensors: Sequence[Tensor], *, contents: bool) -> None:
        self._places = [(t, t.data_ptr(), t.shape, t.stride()) for t in tensors]
        self._storages = [t.untyped_storage() for t in tensors]
        # A tensor made in inference mode has no version, only the sample.
        counted = [t for t in tensors if not t.is_inference()] if contents else []
        self._versions = [(t, t._version) for t in counted]
        samples = [_sample(t) for t in tensors] if contents else []
        self._samples = [(sample, sample.tobytes()) for sample in samples]
        self._rest = rolling(tensors) if contents else None

    def unchanged(self) -> bool:
        for tensor, data, shape, stride in self._places:
            if tensor.data_ptr() != data or tensor.shape != shape or tensor.stride() != stride:
                return False
        for tensor, version in self._versions:
            if tensor._version != version:
                return False
        for sample, before in self._samples:
            if sample.tobytes() != before:
                return False
        return self._rest is None or self._rest()


def rolling(tensors: Sequence[Tensor]) -> Callable[[], bool]:
    """A function that compares the next part of `tensors` per call: whether it is unchanged."""
    if kernel_build.build_problem() is not None:
        return _Rolling(tensors).unchanged
    compiled = importlib.import_module("torchweld._C")
    look: Callable[[], bool] = compiled.Rolling(list(tensors)).unchanged
    return look


class _Rolling:
    """csrc/torch_glue/rolling_check.h for an installation without it: slower, but as complete."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        total = sum(t.numel() * t.element_size() for t in tensors)
        part = max(1024, min(total, 16 << 20) // 900)
        arrays = [_rows(t) for t in tensors if t.numel()]
        self._parts = []
        for array in arrays:
            step = max(1, part * len(array) // array.nbytes)
            pieces = [array[i : i + step] for i in range(0, len(array), step)]
            self._parts += [(piece, zlib.crc32(piece.tobytes())) for piece in pieces]
        self._every = min(max(1000 // max(len(self._parts), 1), 1), 64)
        self._at_once = 1 if total > 16 << 20 else -(-len(self._parts) // 1000)
        self._calls = self._next = 0

    def unchanged(self) -> bool:
        self._calls += 1
        if self._calls < self._every or not self._parts:
            return True
        self._calls = 0
        for _ in range(self._at_once):
            piece, before = self._parts[self._next]
            self._next = (self._next + 1) % len(self._parts)
            if zlib.crc32(piece.tobytes()) != before:
                return False
        return True


def _integers(tensor: Tensor) -> numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.int64]]:
    return tensor.detach().view(_INTEGERS[tensor.element_size()]).numpy()


def _rows(tensor: Tensor) -> numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.int64]]:
    """A view with the largest stride first; flat if there are no gaps between the elements."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True)
    turned = _integers(tensor.detach().permute(order))
    return turned.reshape(-1) if turned.flags.c_contiguous else turned


def _sample(tensor: Tensor) -> numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.int64]]:
    """A view of few elements: all along short dimensions, a diagonal through the long ones.

    So it shows the edit of a whole tensor, or of a block of a fifteenth of its rows or columns.
    """
    sizes, strides = [_SAMPLES], [0]
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size < _SAMPLES:
            sizes.append(size)
            strides.append(stride)
        else:
            strides[0] += (size - 1) // (_SAMPLES - 1) * stride
    if strides[0] == 0:  # no long dimension
        sizes[0] = 1
    plain = tensor.detach()
    view = plain.as_strided(sizes, strides, plain.storage_offset())
    return _integers(view)
