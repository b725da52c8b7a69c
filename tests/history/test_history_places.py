"""Where the history lies, and which commit a run belongs to; git itself is not needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchweld.history import History, history_path
from torchweld.history.history_places import commit_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a commit on main, and a current folder inside it."""
    root = tmp_path / "work"
    (root / ".git" / "refs" / "heads").mkdir(parents=True)
    (root / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (root / ".git" / "refs" / "heads" / "main").write_text(COMMIT + "\n")
    (root / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(root / "a" / "b")
    monkeypatch.delenv("TORCHWELD_HISTORY", raising=False)
    return root


def test_the_file_is_the_one_given_or_named_or_in_the_work_tree(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert history_path() == tree / ".torchweld" / "history.sqlite"
    monkeypatch.setenv("TORCHWELD_HISTORY", str(tmp_path / "named"))
    assert history_path() == tmp_path / "named"
    assert history_path(tmp_path / "given") == tmp_path / "given"


def test_without_git_the_file_is_in_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHWELD_HISTORY", raising=False)
    assert history_path() == tmp_path / ".torchweld" / "history.sqlite"
    assert commit_of(tmp_path) is None
    with History.open(create=True) as history:
        history.begin("main", "bench", "x", {}).finish()
        assert history.runs()[0].fingerprint.commit is None


def test_git_is_told_to_leave_our_folder_alone(tree: Path) -> None:
    with History.open(create=True):
        pass
    assert (tree / ".torchweld" / ".gitignore").read_text() == "*\n"


def test_a_folder_of_the_users_gets_no_such_file(tmp_path: Path) -> None:
    with History.open(tmp_path / "mine" / "h.sqlite", create=True):
        pass
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["h.sqlite"]


def test_the_commit_of_a_branch(tree: Path) -> None:
    assert commit_of(tree / "a") == COMMIT


def test_the_commit_of_a_detached_head(tree: Path) -> None:
    (tree / ".git" / "HEAD").write_text(OTHER + "\n")
    assert commit_of(tree) == OTHER


def test_the_commit_of_a_packed_branch(tree: Path) -> None:
    (tree / ".git" / "refs" / "heads" / "main").unlink()
    lines = ["# pack-refs with: peeled", f"{OTHER} refs/tags/v1", f"^{COMMIT}"]
    (tree / ".git" / "packed-refs").write_text("\n".join([*lines, f"{COMMIT} refs/heads/main"]))
    assert commit_of(tree) == COMMIT


def test_the_commit_of_a_linked_work_tree(tree: Path, tmp_path: Path) -> None:
    linked, own = tmp_path / "linked", tree / ".git" / "worktrees" / "linked"
    linked.mkdir()
    own.mkdir(parents=True)
    (linked / ".git").write_text(f"gitdir: {own}\n")
    (own / "HEAD").write_text("ref: refs/heads/topic\n")
    (own / "commondir").write_text("../..\n")
    (tree / ".git" / "refs" / "heads" / "topic").write_text(OTHER + "\n")
    assert commit_of(linked) == OTHER


@pytest.mark.parametrize("head", ["", "ref: refs/heads/none", "ref: refs/heads/.invalid", "junk"])
def test_a_repository_without_a_commit_has_none(tree: Path, head: str) -> None:
    (tree / ".git" / "HEAD").write_text(head)
    assert commit_of(tree) is None
