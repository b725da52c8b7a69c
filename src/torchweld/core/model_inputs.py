"""What a model is run on: the user's `inputs` in, a list of `Workload` out.

A user gives a tensor, a mapping of keyword arguments, `Inputs(*args, **kwargs)`, a callable that
takes the model and runs it, a sequence of these, or what `record` collected around real serving
code. A sequence always means several calls, one per item; several positional arguments of one call
are `Inputs(a, b)`. `as_workloads` turns all of them into one form.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor, nn

from torchweld.core.argument_checks import check_model, check_whole
from torchweld.core.errors import TorchweldError
from torchweld.core.passing_exceptions import is_interrupt, says_nothing

ALLOWED = (
    "a tensor, a mapping of keyword arguments, tw.Inputs(*args, **kwargs), a callable that takes "
    "the model and runs it, or a list of these (one item per call)"
)


# ---- one call ----


class Inputs:
    """The arguments of one call of a model, as in `Inputs(x, mask, scale=2.0)`.

    They are passed to the model as they are: if the model changes an argument, such as a cache of
    keys and values, it stays changed for the next run. `record` avoids that, and so does a callable
    that makes a new one.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        vars(self).update(args=args, kwargs=kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"Inputs cannot be changed ({name} was set); make new ones: tw.Inputs(*args, **kwargs)"
        )

    def __repr__(self) -> str:
        return f"Inputs({describe(self)})"

    def call(self, model: nn.Module) -> Any:
        """What the model returns for these arguments."""
        return model(*self.args, **self.kwargs)

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, also those inside lists, tuples and mappings."""
        return [*tensors_in(self.args), *tensors_in(self.kwargs)]


class Snapshot(Inputs):
    """Recorded arguments. Each call gets its own copies of everything but the tensors."""

    def call(self, model: nn.Module) -> Any:
        args, kwargs = _copied((self.args, self.kwargs), tensor=lambda t: t, note=lambda _: None)
        return model(*args, **kwargs)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def describe(inputs: Inputs, most: int = 3) -> str:
    """Arguments in a few words, such as "input_ids 1x128 int64"; at most `most` of them."""
    parts = []
    for label, value in [*(("", v) for v in inputs.args), *inputs.kwargs.items()]:
        tensors = list(tensors_in(value))
        if tensors:
            text = _tensor_text(tensors[0]) if len(tensors) == 1 else f"{len(tensors)} tensors"
            parts.append(f"{label} {text}".lstrip())
    more = [f"{len(parts) - most} more"] if len(parts) > most else []
    return ", ".join(parts[:most] + more) or "no tensors"


def _tensor_text(tensor: Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}"


# ---- what is run ----


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Something to run a model on, any number of times.

    `inputs` is None for a user's callable: what it passes to the model is not known here. `count`
    says how often such a call was recorded.
    """

    name: str
    run: Callable[[nn.Module], Any]
    inputs: Inputs | None = None
    count: int = 1

    def tensors(self) -> list[Tensor]:
        """The tensors that are passed; none for a callable, whose tensors are not known."""
        return [] if self.inputs is None else self.inputs.tensors()

    def try_on(self, model: nn.Module) -> Any:
        """Like `run`, but if the model raises, the error says which inputs it rejected."""
        try:
            return self.run(model)
        except Exception as error:
            if is_interrupt(error):
                raise
            hint = (
                "check that the callable runs by itself: f(model)"
                if self.inputs is None
                else "check that model(...) takes them; the arguments of one call are "
                "tw.Inputs(a, b) or a mapping, while a list or tuple means several calls"
            )
            raise TorchweldError(
                f"{type(model).__name__} does not run on {self.name!r}: {first_line(error)}; {hint}"
            ) from error


def first_line(error: BaseException) -> str:
    """An exception in one line: its kind, and the first line of what it says."""
    head, _, rest = str(error).strip().partition("\n")
    if head.endswith(":"):  # the next line has the cause
        head = f"{head} {rest.strip().partition(chr(10))[0]}"
    text = head.strip().rstrip(" .;:")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def as_workloads(inputs: Any) -> list[Workload]:
    """What a user gave as `inputs` -> one workload per call, each with its own name."""
    if inputs is None:
        raise TorchweldError(f"no inputs; give {ALLOWED}")
    if isinstance(inputs, Recorded):
        items = inputs.workloads()
    elif isinstance(inputs, Sequence) and not isinstance(inputs, (str, bytes)):
        if not inputs:
            raise TorchweldError(f"inputs are empty: {inputs!r}; give {ALLOWED}")
        items = [_one(item, where=f"item {i} of the inputs") for i, item in enumerate(inputs)]
    else:
        items = [_one(inputs, where="the inputs")]
    seen: dict[str, int] = {}
    named = []
    for item in items:
        seen[item.name] = seen.get(item.name, 0) + 1
        number = seen[item.name]
        named.append(item if number == 1 else replace(item, name=f"{item.name} ({number})"))
    return named


def _one(item: Any, where: str) -> Workload:
    if isinstance(item, Workload):
        return item
    if isinstance(item, Tensor):
        item = Inputs(item)
    elif isinstance(item, Mapping):
        if not item:
            raise TorchweldError(
                f"{where}: an empty mapping; a call without arguments is tw.Inputs()"
            )
        if odd := [key for key in item if not isinstance(key, str)]:
            raise TorchweldError(
                f"{where}: a mapping with the key {odd[0]!r}; keys are names of keyword arguments. "
                "A dict that is itself an argument is tw.Inputs(that_dict)"
            )
        item = Inputs(**item)
    if isinstance(item, Inputs):
        return Workload(name=describe(item), run=item.call, inputs=item)
    if callable(item) and not isinstance(item, (type, nn.Module)):
        name = getattr(item, "__name__", type(item).__name__)
        return Workload(name="callable" if name == "<lambda>" else name, run=item)
    kind = type(item).__name__ if not isinstance(item, type) else f"the class {item.__name__}"
    raise TorchweldError(f"{where}: {kind}; {_remedy(item)}give {ALLOWED}")


def _remedy(item: Any) -> str:
    if isinstance(item, (list, tuple)):
        return "a sequence in a sequence is not one call, several arguments are tw.Inputs(a, b); "
    if isinstance(item, nn.Module):
        return "a model is no input, the model comes first and then what it runs on; "
    if hasattr(item, "__array__"):
        return "torch.as_tensor(x) makes a tensor of it; "
    if hasattr(item, "__iter__") and not isinstance(item, (str, bytes)):
        return "take the items you want out of it first, as in list(x) or next(iter(x)); "
    return ""


# ---- recording ----


class Recorded(Sequence[Inputs]):
    """The distinct calls that `record` saw: a sequence of `Inputs`, usable wherever inputs are."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.counts: list[int] = []
        self.left_out = 0
        self.notes: list[str] = []
        self._inputs: list[Inputs] = []
        self._places: dict[Any, int] = {}
        self._lock = threading.Lock()

    @overload
    def __getitem__(self, index: int) -> Inputs: ...
    @overload
    def __getitem__(self, index: slice) -> list[Inputs]: ...
    def __getitem__(self, index: int | slice) -> Inputs | list[Inputs]:
        return self._inputs[index]

    def __len__(self) -> int:
        return len(self._inputs)

    def __repr__(self) -> str:
        calls = [f"{c} × ({describe(i)})" for i, c in zip(self._inputs, self.counts, strict=True)]
        beyond = [f"{self.left_out} calls of other shapes left out"] if self.left_out else []
        return f"Recorded({', '.join(calls + beyond)})"

    @property
    def copied_bytes(self) -> int:
        """The memory of the copied tensors."""
        return sum(t.nbytes for inputs in self._inputs for t in inputs.tensors())

    def workloads(self) -> list[Workload]:
        if not self._inputs:
            raise TorchweldError(
                "no call of the model was recorded; inside `with tw.record(model) as inputs:` call "
                "this very object as model(...). Code that calls model.forward, another method or "
                "a compiled wrapper is given as a callable: lambda m: m.encode(x)"
            )
        return [
            Workload(name=describe(inputs), run=inputs.call, inputs=inputs, count=count)
            for inputs, count in zip(self._inputs, self.counts, strict=True)
        ]

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None]:
        """Copies what is needed of a call before it runs; the function returned notes the call."""
        signature = (_signature(args), _signature(kwargs))
        notes: list[str] = []
        fresh: Snapshot | None = None
        if signature not in self._places and len(self._inputs) < self.limit:
            fresh = _snapshot(args, kwargs, notes.append)

        def done() -> None:
            with self._lock:
                place = self._places.get(signature)
                if place is not None:
                    self.counts[place] += 1
                elif fresh is None or len(self._inputs) >= self.limit:
                    self.left_out += 1
                else:
                    self._places[signature] = len(self._inputs)
                    self._inputs.append(fresh)
                    self.counts.append(1)
                    self.notes += [note for note in notes if note not in self.notes]

        return done


# If this attribute is set, `nn.Module.__call__` goes through it, with what the caller gave, before
# any hook. A hook of ours would run after global ones, switch off fast paths, and be compiled into
# models that were compiled in place.
_ENTRY = "_compiled_call_impl"
_ABSENT = object()


@contextmanager
def record(model: nn.Module, *, limit: int = 32) -> Iterator[Recorded]:
    """Collects the inputs of the calls of `model` made inside the `with` block.

    Calls that the model makes to itself are part of the outer call. Calls that agree in the shapes,
    dtypes and devices of their tensors, and in flags and texts, are kept once, with a count; after
    `limit` different ones the rest is only counted (`left_out`). Calls that raise are not kept.
    Tensors and other objects, such as a cache, are copied, which costs memory (`copied_bytes`). An
    object that cannot be copied is kept itself, and `notes` says so.
    """
    check_model("record", model)
    check_whole("record", "limit", limit, least=1)
    recorded = Recorded(limit)
    inside = threading.local()
    before = model.__dict__.get(_ENTRY, _ABSENT)
    call = before if callable(before) else model._call_impl

    def seen(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or getattr(inside, "call", False):
            return call(*args, **kwargs)
        done = recorded._before(args, kwargs)
        inside.call = True
        try:
            result = call(*args, **kwargs)
        finally:
            inside.call = False
        done()
        return result

    model.__dict__[_ENTRY] = seen
    try:
        yield recorded
    finally:
        # A model that was compiled in place meanwhile has its own entry by now.
        if model.__dict__.get(_ENTRY) is seen:
            if before is _ABSENT:
                del model.__dict__[_ENTRY]
            else:
                model.__dict__[_ENTRY] = before


def _signature(value: Any) -> Any:
    """Equal for calls of the same kind; hashable. Numbers count by type, not by value."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype, value.device, value.requires_grad)
    if isinstance(value, Mapping):
        return (type(value), tuple((key, _signature(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value), tuple(_signature(item) for item in value))
    if value is None or isinstance(value, (bool, str, torch.dtype, torch.device)):
        return value
    return type(value)


def _snapshot(
    args: tuple[Any, ...], kwargs: dict[str, Any], note: Callable[[str], None]
) -> Snapshot:
    clones: dict[int, Tensor] = {}

    def clone(tensor: Tensor) -> Tensor:
        if id(tensor) not in clones:
            clones[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return clones[id(tensor)]

    # Copies made in inference mode could not be used for training afterwards.
    with torch.inference_mode(False), torch.no_grad():
        args, kwargs = _copied((args, kwargs), tensor=clone, note=note)
    return Snapshot(*args, **kwargs)


def inputs_on(inputs: Inputs, device: torch.device) -> Inputs:
    """The same arguments with their tensors on the device; a tensor that is shared stays so."""
    there: dict[int, Tensor] = {}

    def to(tensor: Tensor) -> Tensor:
        if id(tensor) not in there:
            copy_there = tensor.detach().to(device)
            there[id(tensor)] = copy_there.requires_grad_(tensor.requires_grad)
        return there[id(tensor)]

    args, kwargs = _copied((inputs.args, inputs.kwargs), to, lambda note: None)
    return type(inputs)(*args, **kwargs)


def _copied(value: Any, tensor: Callable[[Tensor], Tensor], note: Callable[[str], None]) -> Any:
    """`value` with new containers and objects, and with `tensor(t)` for each of its tensors."""
    if isinstance(value, Tensor):
        return tensor(value)
    if type(value) is tuple:
        return tuple(_copied(item, tensor, note) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_copied(item, tensor, note) for item in value))
    if type(value) is list:
        return [_copied(item, tensor, note) for item in value]
    if type(value) is dict:
        return {key: _copied(item, tensor, note) for key, item in value.items()}
    if isinstance(value, nn.Module):
        return value
    try:
        return copy.deepcopy(value)
    except Exception as error:  # whatever a foreign __deepcopy__ raises
        if says_nothing(error):
            raise
        note(f"{type(value).__name__} cannot be copied and is kept itself ({first_line(error)})")
        return value
