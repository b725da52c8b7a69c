"""Numbers in a spec mean the same in every locale."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.helpers import ISAS, run_python

pytestmark = pytest.mark.skipif(not ISAS, reason="no compiled kernels on this machine")

CODE = """
import locale, torch, torchweld
x, w = torch.linspace(-3, 3, 64).view(64, 1), torch.ones(1, 1)
specs = ["softplus:1,20", "softplus:2.5,4", "leaky_relu:0.2", "elu:1e-1", "elu: +0.5"]
before = [torch.ops.torchweld.chain(x, [w], spec) for spec in specs]
locale.setlocale(locale.LC_NUMERIC, "de_DE.UTF-8")
assert locale.localeconv()["decimal_point"] == ",", "not the locale that was asked for"
import threading
after = []
def run():  # each thread reads a spec once
    after.extend(torch.ops.torchweld.chain(x, [w], spec) for spec in specs)
thread = threading.Thread(target=run); thread.start(); thread.join()
assert len(after) == len(specs)
for spec, a, b in zip(specs, before, after):
    assert torch.equal(a, b), spec
torch.testing.assert_close(after[0], torch.nn.functional.softplus(x))
torch.testing.assert_close(after[1], torch.nn.functional.softplus(x, 2.5, 4))
"""


def test_a_comma_is_no_decimal_point(tmp_path: Path) -> None:
    localedef = shutil.which("localedef")
    env = dict(os.environ)
    if localedef is None or not Path("/usr/share/i18n/locales/de_DE").exists():
        known = subprocess.run(["locale", "-a"], capture_output=True, text=True, check=False)
        if "de_DE.utf8" not in known.stdout:
            pytest.skip("there is no German locale, and nothing to make one with")
    else:
        made = tmp_path / "de_DE.UTF-8"
        subprocess.run([localedef, "-i", "de_DE", "-f", "UTF-8", str(made)], check=True)
        env["LOCPATH"] = str(tmp_path)
    run_python(CODE, env=env)
