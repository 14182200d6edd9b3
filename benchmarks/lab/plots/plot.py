# SPDX-License-Identifier: MIT
"""Draws run directories: loss, accuracy, bytes, seconds and layers, of one run or of several side by side."""
from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

sys.dont_write_bytecode = True

from run_directory import BadRun, Run, read_run  # noqa: E402


def tell_apart(runs: list[Run]) -> None:
    """Runs of the same name get their directory's name behind it."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name += f" ({run.path.resolve().name})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="plot", description=__doc__)
    parser.add_argument("runs", metavar="RUN_DIR", nargs="+", type=Path,
                        help="a directory with config.json and metrics.jsonl")
    parser.add_argument("--output", metavar="DIR", type=Path,
                        help="where to write; RUN_DIR/plots by default, ./plots for several runs")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    parser.add_argument("--tensorboard", action="store_true",
                        help="also write TensorBoard event files into RUN_DIR/tensorboard (needs tensorboardX)")
    options = parser.parse_args()
    output = options.output or (options.runs[0] / "plots" if len(options.runs) == 1 else Path("plots"))

    if options.tensorboard and importlib.util.find_spec("tensorboardX") is None:
        sys.exit("plot: --tensorboard needs the Python package tensorboardX: install it with 'python3 -m venv "
                 "--system-site-packages VENV && VENV/bin/pip install tensorboardX' and run again after "
                 "'. VENV/bin/activate'")
    try:
        runs = [read_run(path) for path in options.runs]
        tell_apart(runs)
        import figures  # here, so that bad input is told before matplotlib takes its second to load

        for path in figures.write_all(runs, output, options.format):
            print(path)
        if options.tensorboard:
            import event_files

            for run in runs:
                print(event_files.write(run))
    except BadRun as error:
        sys.exit(f"plot: {error}")
    except OSError as error:
        sys.exit(f"plot: {error.filename} cannot be written: {error.strerror}")


if __name__ == "__main__":
    main()
