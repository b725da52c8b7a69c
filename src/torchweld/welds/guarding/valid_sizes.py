"""Proves for which sizes of its argument a module computes the same, with symbols for sizes.

In: a module, a recorded call, and a pattern of leading sizes. Out: whether all such sizes compute
the same. The module was traced on the sizes of its calls. Here it runs once more on a fake tensor
whose leading sizes are symbols for any of 2, 3, 4, … Every size gives the same graph if no branch
asked for more than that, no size was used as a number, the result has the argument's rows, and the
code takes the same way on numbers. A size of 1 is a case of its own, because torch and models treat
it differently.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchweld.core.passing_exceptions import says_nothing
from torchweld.welds.guarding.size_questions import SYMBOLS, SizeQuestions
from torchweld.welds.refusal_reasons import op_name
from torchweld.welds.tracing.call_recording import Signature, TensorSpec
from torchweld.welds.tracing.forward_trace import (
    called,
    faked,
    forget_tensors,
    in_call,
    own_tensors,
    tensor_specs,
)

# Up to this many leading dimensions every pattern of ones is tried; else only recorded ones.
MOST_PATTERNS_DIMS = 2
# Sizes on which a condition between sizes is tried.
_SIZES = (2, 3, 4, 5, 7, 8, 16, 100, 1000)
# Sizes that are neither a power of two nor a usual width.
_HINTS = (7, 11, 13, 17, 19, 23)


ANY_DIMS = "*"  # in place of a pattern: any number of dimensions, of any sizes


def pattern_of(leading: tuple[int, ...]) -> str:
    """The pattern of ones, `"n1"` for sizes 8 × 1; nothing is proved about empty tensors."""
    return "".join("1" if size == 1 else "n" for size in leading)


def example_sizes(pattern: str) -> list[int]:
    hints = itertools.cycle(_HINTS)
    return [next(hints) if one == "n" else 1 for one in pattern]


def patterns_to_try(shapes: list[tuple[int, ...]]) -> list[str]:
    """The patterns to prove for leading shapes that have the same number of dimensions."""
    dims = len(shapes[0])
    if dims <= MOST_PATTERNS_DIMS:
        return ["".join(ones) for ones in itertools.product("n1", repeat=dims)]
    return list(dict.fromkeys(["n" * dims, *map(pattern_of, shapes)]))


def same_for_all_sizes(
    module: nn.Module, signature: Signature, argument: str, pattern: str, out_features: int
) -> bool:
    """Whether all calls whose leading sizes have this pattern of ones compute the same."""
    patterns = {name: pattern if name == argument else None for name in tensor_specs(signature)}
    try:
        with_symbols = _run(module, signature, argument, patterns, symbols=True)
        # Symbols behave like numbers where the code took the same way on both.
        with_numbers = _run(module, signature, argument, patterns, symbols=False)
    except Exception as error:
        if says_nothing(error):
            raise
        return False  # nothing is proved if the module does not run on symbols
    return (
        with_symbols.shape == (*with_symbols.rows, str(out_features))
        and not with_symbols.decided
        and with_symbols.questions.steps == with_numbers.questions.steps
    )


@dataclass(frozen=True, kw_only=True)
class _SizedRun:
    """A run of a module. Sizes are given as text: numbers, or symbols.

    `decided`: something that ran depended on the value of a size.
    """

    rows: tuple[str, ...]  # leading sizes of the argument
    shape: tuple[str, ...] | None  # of the result; None if it is not a tensor
    decided: bool
    questions: SizeQuestions


def _run(
    module: nn.Module,
    signature: Signature,
    argument: str,
    patterns: dict[str, str | None],
    *,
    symbols: bool,
) -> _SizedRun:
    """Runs the module on fake tensors of these patterns, with symbols or numbers for sizes."""
    env, watch, questions = ShapeEnv(duck_shape=False), _SizeWatch(), SizeQuestions()
    fake = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    try:
        own: list[Tensor] = [
            faked(fake, t, static_shapes=True) for t in own_tensors(module).values()
        ]
        given = {
            name: _sized(fake, spec, patterns[name], symbols)
            for name, spec in tensor_specs(signature).items()
        }
        rows = tuple(map(str, given[argument].shape[:-1]))
        with in_call(module, signature), fake, watch, questions.watching():
            y = called(module, signature, own, list(given.values()))
        shape = tuple(map(str, y.shape)) if isinstance(y, Tensor) else None
    finally:
        forget_tensors(fake)
    decided = (
        watch.used
        or questions.escaped
        or questions.compared_identity
        or bool(env.replacements)
        or not all(_always(guard.expr) for guard in env.guards)
    )
    return _SizedRun(rows=rows, shape=shape, decided=decided, questions=questions)


def _sized(fake: FakeTensorMode, spec: TensorSpec, pattern: str | None, symbols: bool) -> Tensor:
    """A fake tensor; `symbols`: for all sizes except those of 1 and the last size of x."""
    ones = pattern_of(spec.shape) if pattern is None else f"{pattern}1"
    sizes = example_sizes(ones)
    if pattern is not None:
        sizes[-1] = spec.shape[-1]
    kinds = [DimDynamic.DYNAMIC if symbols and one == "n" else DimDynamic.STATIC for one in ones]
    example = torch.empty(sizes, dtype=spec.dtype, device=spec.device)
    made: Tensor = fake.from_tensor(
        example.requires_grad_(spec.requires_grad),
        symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds),
    )
    return made


def _always(condition: Any) -> bool:
    """Whether a condition between sizes holds for all sizes of 2 and more.

    torch itself adds some: Ne(a*b, a), Ne(Mod(a, a*b), 0). A condition with a number in it is a
    branch on that number, whether torch or the model added it.
    """
    numbers = {int(n) for n in condition.atoms(sympy.Integer)}
    if numbers - {-1, 0, 1}:
        return False
    symbols = sorted(condition.free_symbols, key=str)
    for values in itertools.product(_SIZES, repeat=len(symbols)):
        if condition.subs(dict(zip(symbols, values, strict=True))) != sympy.true:
            return False
    return True


# Ops that use sizes to arrange data. In any other op the result depends on a size's value.
_ARRANGING = frozenset(
    [
        *("view", "reshape", "_unsafe_view", "_reshape_alias", "expand", "slice", "select"),
        *("narrow", "as_strided", "split", "split_with_sizes", "unsafe_split", "unflatten"),
        *("unbind", "chunk", "unsafe_chunk", "tensor_split", "squeeze", "flatten"),
        *("empty", "new_empty", "empty_strided", "new_empty_strided", "empty_like"),
        *("sym_size", "sym_numel", "sym_stride", "sym_storage_offset"),
        *("view_copy", "expand_copy", "_assert_tensor_metadata"),
    ]
)


class _SizeWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices a size that an op uses as a number."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.used = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op_name(func).rpartition(".")[2]
        if name not in _ARRANGING:
            self.used |= any(isinstance(leaf, SYMBOLS) for leaf in tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))
