"""TARGET and --input: every form, and every way to get one wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from torchweld.core.errors import TorchweldError
from torchweld.models import DEMO, MODELS
from torchweld.models.targets import resolve
from torchweld.models.typed_inputs import parse_input, smallest_table

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
    def forward(self, x):
        return self.linear(x)
"""


@pytest.fixture(autouse=True)
def _same_imports_afterwards() -> Iterator[None]:
    modules, path = dict(sys.modules), list(sys.path)
    yield
    assert sys.path == path, "a target left sys.path changed"
    for name in set(sys.modules) - set(modules):
        if not name.startswith(("torch", "transformers")):
            del sys.modules[name]


def file_of(folder: Path, text: str, name: str = "own.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# ---- built-in models ----


def test_no_target_is_the_demo() -> None:
    target = resolve()
    assert target.name == DEMO
    assert type(target.model) is MODELS[DEMO].make
    assert not target.model.training
    assert [w.name for w in target.workloads] == ["1x64 int64"]


@pytest.mark.parametrize("name", MODELS)
def test_built_in_models_by_name(name: str) -> None:
    target = resolve(name)
    assert type(target.model) is MODELS[name].make
    assert len(target.workloads) == 1


def test_training_and_seed() -> None:
    a, b, c = (resolve("policy", training=True, seed=seed) for seed in (1, 1, 2))
    assert a.model.training
    weights = [next(iter(target.model.parameters())) for target in (a, b, c)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_an_unknown_name_is_answered_with_the_nearest_and_the_other_forms() -> None:
    with pytest.raises(TorchweldError) as caught:
        resolve("lama")
    text = str(caught.value)
    assert "'lama'; did you mean 'llama'?" in text
    assert "path/to/file.py:factory or hf:<model type>" in text


# ---- files and modules ----


def test_a_factory_in_a_file_may_bring_inputs(tmp_path: Path) -> None:
    text = NET + "def make():\n    return Net(), torch.ones(3, 4)\n"
    target = resolve(f"{file_of(tmp_path, text)}:make")
    assert [w.name for w in target.workloads] == ["3x4 float32"]
    assert target.workloads[0].run(target.model).shape == (3, 2)
    assert not target.model.training


@pytest.mark.parametrize(
    ("extra", "attribute"),
    [
        ("", "Net"),
        ("model = Net()", "model"),
        ("both = (Net(), torch.ones(2, 4))", "both"),
        (
            "def make(rows=2, *args, **kwargs):\n    return [Net(), {'x': torch.ones(rows, 4)}]",
            "make",
        ),
        ("class Makers:\n    make = staticmethod(lambda: Net())", "Makers.make"),
        ("import functools\nmake = functools.partial(lambda n: Net(), 1)", "make"),
    ],
)
def test_what_may_stand_for_a_factory(tmp_path: Path, extra: str, attribute: str) -> None:
    target = resolve(f"{file_of(tmp_path, NET + extra)}:{attribute}", ["2x4"])
    assert target.workloads[0].run(target.model).shape == (2, 2)


def test_a_model_in_a_file_is_that_very_object(tmp_path: Path) -> None:
    path = file_of(tmp_path, NET + "model = Net()\n")
    first, second = (resolve(f"{path}:model", ["1x4"]).model for _ in range(2))
    assert first is second


def test_several_inputs_of_a_factory_are_several_workloads(tmp_path: Path) -> None:
    text = NET + "def make():\n    return Net(), [torch.ones(1, 4), torch.ones(8, 4)]\n"
    target = resolve(f"{file_of(tmp_path, text)}:make")
    assert [w.name for w in target.workloads] == ["1x4 float32", "8x4 float32"]


def test_the_name_may_be_left_out_where_only_one_thing_can_be_meant(tmp_path: Path) -> None:
    text = NET + "def main():\n    raise SystemExit\ndef _make():\n    raise KeyError\n"
    target = resolve(str(file_of(tmp_path, text)), ["1x4"])
    assert type(target.model).__name__ == "Net"


def test_an_ambiguous_file_lists_what_could_be_meant(tmp_path: Path) -> None:
    path = file_of(tmp_path, NET + "def make():\n    return Net()\n")
    with pytest.raises(TorchweldError, match=r"several candidates: Net, make; .*own\.py:Net"):
        resolve(str(path))


def test_a_file_without_a_candidate_says_so(tmp_path: Path) -> None:
    path = file_of(tmp_path, "from torch.nn import Linear\ndef make(n):\n    return Linear(n, n)\n")
    with pytest.raises(TorchweldError, match=r"has no model.*say which, as in .*:factory"):
        resolve(str(path))


def test_a_file_finds_its_neighbours_and_only_while_it_is_loaded(tmp_path: Path) -> None:
    file_of(tmp_path, "WIDTH = 5\n", "its_neighbour.py")
    file_of(tmp_path, "RETURNED = 6\n", "later_neighbour.py")
    text = (
        "from torch import nn\nfrom its_neighbour import WIDTH\n"
        "def make():\n    from later_neighbour import RETURNED\n"
        "    return nn.Linear(WIDTH, RETURNED)\n"
    )
    before = list(sys.path)
    target = resolve(f"{file_of(tmp_path, text)}:make", ["1x5"])
    assert sys.path == before
    assert target.workloads[0].run(target.model).shape == (1, 6)


def test_what_the_users_code_adds_to_the_path_stays(tmp_path: Path) -> None:
    path = file_of(tmp_path, NET + "import sys\nsys.path.insert(0, '/added-by-user')\n")
    try:
        resolve(f"{path}:Net", ["1x4"])
        assert "/added-by-user" in sys.path
        assert str(tmp_path) not in sys.path
    finally:
        sys.path.remove("/added-by-user")


def test_a_file_in_a_package_may_import_relatively(tmp_path: Path) -> None:
    file_of(tmp_path, "", "outerpkg/__init__.py")
    file_of(tmp_path, "", "outerpkg/inner/__init__.py")
    file_of(tmp_path, NET, "outerpkg/nets.py")
    path = file_of(tmp_path, "from ..nets import Net\nmodel = Net()\n", "outerpkg/inner/own.py")
    target = resolve(f"{path}:model", ["1x4"])
    assert type(target.model).__module__ == "outerpkg.nets"


def test_a_file_may_be_called_like_a_module_that_is_loaded(tmp_path: Path) -> None:
    path = file_of(tmp_path, NET, "pytest.py")
    target = resolve(f"{path}:Net", ["1x4"])
    assert sys.modules["pytest"] is pytest
    assert type(target.model).__module__ == "pytest_2"


def test_modules_are_found_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_of(tmp_path, NET, "workdirpkg/nets.py")
    file_of(tmp_path, "", "workdirpkg/__init__.py")
    monkeypatch.chdir(tmp_path)
    for text in ("workdirpkg.nets:Net", "workdirpkg.nets"):
        assert type(resolve(text, ["1x4"]).model).__name__ == "Net"
    assert type(resolve("torch.nn:Identity", ["3"]).model) is nn.Identity


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import missing_module_x",
            r"ModuleNotFoundError: No module named 'missing_module_x'.*line 1",
        ),
        ("x = 1\nraise KeyError('gone')", r"KeyError: 'gone' \(own\.py, line 2\)"),
        ("def broken(:", r"SyntaxError: .*\(own\.py, line 1\)"),
        ("import sys\nsys.exit('usage: own')", "SystemExit: usage: own"),
        ("raise ValueError('first\\nsecond')", r"ValueError: first \("),
        ("raise ValueError", r"ValueError \("),
    ],
)
def test_a_file_that_does_not_import_says_why_in_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = file_of(tmp_path, text)
    with pytest.raises(TorchweldError, match=f"does not import: {message}") as caught:
        resolve(f"{path}:make")
    assert "\n" not in str(caught.value)
    assert f"python {path}" in str(caught.value)
    assert caught.value.__cause__ is not None
    assert "own" not in sys.modules


def test_a_module_that_does_not_exist_says_so() -> None:
    with pytest.raises(TorchweldError, match=r"does not import: ModuleNotFoundError.*no_such_pkg"):
        resolve("no_such_pkg.models:make")


@pytest.mark.parametrize(
    ("extra", "attribute", "message"),
    [
        ("", "Nett", r"has no 'Nett'; there are: Net"),
        ("def make(n, *, bias):\n    pass", "make", r"needs the arguments n, bias; .*def make\(\)"),
        (
            "def make():\n    raise OSError('no weights')",
            "make",
            r"make\(\) failed: OSError: no weig",
        ),
        (
            "def make():\n    return nn.Linear('x', 2)",
            "make",
            r"failed: TypeError: .*own\.py, line ",
        ),
        (
            "def make():\n    return None",
            "make",
            r"make gave None; a factory returns an nn\.Module",
        ),
        ("def make():\n    return {'model': Net()}", "make", "make gave a dict"),
        ("def make():\n    return Net(), 1, 2", "make", r"a tuple of \['Net', 'int', 'int'\]"),
        ("def make():\n    return Net", "make", "make gave a type"),
        ("make = 3", "make", "make gave a int"),
        ("def make():\n    return Net(), 3", "make", "the inputs: int; give a tensor"),
        ("def make():\n    return Net()", "make", r"nothing to run .* on; its forward takes x: "),
    ],
)
def test_a_factory_that_does_not_work_says_what_is_wrong(
    tmp_path: Path, extra: str, attribute: str, message: str
) -> None:
    path = file_of(tmp_path, NET + extra)
    with pytest.raises(TorchweldError, match=message):
        resolve(f"{path}:{attribute}")


def test_files_folders_and_halves_of_a_target(tmp_path: Path) -> None:
    with pytest.raises(TorchweldError, match=r"there is no file '.*gone\.py'"):
        resolve(f"{tmp_path}/gone.py:make")
    with pytest.raises(TorchweldError, match=r"is a folder; give .*<file>\.py:factory, or hf:"):
        resolve(str(tmp_path))
    for text in ("own.py:", ":make"):
        with pytest.raises(TorchweldError, match=r"is not complete; give package\.module:fac"):
            resolve(text)


# ---- --input ----


@pytest.mark.parametrize(
    ("text", "name", "shape", "dtype"),
    [
        ("8x768", None, (8, 768), torch.float32),
        ("5", None, (5,), torch.float32),
        ("x=2x3:bf16", "x", (2, 3), torch.bfloat16),
        ("input_ids=1x128:int64", "input_ids", (1, 128), torch.int64),
        (" 0x4:float64 ", None, (0, 4), torch.float64),
        ("m=3x1x2:bool", "m", (3, 1, 2), torch.bool),
    ],
)
def test_input_texts(
    text: str, name: str | None, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    parsed = parse_input(text)
    assert (parsed.name, parsed.shape, parsed.dtype) == (name, shape, dtype)


@pytest.mark.parametrize(
    "text", ["", "x", "8*768", "8x", "x8", "-1x4", "=8x4", "a b=3", "8x4:", "8x4:int64:", "8,768"]
)
def test_input_texts_that_are_not_understood(text: str) -> None:
    with pytest.raises(TorchweldError, match=r"is not \[name=\]SHAPE"):
        parse_input(text)


def test_an_unknown_dtype_is_answered_with_the_nearest() -> None:
    with pytest.raises(TorchweldError, match=r"'8x4:flaot32'.*did you mean 'float32'"):
        parse_input("8x4:flaot32")


@pytest.mark.parametrize("text", ["8x4:float32:9", "8x4:bool:2", "8x4:int64:0"])
def test_a_range_needs_whole_numbers(text: str) -> None:
    with pytest.raises(TorchweldError, match="end of the range"):
        parse_input(text)


def test_all_inputs_make_one_call_and_replace_the_targets_own() -> None:
    target = resolve("bert", ["3x7:int64", "attention_mask=3x7:int64"])
    (workload,) = target.workloads
    assert workload.name == "3x7 int64, attention_mask 3x7 int64"
    assert workload.run(target.model).shape == (3, 384)
    assert workload.tensors()[1].eq(1).all(), "a mask at random would hide whole sentences"


def test_input_values_are_the_same_each_time_and_follow_the_seed() -> None:
    before = torch.get_rng_state()
    a, b, c = (resolve("policy", ["2x64"], seed=s).workloads[0].tensors()[0] for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 4)
        self.types = nn.EmbeddingBag(3, 4)


def test_whole_numbers_fit_into_the_smallest_embedding_and_it_is_said(tmp_path: Path) -> None:
    assert smallest_table(Tables())[0] == 3
    text = NET + "def make():\n    return nn.Embedding(5, 2)\n"
    target = resolve(f"{file_of(tmp_path, text)}:make", ["40x5:int64"])
    assert target.workloads[0].tensors()[0].unique().tolist() == [0, 1, 2, 3, 4]
    (note,) = target.notes
    assert note.startswith("whole numbers of --input are drawn from 0 to 4: the smallest embedding")


def test_a_range_may_be_given(tmp_path: Path) -> None:
    path = file_of(tmp_path, NET)
    target = resolve(f"{path}:Net", ["9x40:int32:7", "y=300:int8:1000"])
    first, second = target.workloads[0].tensors()
    assert first.unique().tolist() == list(range(7))
    assert second.min() >= 0
    assert target.notes == ()


def test_without_an_embedding_whole_numbers_are_zero_and_one(tmp_path: Path) -> None:
    target = resolve(f"{file_of(tmp_path, NET)}:Net", ["9x9:int64"])
    assert target.workloads[0].tensors()[0].unique().tolist() == [0, 1]
    assert "no embedding" in target.notes[0]


def test_an_argument_given_twice_is_refused() -> None:
    with pytest.raises(TorchweldError, match="gives 'x' twice"):
        resolve("policy", ["x=1x4", "x=2x4"])


def test_inputs_go_where_the_model_is(tmp_path: Path) -> None:
    text = NET + "def make():\n    return Net().to('meta')\n"
    target = resolve(f"{file_of(tmp_path, text)}:make", ["2x4"])
    assert target.workloads[0].run(target.model).device.type == "meta"


def test_importing_targets_does_not_import_transformers() -> None:
    code = "import sys, torchweld.models.targets; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
