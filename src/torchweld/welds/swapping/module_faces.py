"""The faces of modules: for each module a class and its welding state, swapped instantly.

A welded model and the original are two faces of the same modules. So both can be timed in turn, on
the same weights at the same addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from torchweld.core.muted_warnings import untold
from torchweld.welds.swapping.swap import set_face, undo, weld
from torchweld.welds.weld_decisions import Decision
from torchweld.welds.weld_marks import KEY


class Face:
    """Some modules as they are at this moment: their classes, and what welding keeps in them."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._states = [(m, type(m), m.__dict__.get(KEY)) for m in modules]

    def show(self) -> None:
        for module, kind, joint in self._states:
            set_face(module, kind, joint)


@contextmanager
def faces(model: nn.Module, decisions: Sequence[Sequence[Decision]]) -> Iterator[list[Face]]:
    """The original face of all modules decided about, and one for each list of decisions.

    Afterwards the original is shown.
    """
    paths = dict.fromkeys(decision.block.path for own in decisions for decision in own)
    modules = [model.get_submodule(path) for path in paths]
    original = Face(modules)
    welded: list[Face] = []
    try:
        for own in decisions:
            original.show()
            weld(model, own)
            welded.append(Face(modules))
        yield [original, *welded]
    finally:
        for face, own in zip(welded, decisions, strict=False):  # welding may have failed halfway
            face.show()
            undo(model, [decision.block.path for decision in own])
        original.show()


@contextmanager
def both_faces(model: nn.Module, decisions: Sequence[Decision]) -> Iterator[tuple[Face, Face]]:
    """The model's own face and the welded one, which is shown; afterwards it is unwelded.

    Calls that run the original code are counted and not told: whoever looks at both reports them.
    """
    with untold(), faces(model, [decisions]) as (original, welded):
        welded.show()
        yield original, welded
