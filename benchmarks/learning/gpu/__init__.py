# SPDX-License-Identifier: MIT
"""The study of local updates on a GPU, at 19 million parameters. `study.py` trains one row; its records, made on an H200, are in
benchmarks/results/learning/gpu/records.jsonl. Needs PyTorch and NumPy, and not the package of this tree."""
