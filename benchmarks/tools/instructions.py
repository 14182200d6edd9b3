# SPDX-License-Identifier: MIT
"""Instructions an element takes, counted by callgrind: the same on every machine and in every run, unlike times."""

import pathlib
import re
import shutil
import subprocess
import tempfile

ELEMENTS = 1 << 20
SOURCE = """#include <lamina/lamina.hpp>
#include <vector>
constexpr std::size_t elements = %d;
const lamina::layout model({{"layer", {elements}}});
std::vector<float> gradient(elements, 0.5F);
std::vector<float> sum(elements);
lamina::residual_accumulator<float> skips(model, {.non_finite = lamina::non_finite::skip});
lamina::residual_accumulator<float> refuses(model);
extern "C" {
[[gnu::noinline]] void plain_add() {
  for (std::size_t i = 0; i < elements; ++i) sum[i] += gradient[i];
}
[[gnu::noinline]] double skip() { return skips.accumulate(0, gradient); }
[[gnu::noinline]] double refuse() { return refuses.accumulate(0, gradient); }
}
int main() {
  const double before = skips.accumulate(0, gradient) + refuses.accumulate(0, gradient);  // assigns, and is not counted
  plain_add();
  return skip() + refuse() > before && sum[0] > 0 ? 0 : 1;
}
""" % ELEMENTS
FUNCTIONS = ("plain_add", "skip", "refuse")
# Valgrind does not run AVX-512.
INSTRUCTION_SETS = {"sse2": [], "avx2": ["-march=x86-64-v3"]}


def measure(include: pathlib.Path) -> dict[str, dict[str, float]]:
    """By instruction set and function: instructions for each element. Nothing without valgrind."""
    if not shutil.which("valgrind") or not shutil.which("g++"):
        return {}
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        here = pathlib.Path(directory)
        (here / "source.cpp").write_text(SOURCE)
        for name, flags in INSTRUCTION_SETS.items():
            program = here / name
            subprocess.run(["g++", "-std=c++20", "-O3", *flags, f"-I{include}", str(here / "source.cpp"), "-o", str(program)],
                           check=True)
            found[name] = {}
            for function in FUNCTIONS:
                done = subprocess.run(["valgrind", "--tool=callgrind", f"--callgrind-out-file={here / 'out'}",
                                       "--collect-atstart=no", f"--toggle-collect={function}", str(program)],
                                      capture_output=True, text=True, check=True)
                collected = re.search(r"Collected : (\d+)", done.stderr)
                if not collected:
                    raise RuntimeError(f"callgrind gave no count: {done.stderr[-300:]}")
                found[name][function] = int(collected[1]) / ELEMENTS
    return found
