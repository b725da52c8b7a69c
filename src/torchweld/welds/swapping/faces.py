"""The faces of modules: a class each and what welding keeps in it, swapped in a moment.

A welded model and the original are two faces of the same modules. So both can be timed in turn, on
the same weights at the same addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from torchweld.welds.decisions import Decision
from torchweld.welds.marks import KEY
from torchweld.welds.swapping.swap import set_face, undo, weld


class Face:
    """Some modules as they are at this moment: their classes, and what welding keeps in them."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._states = [(m, type(m), m.__dict__.get(KEY)) for m in modules]

    def show(self) -> None:
        for module, kind, joint in self._states:
            set_face(module, kind, joint)


@contextmanager
def faces(
    model: nn.Module, modules: Sequence[nn.Module], decisions: Sequence[Sequence[Decision]]
) -> Iterator[list[Face]]:
    """The original face and one for each list of decisions; afterwards the original is shown."""
    original = Face(modules)
    found = [original]
    try:
        for own in decisions:
            original.show()
            weld(model, own)
            found.append(Face(modules))
        yield found
    finally:
        for face in found[1:]:
            face.show()
            undo(model, [d.block.path for own in decisions[:1] for d in own])
        original.show()
