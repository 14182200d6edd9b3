# SPDX-License-Identifier: MIT
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "benchmarks/learning"))
