#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What the compiler made of the kernels of a step, where there is no GPU: registers, spills, stack and shared memory as ptxas reports
them, and in their SASS atomic operations and loads and stores of 16 bytes. Takes nvcc, c++filt, cuobjdump and nvdisasm, which PyPI has
as nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm, and half a minute for each architecture.

    python3 benchmarks/cuda/count.py [ARCHITECTURE...]      80 90
"""

import collections
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
COLUMNS = ("registers", "spilled bytes", "stack", "shared", "atomic", "LDG.128", "STG.128")


def short(name: str) -> str:
    """Of a demangled kernel, without the namespaces and the launcher."""
    name = re.sub(r"lamina::(v\w+::)?(cuda::)?(detail::)?", "", name)
    name = re.sub(r"^void run_thread_block<(.*)>\(.*\)$", r"\1", name)
    for number, word in enumerate(("gradients", "residuals", "corrected residuals")):
        name = name.replace(f"(reduction_of){number}", word)
    return name


def demangled(text: str) -> str:
    return subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True).stdout


def reported(log: str) -> dict[str, dict[str, int]]:
    """By kernel, what ptxas -v says of it."""
    found = {}
    for part in demangled(log).split("Compiling entry function '")[1:]:
        def number(pattern):
            match = re.search(pattern, part)
            return int(match[1]) if match else 0
        found[short(part.split("' for ")[0])] = {
            "registers": number(r"Used (\d+) registers"), "spilled bytes": number(r"(\d+) bytes spill stores"),
            "stack": number(r"(\d+) bytes stack frame"), "shared": number(r"(\d+) bytes smem")}
    return found


def counted(sass: str) -> dict[str, collections.Counter]:
    """By function, the instructions that are of interest."""
    found, counts = {}, None
    for line in demangled(sass).splitlines():
        if match := re.match(r"\s*Function : (.*)", line):
            counts = found.setdefault(short(match[1]), collections.Counter())
        elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line):
            counts["atomic"] += match[1].startswith(("ATOM", "RED."))
            for wide in ("LDG", "STG"):
                counts[f"{wide}.128"] += match[1].startswith(wide + ".") and ".128" in match[1]
    return found


def main() -> None:
    for tool in ("nvcc", "c++filt", "cuobjdump", "nvdisasm"):
        if shutil.which(tool) is None:
            sys.exit(f"count.py: there is no {tool}")
    for architecture in sys.argv[1:] or ["80", "90"]:
        with tempfile.TemporaryDirectory() as folder:
            cubin = f"{folder}/kernels.cubin"
            build = subprocess.run(
                ["nvcc", "-std=c++20", "--expt-relaxed-constexpr", "-O3", f"-arch=sm_{architecture}", f"-I{ROOT}/cuda", f"-I{ROOT}/include",
                 "-Xptxas", "-v", "-cubin", "-o", cubin, str(ROOT / "benchmarks/cuda/kernels.cu")], capture_output=True, text=True)
            if build.returncode != 0:
                sys.exit(build.stdout + build.stderr)
            sass = subprocess.run(["cuobjdump", "-sass", cubin], capture_output=True, text=True, check=True).stdout
        instructions = counted(sass)
        print(f"sm_{architecture}\n" + "".join(f"{column:>14}" for column in COLUMNS) + "  kernel")
        for name, numbers in sorted(reported(build.stdout + build.stderr).items()):
            if "cub::" in name:  # which Thrust brings for what happens once
                continue
            numbers |= {column: instructions[name][column] for column in COLUMNS[4:]}
            print("".join(f"{numbers[column]:14,}" for column in COLUMNS) + f"  {name}")


main()
