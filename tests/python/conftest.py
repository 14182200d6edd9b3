# SPDX-License-Identifier: MIT
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # ranks.py, models.py, literal.py, also in the ranks' processes
