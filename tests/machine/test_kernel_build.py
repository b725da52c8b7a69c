"""The build's record: what it says, and what is said where there is none."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from torchweld.core.errors import BuildError
from torchweld.machine import kernel_build


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build record of our own in place of the real one; absent until written."""
    path = tmp_path / "_build_info.json"
    monkeypatch.setattr(kernel_build, "BUILD_INFO", path)
    return path


def built_for(version: str) -> str:
    return json.dumps(
        {
            "built": True,
            "torch": version,
            "isas": ["baseline"],
            "compiler": "g++ 99",
            "source_hash": "abc",
        }
    )


@pytest.mark.parametrize("text", [None, "", "{", "[]", "null"])
def test_without_a_readable_record_nothing_counts_as_built(record: Path, text: str | None) -> None:
    if text is not None:
        record.write_text(text)
    assert kernel_build.build_info() is None
    problem = kernel_build.build_problem()
    assert problem is not None
    assert "not built" in problem
    assert kernel_build.compiled_part() is None
    assert kernel_build.isa_in_use() is None


def test_a_build_left_out_says_why(record: Path) -> None:
    record.write_text('{"built": false, "reason": "no C++ compiler was found"}')
    assert kernel_build.build_info() is None
    assert "no C++ compiler was found" in str(kernel_build.build_problem())


def test_a_build_for_another_torch_is_named_with_the_remedy(record: Path) -> None:
    record.write_text(built_for("1.0.0"))
    problem = str(kernel_build.build_problem())
    assert "built for torch 1.0.0" in problem
    assert f"torch {torch.__version__} is installed" in problem
    assert "--no-build-isolation" in problem
    assert "\n" not in problem
    assert kernel_build.compiled_part() is None


def test_a_fitting_build_has_no_problem(record: Path) -> None:
    record.write_text(built_for(torch.__version__))
    assert kernel_build.build_problem() is None
    info = kernel_build.build_info()
    assert info is not None
    assert (info.isas, info.compiler) == (("baseline",), "g++ 99")


@pytest.mark.parametrize(
    ("cuda", "told"),
    [
        (
            {"built": True, "architectures": ["sm_80", "sm_90"], "compiler": "nvcc 13.0"},
            "built for sm_80, sm_90, by nvcc 13.0",
        ),
        ({"built": False, "reason": "nvcc was not found"}, "not built: nvcc was not found"),
        ({}, "not built: no reason was recorded"),
        (None, "not built: the build says nothing of them"),
    ],
)
def test_the_record_tells_of_cuda_kernels(
    record: Path, cuda: dict[str, object] | None, told: str
) -> None:
    """Records of earlier builds say nothing of them."""
    whole = json.loads(built_for(torch.__version__)) | ({} if cuda is None else {"cuda": cuda})
    record.write_text(json.dumps(whole))
    info = kernel_build.build_info()
    assert info is not None
    assert str(info.cuda) == told


def test_an_extension_that_does_not_load_is_a_clear_error(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise ImportError(f"{name}: undefined symbol: nothing")

    record.write_text(built_for(torch.__version__))
    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(BuildError, match=r"undefined symbol: nothing.*to rebuild it"):
        kernel_build.compiled_part()
