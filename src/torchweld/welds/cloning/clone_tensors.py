"""Makes the tensors that belong to a clone: new parameter objects, copies of buffers and state.

In: the tensors of a model. Out: `OwnTensors.made`, which maps the id of a tensor to the tensor that
replaces it in the clone. A new parameter object uses the same memory and the same version counter,
but has its own gradient and hooks. A copy is made of the whole storage, so tensors that overlap in
the model also overlap in the clone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class OwnTensors:
    def __init__(self, own_parameters: bool, own_bytes: int | None) -> None:
        self.made: dict[int, Any] = {}
        self.shared: list[tuple[str, Tensor]] = []  # tensors too large to copy, by name
        self.copies = own_bytes is not None
        self.alive: list[Any] = []  # keeps objects alive, so that ids stay unique
        self._room = own_bytes or 0
        self._own_parameters = own_parameters
        self._weights: set[int] = set()  # storage addresses of the parameters
        self._seen: set[int] = set()
        self._storages: dict[int, torch.UntypedStorage] = {}

    def look_at(self, model: nn.Module, path: str = "") -> None:
        """Handles the parameters and buffers of all registered modules of the model."""
        stack, found = [(model, path)], []
        while stack:
            module, path = stack.pop()
            if id(module) in self._seen or isinstance(module, torch.jit.ScriptModule):
                continue
            self._seen.add(id(module))
            found.append((module, path))
            for name, child in list(_entry(module, "_modules").items()):
                if child is not None:
                    stack.append((child, _joined(path, name)))
        # All weights first: tensors that share memory with a weight are not separate state.
        for module, _ in found:
            for parameter in list(_entry(module, "_parameters").values()):
                if parameter is not None:
                    self._weights.add(_place(parameter))
                    if self._own_parameters and id(parameter) not in self.made:
                        self._put(parameter, _own_parameter(parameter))
        for module, path in found if self.copies else ():
            for name, buffer in list(_entry(module, "_buffers").items()):
                if buffer is not None:
                    self.copy(buffer, functools.partial(_joined, path, name), buffer=True)

    def copy(self, tensor: Tensor, name: Callable[[], str], *, buffer: bool = False) -> None:
        """Copies a tensor if it is separate state and fits into the bytes that are left."""
        if id(tensor) in self.made or tensor.is_meta or tensor.grad_fn is not None:
            return
        place = _place(tensor)
        if not buffer and (place in self._weights or isinstance(tensor, nn.Parameter)):
            return
        plain = type(tensor) is Tensor and place != 0 and not (tensor.is_conj() or tensor.is_neg())
        with torch.inference_mode(False), torch.no_grad():
            if plain and place not in self._weights:
                new = self._with_storage(tensor)
            elif self._fits(tensor.nbytes):
                new = tensor.detach().clone()
            else:
                new = None
            if new is None:
                self.shared.append((name(), tensor))
                return
            if tensor.requires_grad:
                new.requires_grad_()
        self._put(tensor, new)

    def script_copy(self, module: torch.jit.ScriptModule) -> nn.Module:
        """A TorchScript module on the same parameters, with its own modes.

        It also has its own buffers where state is copied.
        """

        def copied(inner: Any) -> Any:
            new = inner.__copy__()
            for name, child in torch._C.ModuleDict(inner).items():
                new.setattr(name, copied(child))
            buffers: Any = torch._C.BufferDict(inner)
            for name, buffer in buffers.items():
                if self.copies and self._fits(buffer.nbytes):
                    new.setattr(name, buffer.detach().clone())
            return new

        wrap: Any = torch.jit._recursive.wrap_cpp_module
        made: nn.Module = wrap(copied(module._c))
        return made

    def _with_storage(self, tensor: Tensor) -> Tensor | None:
        storage, key = tensor.untyped_storage(), _place(tensor)
        if key not in self._storages:
            if not self._fits(storage.nbytes()):
                return None
            self._storages[key] = storage.clone()  # type: ignore[no-untyped-call]
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        own = self._storages[key]
        return empty.set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _fits(self, size: int) -> bool:
        if size > self._room:
            return False
        self._room -= size
        return True

    def _put(self, tensor: Tensor, new: Tensor) -> None:
        if new is not tensor:
            new.__dict__.update(tensor.__dict__)
            self.made[id(tensor)] = new
            self.alive.append(tensor)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _entry(module: nn.Module, name: str) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(module, "__dict__").get(name, {})
    return found


def _own_parameter(parameter: Tensor) -> Tensor:
    """A new parameter object over the same memory.

    Parameters of subclasses, or sparse ones, are returned as they are. So are parameters made in
    inference mode: they have no gradient and no hooks, and cannot be made outside of that mode.
    """
    if type(parameter) is not nn.Parameter or parameter.layout != torch.strided:
        return parameter
    if parameter.is_inference():
        return parameter
    with torch.inference_mode(False):
        return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)


def _place(tensor: Tensor) -> int:
    """The address of the tensor's storage; 0 if it is not known."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, ValueError):  # sparse, lazy, or a kind of tensor without a storage
        return 0
