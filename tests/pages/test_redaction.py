"""Redaction: no name survives, structure does, and no text field is without a rule."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from tests.support.block_profiles import blocks
from tests.support.watched_pages import TRACE_FOLDER

from torchweld.core.errors import TorchweldError
from torchweld.core.not_measured import NotMeasured
from torchweld.core.record_fields import Index
from torchweld.models import MODELS
from torchweld.pages import redaction
from torchweld.pages.page_building import joined_pages, page_of
from torchweld.pages.page_html import html_of
from torchweld.pages.page_records import BlockRow, ErrorRow, FlameDiff, HistoryPlot, Page
from torchweld.pages.public_names import is_own_word, is_public_op, is_torch_class
from torchweld.pages.redaction import RULES, redacted
from torchweld.pages.stand_ins import KEPT_ROWS

# What stays as it is: figures of the machine that many have.
KEPT = {"About.cpu", "About.torch"}


class Marked:
    """A page in which every text is a word of its own, none of which torchweld uses."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.markers: dict[str, str] = {}  # marker -> where it stands

    def marker(self, where: str) -> str:
        found = f"qz{next(self.numbers)}vx"
        self.markers[found] = where
        return found

    def made(self, hint: Any, where: str) -> Any:
        origin, inside = get_origin(hint), get_args(hint)
        if hint is str:
            return self.marker(where)
        if hint == Index:
            return -1
        if origin is Annotated:
            return self.made(inside[0], where)
        if origin is Literal:
            return inside[0]
        if origin in (Union, types.UnionType):
            if NotMeasured in inside and where.endswith(("speedup", "step_us")):
                return NotMeasured(self.marker(f"{where}, why"))
            kind = next(one for one in inside if one not in (NotMeasured, types.NoneType))
            return self.made(kind, where)
        if origin is tuple:
            kinds = inside[:1] if inside[-1] is Ellipsis else inside
            return tuple(self.made(one, where) for one in kinds)
        if is_dataclass(hint) and isinstance(hint, type):
            return self.record(hint)
        if where.endswith(".parent"):
            return -1  # the first of a tree
        return {int: 0, float: 1.0, bool: False}[hint]

    def record(self, kind: type) -> Any:
        hints = get_type_hints(kind, include_extras=True)
        names = [one.name for one in fields(kind)]
        return kind(**{name: self.made(hints[name], f"{kind.__name__}.{name}") for name in names})


def records(kind: type, seen: set[type] | None = None) -> Iterator[type]:
    """Every class of records below one."""
    seen = set() if seen is None else seen
    if kind in seen:
        return
    seen.add(kind)
    yield kind
    hints = get_type_hints(kind)
    pending = [hints[one.name] for one in fields(kind)]
    while pending:
        hint = pending.pop()
        if is_dataclass(hint) and isinstance(hint, type) and hint is not NotMeasured:
            yield from records(hint, seen)
        pending += get_args(hint)


def test_no_name_survives_anywhere() -> None:
    marked = Marked()
    page = marked.record(Page)
    page = Page.from_json(page.to_json())  # as it is read
    there = html_of(page)
    assert all(marker in there for marker in marked.markers), "the page does not show them"
    found = html_of(redacted(page))
    left = {where for marker, where in marked.markers.items() if marker in found}
    assert left == KEPT


def test_every_text_field_has_a_rule_and_every_rule_a_field() -> None:
    texts = {
        f"{kind.__name__}.{one.name}"
        for kind in records(Page)
        for one in fields(kind)
        if redaction._holds_text(get_type_hints(kind)[one.name])
    }
    assert texts == set(RULES)


def test_a_field_without_a_rule_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, "BlockRow.serves")
    redaction.rule_of.cache_clear()
    row = BlockRow(path="", what="", outcome="", serves="", reason="")
    with pytest.raises(KeyError, match=r"BlockRow\.serves"):
        redacted(Page(title="", verdict="", blocks=(row,)))
    redaction.rule_of.cache_clear()


def made(**given: Any) -> Page:
    return redacted(Page(**{"title": "", "verdict": "", **given}))


def block(path: str, reason: str = "", what: str = "Linear 8→8") -> BlockRow:
    return BlockRow(path=path, what=what, outcome="welded", serves="cpu packed", reason=reason)


def test_paths_keep_their_structure_everywhere() -> None:
    page = made(
        verdict="zebra: welded zoo.*.yak and zoo.3.yak.xerus; the yak is 1.31x faster.",
        blocks=(block("zoo.3.yak.xerus", "as zoo.[0-3].yak.xerus.weight is"), block("zoo.12.yak")),
    )
    assert [row.path for row in page.blocks] == ["m1.3.m2.m3", "m1.12.m2"]
    assert page.blocks[0].reason == "as m1.[0-3].m2.m3.weight is"
    assert page.verdict == "w1: welded m1.*.m2 and m1.3.m2.m3; the m2 is 1.31x faster."


Both = Literal["both", "new", "gone", "welded"]


def frames(*names: str, around: tuple[BlockRow, ...] = ()) -> tuple[str, ...]:
    """What becomes of the names of frames."""
    states: list[Both] = ["both"] * len(names)
    diff = FlameDiff(
        names=names,
        name=tuple(range(len(names))),
        parent=tuple(range(-1, len(names) - 1)),
        before_us=(1.0,) * len(names),
        after_us=(1.0,) * len(names),
        kind=(1,) * len(names),
        state=tuple(states),
    )
    found = made(diff=diff, blocks=around).diff
    assert found is not None
    return found.names


def test_a_name_has_one_stand_in_in_every_kind_of_text() -> None:
    around = (
        block("tower.en-de.zoo", "en-de and tower.en-de.zoo run; see my tower"),
        block("a b.c"),
    )
    page = made(
        verdict="tower.en-de.zoo is slow, a b.c is not, zoo:en-de is.",
        blocks=around,
        command="torchweld fuse en-de --out zoo",
    )
    assert [row.path for row in page.blocks] == ["m1.m2.m3", "m4.m5"]
    assert page.blocks[0].reason == "m2 and m1.m2.m3 run; see my m1"
    assert page.verdict == "m1.m2.m3 is slow, m4.m5 is not, m3:m2 is."
    assert page.command == "torchweld fuse m2 --out m3"
    names = frames(
        "backward of tower.en-de.zoo", "tower.en-de", "en-de: Linear", "backward", around=around
    )
    assert names == ("backward of m1.m2.m3", "m1.m2", "m2: Linear", "backward")


def test_a_name_that_is_a_word_of_sentences_is_replaced_where_it_is_a_name() -> None:
    around = (
        block("a.key", "in one call with value, key: 2.00 times; the key is the value of all"),
    )
    error = ErrorRow(
        block="a.*: key, value, cpu packed",
        tensor="output of value, relative",
        eager=0.0,
        fused=0.0,
        of_allowed=0.0,
        ok=True,
    )
    page = made(
        verdict="a layer norm (norm) between, and the norm of it",
        blocks=(*around, block("a.value"), block("a.norm"), block("output")),
        errors=(error, replace(error, tensor="output"), replace(error, tensor="grad of a.key")),
    )
    assert page.blocks[0].reason == (
        "in one call with m3, m2: 2.00 times; the key is the value of all"
    )
    assert page.verdict == "a layer norm (m4) between, and the norm of it"
    assert [row.block for row in page.errors] == ["m1.*: m2, m3, cpu packed"] * 3
    assert [row.tensor for row in page.errors] == [
        "output of m3, relative", "output", "grad of m1.m2"
    ]  # fmt: skip
    assert frames("norm", "aten::norm") == ("norm", "aten::norm")
    assert frames("norm", around=(block("norm"),)) == ("m1",)


@pytest.mark.parametrize(
    ("title", "verdict", "found"),
    [
        ("mine", "gate plan, my.expert:head: FAILED.", "gate run1, target1: FAILED."),
        ("gate plan", "the plan is new", "the run1 is new"),
        ("plan: expert", "fuse of expert, 2026-11-19 10:00 UTC.", "fuse of target1, 2026-11-19 "),
        ("bench of expert", "expert is faster", "target1 is faster"),
        ("history of head, plan", "2 kept runs: head, plan.", "2 kept runs: run1, run2."),
        ("mine", "Net: one step takes 3 µs", "w1: one step takes 3 µs"),
    ],
)
def test_what_headings_name_is_replaced_everywhere(title: str, verdict: str, found: str) -> None:
    page = made(title=title, verdict=verdict)
    assert page.verdict.startswith(found)
    assert page.title == "title1"


def test_a_name_within_a_longer_word_is_not_looked_for() -> None:
    page = made(blocks=(block("w-x"),), notes=("w-x, but not new-xy",))
    assert page.notes[0].startswith("m1, but not ")
    assert "m1" not in page.notes[0][3:]


WORDS_OF_OURS = ("attention", "query", "head", "model", "plan", "expert", "welded", "llama", "gpt")


@pytest.mark.parametrize("word", WORDS_OF_OURS)
def test_a_name_that_is_a_word_of_ours_is_replaced(word: str) -> None:
    about = replace(blocks().about, what=word)
    page = page_of([replace(blocks(), about=about)], title=word, command=f"torchweld report {word}")
    page = replace(page, history=(HistoryPlot(title=f"{word}: 1x64", points=()),))
    found = redacted(replace(page, environment=(*page.environment, ("company", word))))
    assert found.sides[0].about.what == found.title == dict(found.environment)["model"] == "Class1"
    assert found.command == "torchweld report Class1"
    assert found.history[0].title == "Class1: 1x64"
    assert frames(word) == ("op1",)
    assert word not in [value for _, value in found.environment]
    assert found.sides[0].flame is not None
    assert found.sides[0].flame.names[0] == "Class1"


def test_no_model_of_ours_is_a_word_of_ours() -> None:
    assert not any(map(is_own_word, MODELS))


def test_of_a_command_only_verb_options_and_figures_stay() -> None:
    given = (
        "torchweld profile attention --input 8x768 --title 'the plan' --save=b/gate.json --welded 3"
    )
    assert made(command=given).command == (
        "torchweld profile argument1 --input 8x768 --title argument2 --save=file1 argument3 3"
    )
    assert "zo" not in made(command="torchweld fuse 'zo").command


def test_what_a_module_says_of_itself_is_figures_and_settings_of_torch() -> None:
    profile = blocks()
    extra = "in_features=6, bias=True, attention=zebra, p=0.1, eps=1e-05"
    modules = tuple(replace(one, extra=extra) for one in profile.modules)
    found = redacted(page_of([replace(profile, modules=modules)]))
    assert found.sides[0].modules[0].extra == "in_features=6, bias=True, w1=w2, p=0.1, eps=1e-05"


def test_a_page_is_marked_and_not_joined_with_another() -> None:
    one = page_of([blocks()])
    assert not one.redacted
    assert redacted(one).redacted
    assert joined_pages([redacted(one)]).redacted
    for pages in ([redacted(one), redacted(one)], [one, redacted(one)]):
        with pytest.raises(TorchweldError, match="redacted page has stand-ins"):
            joined_pages(pages)


def test_what_torchweld_says_stays_readable() -> None:
    says = (
        "gelu 768→3072→768: not faster (1.02, 0.98–1.06) at 64 rows, 12.3 µs of 4.20 GB/s; "
        "aten::addmm and torch.compile, float32, 1e-05; give --budget 32, or budget_s=32; the "
        "model on NVIDIA A100-SXM4-40GB, or AMD Instinct MI250X."
    )
    assert made(notes=(says,), blocks=(block("the model", what="workload"),)).notes == (says,)


@pytest.mark.parametrize(
    ("says", "found"),
    [
        ("refused (modelling_zorro.py:212)", "refused (file1)"),
        ("torchweld fuse /home/zed/x.py:make --input 8x768", "torchweld fuse file1 --input 8x768"),
        ("in plans/attention/model: 12.3 GB/s", "in file1: 12.3 GB/s"),
        ("C:\\model\\plan, \\\\head\\plan, or 3/4 of it", "file1, file2, or 3/4 of it"),
        ("zed@example.org on 10.1.22.7", "host1 on host2"),
        ("zorro::dispatch, then mm", "op1, then mm"),
        ("commit 94560275a6e2", "commit w1"),
        ("torch.compile on nn.Linear, F.gelu", "torch.compile on nn.Linear, F.gelu"),
        ("tw.FusedMLP, torchweld.plan", "tw.FusedMLP, torchweld.plan"),
        ("nn.zorro and F.zebra", "m1.m2 and m3.m4"),
        ("torch.zorro, tw.zebra", "m1.m2, m3.m4"),
        ("torch.ops.aten.mm and torch.ops.zorro.mm", "torch.ops.aten.mm and m1.m2.m3.m4"),
        ("torch.classes.zorro", "m1.m2.m3"),
        ("动物 is slow", "w1 is slow"),
    ],
)
def test_names_in_sentences_are_replaced(says: str, found: str) -> None:
    assert made(notes=(says,)).notes == (found,)


def test_odd_names_of_modules_are_replaced_in_sentences_too() -> None:
    evil = "<script>alert(1)</script>"
    page = made(blocks=(block(f"a.{evil}"), block("★")), notes=(f"see a.{evil}, and ★",))
    assert evil not in page.to_json()
    assert "★" not in page.to_json()


def test_classes_of_torch_keep_their_names() -> None:
    page = made(blocks=(block("a", what="ModuleList"), block("b", what="Zorro")))
    assert [row.what for row in page.blocks] == ["ModuleList", "Class1"]
    assert is_torch_class("torch.nn.Linear")
    assert not is_torch_class("zorro.Linear")


def test_the_environment_keeps_what_many_machines_share() -> None:
    rows = (("CPU", "Zorro 9000"), ("commit", "abc123"), ("machine", "77"), ("model", "Zorro"))
    assert made(environment=rows).environment == (
        ("CPU", "Zorro 9000"),
        ("commit", "commit1"),
        ("machine", "machine1"),
        ("model", "Class1"),
    )
    assert "CPU" in KEPT_ROWS


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("aten::mm", True),
        ("torchweld::chain", True),
        ("engine: AddmmBackward0", True),
        ("NativeLayerNormBackward0", True),
        ("engine: ZorroBackward", False),
        ("zorro::mm", False),
        ("cudaLaunchKernel", True),
        ("void at::native::vectorized_elementwise_kernel<4>", True),
        ("triton_poi_fused_add_gelu_0", True),
        ("zorro_kernel", False),
        ("aten::zorro", False),
        ("torchweld::zorro", False),
        ("torch::zorro", False),
        ("flash_zorro", False),
        ("gemm_zorro", False),
        ("nccl_zorro", False),
        ("nccl:zorro", False),
        ("nccl:all_reduce", True),
        ("triton_zorro", False),
        ("triton_poi_fused_zorro_gelu_0", False),
        ("triton_zor_fused_gelu_0", False),
        ("cpp_zorro", False),
        ("cpp_fused_zorro_0", False),
        ("cpp_fused__softmax_add_2", True),
        ("void at::native::vectorized_elementwise_kernel<4, zorro::Functor<float> >", False),
        ("at::native::zorro", False),
        ("cutlass::Kernel<zorro>", False),
        ("ampere_sgemm_128x64_nn", True),
        ("ampere_sgemm_zorro", False),
        ("Cijk_Ailk_Bjlk_SB_MT64x16x16_GRVWA1", True),
        ("Cijk_Ailk_Bjlk_SB_ZORRO1", False),
        ("cudaZorro", False),
        ("cuZorroLaunch", False),
        ("Memcpy HtoD (Pinned -> Device)", True),
        ("Memcpy zorro", False),
        ("Optimizer.step#SGD.step", True),
        ("Optimizer.step#Zorro.step", False),
        ("void at::動物", False),
    ],
)
def test_ops_are_public_or_not(name: str, public: bool) -> None:
    assert is_public_op(name) is public


def test_kernels_of_real_traces_keep_their_names_unless_they_are_of_a_user() -> None:
    kept: set[str] = set()
    replaced: set[str] = set()
    for path in TRACE_FOLDER.glob("*.json.gz"):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = {event["name"] for event in events if event.get("cat") == "kernel"}
        kept |= set(filter(is_public_op, names))
        replaced |= names - kept
    # Of FBGEMM and of Apex, which are neither torch's nor a vendor's.
    others = r"fbgemm_gpu::|\w*embedding_\w*codegen|permute_|recat_|bounds_|linearize_|multi_tensor"
    others += r"|at::to_dense_representation|split_embedding"
    assert all(re.match(f"(void )?({others})", name) for name in replaced), replaced
    assert len(kept) > 100


def test_a_profile_is_redacted_and_still_adds_up() -> None:
    profile = blocks()
    page = page_of([replace(profile, about=replace(profile.about, what="Zorro"))])
    found = redacted(page)
    paths = [row.path for row in page.sides[0].modules]
    assert len({row.path for row in found.sides[0].modules}) == len(set(paths))
    assert all(
        part.isdecimal() or part.startswith("m")
        for row in found.sides[0].modules
        for part in row.path.split(".")
        if part
    )
    assert page.sides[0].flame is not None
    assert found.sides[0].flame is not None
    assert found.sides[0].flame.own_us == page.sides[0].flame.own_us
    assert "Zorro" not in found.to_json()
    assert redacted(found).sides[0].flame is not None  # again, without an error


def test_own_words_are_those_of_the_sources() -> None:
    assert is_own_word("Faster")
    assert not is_own_word("qz1vx")
