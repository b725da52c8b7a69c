"""Names of earlier releases: imports of them warn and work, and so do pickles, without a word."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.support.helpers import ISAS, kernel_runs

import torchweld as tw
from torchweld.core.earlier_names import MODULES, RENAMED, SPLIT

SAVED = Path(__file__).parents[1] / "data" / "welded_0_1_plan_2.pt"


@pytest.fixture
def _imported_anew() -> Iterator[None]:
    """Makes modules look as in a process that has imported none of them yet."""
    earlier = {name: sys.modules.pop(name, None) for name in map("torchweld.{}".format, MODULES)}
    yield
    for name, module in earlier.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


@contextmanager
def warnings_are(action: Literal["ignore", "error"]) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        yield


def import_statement(name: str) -> Any:
    space: dict[str, Any] = {}
    exec(f"import torchweld.{name} as found", space)
    return space["found"]


@pytest.mark.usefixtures("_imported_anew")
@pytest.mark.parametrize("earlier", MODULES)
def test_an_import_says_the_name_of_today_and_gives_what_lies_there(earlier: str) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        module = import_statement(earlier)
        assert import_statement(earlier) is module
    last = said[-1]
    assert last.category is DeprecationWarning
    assert str(last.message).startswith(f"torchweld.{earlier} is torchweld.{MODULES[earlier]} now")
    assert last.filename == "<string>"
    texts = [str(one.message) for one in said]
    assert len(texts) == len(set(texts)), "one import warns once"
    today = importlib.import_module(f"torchweld.{MODULES[earlier]}")
    public = [name for name in vars(today) if not name.startswith("_")]
    assert public
    renamed = RENAMED.get(earlier, {})
    for name in public:
        if name not in renamed:
            assert getattr(module, name) is getattr(today, name)


@pytest.mark.parametrize(
    ("earlier", "name"), [(module, name) for module, names in RENAMED.items() for name in names]
)
def test_what_was_renamed_is_found_under_both_names(earlier: str, name: str) -> None:
    with warnings_are("ignore"):
        module = importlib.import_module(f"torchweld.{earlier}")
    today = RENAMED[earlier][name]
    places = [MODULES[earlier], *SPLIT.get(earlier, ())]
    modules = [importlib.import_module(f"torchweld.{place}") for place in places]
    holder = next(one for one in modules if hasattr(one, today))
    assert getattr(module, name) is getattr(holder, today)


def test_a_module_that_was_split_still_has_all_of_it() -> None:
    with warnings_are("ignore"):
        from torchweld import hardware, records
    for name in ("hardware", "Hardware", "Caches", "build_info", "build_problem", "isa_in_use"):
        assert getattr(hardware, name)
    for name in ("peaks", "Peaks", "FmaPeak", "fingerprint", "cache_dir", "PACKAGE"):
        assert getattr(hardware, name)
    assert records.Count is importlib.import_module("torchweld.core.record_fields").Count


@pytest.mark.parametrize("name", ["no_such_module", "planning.no_such_module", "hardware.cpu"])
def test_an_unknown_name_is_the_usual_error(name: str) -> None:
    with warnings_are("ignore"), pytest.raises(ModuleNotFoundError, match=name):
        importlib.import_module(f"torchweld.{name}")


def test_an_unknown_attribute_is_the_usual_error() -> None:
    with warnings_are("ignore"):
        earlier = importlib.import_module("torchweld.swap")
    with pytest.raises(AttributeError, match="no_such_thing"):
        earlier.no_such_thing  # noqa: B018


@pytest.mark.usefixtures("_imported_anew")
def test_a_pickle_that_names_them_loads_without_a_word() -> None:
    with warnings_are("error"):
        found = pickle.loads(b"ctorchweld.discovery.found\nBlocks\n.")
    assert found is importlib.import_module("torchweld.welds.found_blocks").Blocks


def test_a_welded_model_of_the_earlier_modules_loads_in_a_new_process() -> None:
    """No import there could hide a missing name."""
    code = f"""
import torch
saved = torch.load({str(SAVED)!r}, weights_only=False)
with torch.inference_mode():
    torch.testing.assert_close(saved["model"](saved["x"]), saved["y"])
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine")
def test_a_welded_model_of_the_earlier_modules_is_served_by_the_kernel() -> None:
    with warnings_are("error"):
        saved = torch.load(SAVED, weights_only=False)
        model, x = saved["model"], saved["x"]
        with torch.inference_mode(), kernel_runs(calls=2):
            torch.testing.assert_close(model(x), saved["y"])
    assert all(not one.originals for one in tw.stats(model).values())
    assert {one.path for one in saved["blocks"]} == {"0", "2"}
    assert isinstance(saved["plan"], tw.Plan)
    assert len(tw.undo(model)(x)) == len(x)
