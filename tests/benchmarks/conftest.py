"""The benchmarks are scripts in one folder; their tests import them as they do each other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
