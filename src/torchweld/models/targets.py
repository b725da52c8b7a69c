"""TARGET as typed on the command line -> a model and what to run it on.

A TARGET is `package.module:factory`, `path/to/file.py:factory`, the name of a built-in model, or
`hf:<model type>`. A factory is called without arguments and returns a model, or `(model, inputs)`;
a model by itself is fine too. `resolve` is the way in; docs/targets.md is the user's side of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from torchweld.core.errors import TorchweldError
from torchweld.core.model_inputs import Workload, as_workloads, first_line, inputs_on
from torchweld.core.typed_names import known
from torchweld.models import DEMO, MODELS
from torchweld.models.typed_inputs import parse_inputs

STDLIB = Path(sysconfig.get_paths()["stdlib"])
OTHER_FORMS = "package.module:factory, path/to/file.py:factory or hf:<model type>"
FORMS = f"{OTHER_FORMS}, or a built-in model: {', '.join(MODELS)}"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model and what it is run on; `notes` say what was chosen for the user."""

    name: str
    model: nn.Module
    workloads: tuple[Workload, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LoadedTarget:
    model: nn.Module
    inputs: Any = None
    notes: tuple[str, ...] = ()


def resolve(
    target: str | None = None,
    inputs: Sequence[str] = (),
    *,
    training: bool = False,
    seed: int = 0,
) -> Target:
    """The model that `target` names (the demo if None), in eval or train mode, and its workloads.

    All of `inputs` ("8x768", "input_ids=1x128:int64") are the arguments of one call, and take the
    place of inputs that the target brings.
    """
    name = DEMO if target is None else target
    loaded = load(name, seed)
    notes = list(loaded.notes)
    if inputs:
        given, input_notes = parse_inputs(inputs, loaded.model, seed)
        workloads = as_workloads(given)
        notes += input_notes
    elif loaded.inputs is None:
        raise TorchweldError(
            f"nothing to run {name!r} on; its forward takes {_arguments(loaded.model)}: give them "
            "as in --input 8x768 or --input input_ids=1x128:int64, or let a factory return "
            "(model, inputs)"
        )
    else:
        workloads = as_workloads(loaded.inputs)
    return Target(
        name=name,
        model=loaded.model.train(training),
        workloads=tuple(workloads),
        notes=tuple(notes),
    )


def moved(target: Target, device: torch.device) -> Target:
    """The same with its model, and the inputs that are known, on the device.

    What a user's callable passes is the callable's own affair.
    """
    workloads = []
    for one in target.workloads:
        inputs = one.inputs
        if inputs is not None:
            inputs = inputs_on(inputs, device)
            one = replace(one, inputs=inputs, run=inputs.call)
        workloads.append(one)
    return replace(target, model=target.model.to(device), workloads=tuple(workloads))


def load(target: str, seed: int = 0) -> LoadedTarget:
    """What `target` names, before `--input` is considered."""
    if target.startswith("hf:"):
        from torchweld.models import transformers_models

        built = transformers_models.build(target.removeprefix("hf:"), seed)
        return LoadedTarget(model=built.model, inputs=built.inputs, notes=built.notes)
    where, colon, attribute = target.partition(":")
    if colon and not (where and attribute):
        raise TorchweldError(f"target {target!r} is not complete; give {FORMS}")
    if where.endswith(".py"):
        return _from_file(Path(where).expanduser(), attribute, target)
    if target not in MODELS and Path(where).is_dir():
        raise TorchweldError(
            f"target {target!r} is a folder; give {where.rstrip('/')}/<file>.py:factory, or "
            f"hf:{where} if it was saved by transformers"
        )
    if colon or "." in where:
        return _from_module(where, attribute, target)
    try:
        builtin = MODELS[known(target, MODELS, "built-in model")]
    except TorchweldError as error:
        raise TorchweldError(f"{error}; a target may also be {OTHER_FORMS}") from None
    model, inputs = builtin.build(seed)
    return LoadedTarget(model=model, inputs=inputs)


def _arguments(model: nn.Module) -> str:
    names = [str(p).partition(":")[0] for p in inspect.signature(model.forward).parameters.values()]
    return ", ".join([*names[:6], *(["…"] if len(names) > 6 else [])]) or "no arguments"


# ---- importing ----


@contextmanager
def importable(folder: str) -> Iterator[None]:
    """Inside, modules in `folder` come first; afterwards only what the user's code added stays."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        # The user's code may have put entries of its own before ours.
        if folder in sys.path:
            sys.path.remove(folder)


def _from_module(name: str, attribute: str, target: str) -> LoadedTarget:
    with importable(os.getcwd()):
        with _explained(f"target {target!r} does not import", f'python -c "import {name}"'):
            module = importlib.import_module(name)
        return _loaded(module, attribute, target)


def _from_file(path: Path, attribute: str, target: str) -> LoadedTarget:
    if not path.is_file():
        raise TorchweldError(f"target {target!r}: there is no file {str(path)!r}; give {FORMS}")
    path = path.resolve()
    root, name = _dotted_name(path)
    with importable(str(root)):
        with _explained(f"target {target!r} does not import", f"python {path}"):
            module = _import_file(path, name)
        return _loaded(module, attribute, target)


def _dotted_name(path: Path) -> tuple[Path, str]:
    """The folder to import from, and the name; with packages, so that `from . import x` works."""
    parts = [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    if path.name == "__init__.py" and len(parts) > 1:
        parts.pop()
    return folder, ".".join(parts)


def _import_file(path: Path, name: str) -> ModuleType:
    """The file as a module. It is registered under its own name unless something else has that."""
    if "." in name:
        module = importlib.import_module(name)
        if _same_file(module, path):
            return module
        raise ImportError(f"{name} is another module here: {getattr(module, '__file__', None)}")
    number = 1
    chosen = name
    while chosen in sys.modules:
        if _same_file(sys.modules[chosen], path):
            return sys.modules[chosen]
        number += 1
        chosen = f"{name}_{number}"
    spec = importlib.util.spec_from_file_location(chosen, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[chosen] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(chosen, None)
        raise
    return module


def _same_file(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path


@contextmanager
def _explained(what: str, command: str) -> Iterator[None]:
    """Turns what the user's code raises into one line that says where; exits of scripts too."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise TorchweldError(
            f"{what}: {first_line(error)}{_place(error)}; to see all of it, run: {command}"
        ) from error


def _place(error: BaseException) -> str:
    """Where an error was raised: the last place outside of installed libraries and this file."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({Path(error.filename).name}, line {error.lineno})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        ours = frame.filename == __file__ or frame.filename.startswith("<")
        if not ours and "site-packages" not in path.parts and not path.is_relative_to(STDLIB):
            return f" ({path.name}, line {frame.lineno})"
    return ""


# ---- from a module to a model ----


def candidates(module: ModuleType) -> list[str]:
    """What a module offers as a target: models, and functions that make one without arguments."""
    found = []
    for name, value in vars(module).items():
        if name.startswith("_") or name == "main":
            continue
        if isinstance(value, nn.Module):
            found.append(name)
            continue
        own = getattr(value, "__module__", None) == module.__name__
        makes = inspect.isfunction(value) or (
            isinstance(value, type) and issubclass(value, nn.Module)
        )
        if own and makes and not _required(value):
            found.append(name)
    return found


def _required(factory: Callable[..., Any]) -> list[str]:
    """The arguments that are required."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (ValueError, TypeError):  # a callable without a signature
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def _loaded(module: ModuleType, attribute: str, target: str) -> LoadedTarget:
    if not attribute:
        names = candidates(module)
        if len(names) != 1:
            what = f"has several candidates: {', '.join(names)}"
            if not names:
                what = "has no model, and nothing that makes one without arguments"
            example = names[0] if names else "factory"
            raise TorchweldError(f"target {target!r} {what}; say which, as in {target}:{example}")
        attribute = names[0]
    try:
        value = reduce(getattr, attribute.split("."), module)
    except AttributeError:
        listed = candidates(module)
        hint = f"there are: {', '.join(listed)}" if listed else "nothing in it makes a model"
        raise TorchweldError(
            f"target {target!r}: {module.__name__} has no {attribute!r}; {hint}"
        ) from None
    if isinstance(value, nn.Module):
        return LoadedTarget(model=value)
    if callable(value):
        if missing := _required(value):
            raise TorchweldError(
                f"target {target!r}: {attribute} needs the arguments {', '.join(missing)}; a "
                f"factory is called without any: def make(): return {attribute}(...)"
            )
        command = f'python -c "from {module.__name__} import {attribute.split(".")[0]} as f; f()"'
        with _explained(f"target {target!r}: {attribute}() failed", command):
            value = value()
    return _as_loaded(value, attribute, target)


def _as_loaded(value: Any, attribute: str, target: str) -> LoadedTarget:
    if isinstance(value, nn.Module):
        return LoadedTarget(model=value)
    if isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[0], nn.Module):
        return LoadedTarget(model=value[0], inputs=value[1])
    raise TorchweldError(
        f"target {target!r}: {attribute} gave {_kind(value)}; a factory returns an nn.Module, or "
        "(model, inputs)"
    )


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {[type(item).__name__ for item in value]}"
    return "None" if value is None else f"a {type(value).__name__}"
