# SPDX-License-Identifier: MIT
"""How the programs of this directory end, and what studies that train are told alike."""

import argparse
import pathlib
import signal
import subprocess
import sys
from typing import Callable


def study_parser(name: str, description: str | None, steps: int, output: str) -> argparse.ArgumentParser:
    """Of a study of several seeds, whose runs are kept: a longer one goes on with them."""
    parser = argparse.ArgumentParser(prog=f"./benchmarks/network/{name}", description=description)
    parser.add_argument("--data", default="synthetic", help="cifar10:DIR, imagefolder:DIR or synthetic")
    parser.add_argument("--steps", type=int, default=steps, help="of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="images a worker in each step")
    parser.add_argument("--warm-up", type=int, default=20, help="steps in which the learning rate grows from zero")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path(output), help="directory for the runs and the results")
    parser.add_argument("--report-only", action="store_true", help="train nothing: report on the runs that are there")
    parser.add_argument("--program", help=argparse.SUPPRESS)
    return parser


def recorded(name: str) -> str:
    """The command line as results keep it: without where the program lies and where the results go, which are of one machine."""
    shown = []
    words = iter(sys.argv[1:])
    for word in words:
        if word in ("--program", "--output"):
            next(words, None)
        elif not word.startswith(("--program=", "--output=")):
            shown.append(f'"{word}"' if " " in word else word)
    return " ".join([f"./benchmarks/network/{name}", *shown])


def run(name: str, main: Callable[[], None]) -> None:
    """Runs main; what a user can mend is said in one line, and a termination tidies up as an error does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main()
    except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
        sys.exit(f"benchmarks/network/{name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
