"""The place of the history, and the commit checked out, read from files: git is not needed."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "TORCHWELD_HISTORY"
FOLDER, FILE = ".torchweld", "history.sqlite"


def history_path(given: Path | None = None) -> Path:
    """`given`, else $TORCHWELD_HISTORY, else a file in the work tree's root, or in this folder."""
    if given is not None:
        return given
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser()
    here = Path.cwd()
    return (work_tree(here) or here) / FOLDER / FILE


def work_tree(folder: Path) -> Path | None:
    """The root of the git work tree that `folder` is in."""
    return next((root for root in (folder, *folder.parents) if (root / ".git").exists()), None)


def commit_of(folder: Path) -> str | None:
    """The commit that is checked out in the work tree around `folder`; None where there is none."""
    root = work_tree(folder)
    try:
        return None if root is None else _head(_git_folder(root))
    except (OSError, ValueError):  # half a repository, or not in a form known here
        return None


def _git_folder(root: Path) -> Path:
    entry = root / ".git"
    if entry.is_dir():
        return entry
    # A linked work tree or a submodule: a file that says where the folder is.
    return root / entry.read_text().strip().removeprefix("gitdir: ")


def _head(folder: Path) -> str | None:
    head = (folder / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head if _is_hash(head) else None
    name = head.removeprefix("ref: ")
    shared = folder
    if (folder / "commondir").is_file():  # branches of a linked work tree are the main one's
        shared = folder / (folder / "commondir").read_text().strip()
    for holder in (folder, shared):
        if (holder / name).is_file():
            found = (holder / name).read_text().strip()
            return found if _is_hash(found) else None
    packed = shared / "packed-refs"
    lines = packed.read_text().splitlines() if packed.is_file() else []
    pairs = (line.split() for line in lines if not line.startswith(("#", "^")))
    return next((pair[0] for pair in pairs if len(pair) == 2 and pair[1] == name), None)


def _is_hash(text: str) -> bool:
    return len(text) in (40, 64) and set(text) <= set("0123456789abcdef")
