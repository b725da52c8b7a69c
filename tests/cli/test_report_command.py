"""`torchweld report`, and --report of the verbs that measure."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from tests.support.bench_samples import FakeCompare, case, cell, comparison
from tests.support.bench_samples import bench as made_bench
from tests.support.block_profiles import blocks, fused_blocks
from torch import nn

import torchweld as tw
from torchweld.cli import profile_command, report_command
from torchweld.cli.main import run
from torchweld.history import History
from torchweld.pages.page_building import page_of
from torchweld.pages.page_html import html_of
from torchweld.pages.page_reading import read_page
from torchweld.pages.page_records import Page
from torchweld.pages.page_sections import sections_of
from torchweld.pages.page_server import PageServer
from torchweld.plans import choice_timing, whole_model
from torchweld.profiles.accounting.profile_diff import diff

Captured = pytest.CaptureFixture[str]
Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> Say:
    """Runs `torchweld` in a folder of its own: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHWELD_HISTORY", raising=False)

    def say(*arguments: str) -> tuple[int, str, str]:
        code = run(list(arguments))
        return code, *capsys.readouterr()

    return say


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """One file of each kind."""
    blocks().save(tmp_path / "before.json")
    fused_blocks().save(tmp_path / "after.json.gz")
    model = nn.Sequential(nn.Linear(6, 13), nn.GELU(), nn.Linear(13, 6)).eval()
    tw.plan(model, torch.randn(3, 6), force=True).save(tmp_path / "plan.json")
    made_bench([cell(case(), {"cpu": comparison()})]).save(tmp_path / "bench.json")
    diff(blocks(), blocks()).save(tmp_path / "diff.json")
    return tmp_path


def keep(file: str, name: str, speedup: float) -> None:
    with History.open(Path(file), create=True) as history:
        kept = history.begin(name, "fuse", "gpt", {})
        kept.add("1x64", {"speedup": speedup, "interval": [1.0, 3.0]}, {"log_ratios": [0.5]})
        kept.finish()


# ---- what a RUN may be ----


@pytest.mark.parametrize(
    ("run_file", "section"),
    [
        ("before.json", "flame"),
        ("after.json.gz", "flame"),
        ("plan.json", "numerics"),
        ("bench.json", "bench"),
    ],
)
def test_a_saved_run_becomes_a_page_beside_it(
    files: Path, say: Say, run_file: str, section: str
) -> None:
    code, out, err = say("report", run_file)
    assert (code, out) == (0, "")
    assert err.startswith("wrote report.html, ")
    page = read_page(files / "report.html")
    assert section in sections_of(page)
    assert page.command == f"torchweld report {run_file}"
    code, _, err = say("report", run_file)
    assert code == 2
    assert "report.html is there already; --force replaces it" in err
    assert say("report", run_file, "--force")[0] == 0


def test_a_page_is_read_as_a_run_is(files: Path, say: Say) -> None:
    assert say("report", "before.json", "--out", "a.html", "--title", "first")[0] == 0
    code, out, _ = say("report", "a.html", "--json")
    assert code == 0
    assert Page.from_json(out) == read_page(files / "a.html")
    assert json.loads(out)["title"] == "first"
    (files / "page.json").write_text(out)
    assert say("report", "page.json", "--out", "b.html")[0] == 0
    assert (files / "b.html").read_bytes() == (files / "a.html").read_bytes()


@pytest.mark.parametrize("kind", ["profiles", "pages", "one of each"])
def test_two_runs_are_before_and_after(files: Path, say: Say, kind: str) -> None:
    first, second = "before.json", "after.json.gz"
    if kind != "profiles":
        assert say("report", second, "--out", "after.html")[0] == 0
        second = "after.html"
    if kind == "pages":
        assert say("report", first, "--out", "before.html")[0] == 0
        first = "before.html"
    assert say("report", first, second, "--out", "both.html")[0] == 0
    page = read_page(files / "both.html")
    assert [side.name for side in page.sides] == ["before", "after"]
    assert page.diff is not None
    assert page.not_comparable == ()
    assert page.verdict.startswith("Net: a step took")


def test_a_plan_a_bench_and_a_history_add_their_sections(files: Path, say: Say) -> None:
    keep("kept.sqlite", "main", 2.0)
    more = ("--plan", "plan.json", "--bench", "bench.json", "--history", "kept.sqlite")
    assert say("report", "before.json", *more)[0] == 0
    page = read_page(files / "report.html")
    assert {"flame", "welded", "bench", "history", "numerics", "samples"} <= set(sections_of(page))
    assert page.verdict.startswith("Sequential: welded 1 of 1 MLPs")
    assert page.notes[0].startswith("Net: one step takes")
    assert page.notes[1] == read_verdict(files, say, "bench.json")
    assert page.sides[0].modules[0].fate == "welded"  # the plan welds the model itself


def read_verdict(files: Path, say: Say, run_file: str) -> str:
    code, out, _ = say("report", run_file, "--json")
    assert code == 0
    return Page.from_json(out).verdict


def test_a_plan_has_the_verdict_on_what_was_before_and_after(files: Path, say: Say) -> None:
    both, plan = ("before.json", "after.json.gz"), read_verdict(files, say, "plan.json")
    assert say("report", *both, "--plan", "plan.json")[0] == 0
    page = read_page(files / "report.html")
    assert page.verdict == plan
    assert page.notes[0].startswith("Net: a step took")
    assert say("report", "before.json", "plan.json", "--force")[0] == 0
    page = read_page(files / "report.html")
    assert page.verdict == plan
    assert page.notes[0].startswith("Net: one step takes")


def test_a_page_of_several_is_not_repeated_by_the_command_of_one(files: Path, say: Say) -> None:
    page = replace(page_of([blocks()]), command="torchweld profile gpt --report before.html")
    (files / "before.html").write_text(html_of(page))
    assert say("report", "before.html", "--title", "gpt", "--out", "a.html")[0] == 0
    assert read_page(files / "a.html").command == page.command
    for more in (["after.json.gz"], ["--plan", "plan.json"], ["--bench", "bench.json"]):
        assert say("report", "before.html", *more, "--out", "b.html", "--force")[0] == 0
        command = f"torchweld report before.html {' '.join(more)} --out b.html --force"
        assert read_page(files / "b.html").command == command


def test_kept_runs_are_found_by_name_and_by_number(files: Path, say: Say) -> None:
    for speedup in (1.5, 2.0):
        keep(".torchweld/history.sqlite", "main", speedup)
    for wanted, speedup in (("main", 2.0), ("main~1", 1.5), ("1", 1.5)):
        code, out, err = say("report", wanted, "--json")
        assert code == 0, err
        page = Page.from_json(out)
        assert page.strips[0].speedup == speedup
        assert len(page.history[0].points) == 2
    assert say("report", "main")[0] == 0
    assert (files / "report.html").exists()
    code, _, err = say("report", "mian", "--json")
    assert code == 2
    assert "did you mean 'main'" in err


# ---- what it may not be ----


def test_other_files_are_named_with_what_is_expected(files: Path, say: Say) -> None:
    (files / "a.txt").write_text("hello")
    (files / "empty.json").write_text("")
    (files / "list.json").write_text('{"a": 1}')
    (files / "folder.html").mkdir()
    for run_file, why in (
        ("a.txt", "begins with 'hello'"),
        ("empty.json", "is empty"),
        ("diff.json", "is a saved diff"),
        ("list.json", "list.json"),
        ("missing.html", "cannot be read"),
        ("folder.html", "is a directory"),
        ("nobody", "there is no file nobody, and no history at"),
    ):
        code, _, err = say("report", run_file, "--out", "x.html")
        assert code == 2, run_file
        assert why in " ".join(err.split()), err
    assert not (files / "x.html").exists()


def test_files_are_recognised_wherever_their_mark_stands(files: Path, say: Say) -> None:
    assert say("report", "before.json", "--out", "a.html")[0] == 0
    (files / "report.json").write_text(say("report", "a.html", "--json")[1])
    for name in ("report.json", "before.json", "plan.json", "bench.json"):
        data = json.loads((files / name).read_text())
        turned = dict(reversed(data.items()))
        (files / "turned.json").write_text(json.dumps(turned))
        code, out, err = say("report", "turned.json", "--json")
        assert code == 0, err
        assert Page.from_json(out).verdict == read_verdict(files, say, name)
    newer = {"title": "", "verdict": "", "brand new": [1], "torchweld_report": 99}
    (files / "newer.json").write_text(json.dumps(newer))
    code, _, err = say("report", "newer.json", "--json")
    assert code == 2
    assert "report format 99; this torchweld reads" in " ".join(err.split())


def test_options_that_do_not_go_together_are_refused(files: Path, say: Say) -> None:
    for arguments, why in (
        (("before.json", "before.json", "before.json"), "3 RUNs are given"),
        (("before.json", "--serve", "--json"), "give one"),
        (("--serve", "before.json", "plan.json"), "put --serve after the RUN"),
        (("before.json", "--serve", "70000"), "a port from 1 to 65535"),
        (("before.json", "--out", "a.txt"), "has to end in .html"),
        (("before.json", "--out", "no/a.html"), "there is no folder no"),
        (("before.json", "--plan", "bench.json"), "is not a plan that torchweld saved"),
        (("before.json", "--bench", "plan.json"), "is not a bench that torchweld saved"),
        (("before.json", "--history", "no.sqlite"), "there is no history at no.sqlite"),
    ):
        code, _, err = say("report", *arguments)
        assert code == 2, arguments
        assert why in " ".join(err.split()), err


# ---- redacted, served ----


def test_names_are_replaced_before_a_page_is_sent(files: Path, say: Say) -> None:
    assert say("report", "before.json", "--redact", "--title", "Zorro, zero")[0] == 0
    text = (files / "report.html").read_text()
    page = read_page(files / "report.html")
    assert "Zorro" not in text
    assert not any("mlp" in row.path for row in page.sides[0].modules)
    assert page.redacted
    assert page.title == "title1"
    assert page.command == "torchweld report file1 --redact --title title1"
    assert say("report", "before.json", "--out", "plain.html")[0] == 0
    for others in (["plain.html"], ["report.html"], ["--plan", "plan.json"]):
        code, _, err = say("report", "report.html", *others, "--out", "both.html")
        assert code == 2
        assert "cannot be compared or joined" in " ".join(err.split())


def test_it_is_served_until_interrupted(
    files: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []

    class Interrupted(PageServer):
        def serve_forever(self, poll_interval: float = 0.5) -> None:
            thread = threading.Thread(target=super().serve_forever, args=(0.01,))
            thread.start()
            where = urlsplit(self.address)
            connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=20)
            connection.request("GET", "/")
            seen.append(connection.getresponse().read())
            connection.close()
            self.shutdown()
            thread.join()
            raise KeyboardInterrupt

    monkeypatch.setattr(report_command, "PageServer", Interrupted)
    code, out, err = say("report", "before.json", "--serve")
    assert code == 0
    assert out.startswith("http://127.0.0.1:")
    assert "Ctrl-C ends" in out
    assert err == "ended\n"
    assert b"torchweld-report" in seen[0]
    assert not (files / "report.html").exists()


# ---- of the other verbs ----


def test_a_profile_writes_its_page(files: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_command, "take_live", lambda *_: blocks())
    code, out, err = say("profile", "gpt", "--report", "p.html")
    assert code == 0
    assert "wrote p.html" in err
    assert "Net: one step takes" in out
    page = read_page(files / "p.html")
    assert page.command == "torchweld profile gpt --report p.html"
    assert say("profile", "gpt", "--report", "p.html")[0] == 2
    code, _, err = say("profile", "gpt", "--report", "p.json")
    assert code == 2
    assert "has to end in .html" in err


def test_a_plan_writes_its_page_beside_its_json(
    files: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (choice_timing, whole_model):
        monkeypatch.setattr(place, "compare", FakeCompare())
    asked = ("fuse", "policy", "--quick", "--no-profile", "--json", "--report", "p.html")
    code, out, err = say(*asked)
    assert code == 0, err
    assert json.loads(out)["model"] == "Policy"
    page = read_page(files / "p.html")
    assert page.sides == ()
    assert page.verdict.startswith("Policy: welded 1 of 1 MLPs: 2.00x faster")
    assert {"welded", "bench", "numerics", "samples"} <= set(sections_of(page))


def test_a_bench_writes_its_page(
    files: Path, bench: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    asked = ("--block", "tiny", "--rows", "2", "--save", "b", "--history", "h.sqlite")
    code, _, err = bench(*asked, "--report", "b.html")
    assert code == 0, err
    page = read_page(files / "b.html")
    assert {"bench", "history", "numerics", "samples"} <= set(sections_of(page))
    assert bench("--show", "bench.json", "--report", "c.html")[0] == 0
    assert "bench" in sections_of(read_page(files / "c.html"))


def test_targets_are_checked_before_the_work(files: Path, say: Say) -> None:
    (files / "there.html").write_text("")
    for verb in (("fuse", "gpt"), ("profile", "gpt"), ("bench",)):
        code, _, err = say(*verb, "--report", "there.html")
        assert code == 2
        assert "there.html is there already" in err
    code, _, err = say("fuse", "gpt", "--report", "a.html", "--out", "a.html")
    assert code == 2
    assert "name the same file" in err


def test_the_help_has_examples(say: Say) -> None:
    code, out, _ = say("report", "--help")
    assert code == 0
    assert "torchweld report before.json after.json --plan plan.json" in " ".join(out.split())
