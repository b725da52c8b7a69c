"""The public names of `torchweld`: stated twice, for tools and for Python, and both the same."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import torchweld


def names_for_type_checkers() -> dict[str, str]:
    """Name -> module, of what stands under `if TYPE_CHECKING:` and is exported as itself."""
    tree = ast.parse(Path(torchweld.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.name: f"{node.module}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name  # else mypy --strict takes it for private
    }


def test_type_checkers_see_what_python_finds() -> None:
    found = {name: f"torchweld.{module}" for name, module in torchweld._MODULE_OF.items()}
    assert names_for_type_checkers() == found
    assert set(torchweld.__all__) == found.keys()


@pytest.mark.parametrize("name", torchweld.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(torchweld, name).__name__ == name
