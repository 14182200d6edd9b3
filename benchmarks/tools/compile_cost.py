# SPDX-License-Identifier: MIT
"""What including the library costs: seconds to compile, and bytes in the program."""

import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import tempfile

from ratios import Ratio

MOST_OF_INCLUDES = 2.8  # for lamina.hpp beyond <vector> and <string>, in the time that those take: 0.7 s where they take 0.25 s

WORKER = """#include <lamina/lamina.hpp>
std::size_t step(lamina::worker<float>& worker, const std::vector<std::vector<float>>& gradients) {
  auto step = worker.add(gradients);
  const std::size_t bytes = step.frame().size_bytes();
  step.commit();
  return bytes;
}
"""
SERVER = """#include <lamina/lamina.hpp>
std::size_t step(lamina::server<float>& server, std::vector<std::byte> bytes, std::vector<std::vector<float>>& parameters) {
  if (server.add(std::move(bytes))) return 0;
  server.update([&](std::size_t layer, std::size_t begin, std::span<const float> mean) {
    for (const float each : mean) parameters[layer][begin++] -= each;
  });
  return server.reply(0, parameters).size_bytes();
}
"""
SOURCES = {
    "an empty file": "",
    "vector, string": "#include <string>\n#include <vector>\n",
    "lamina.hpp": "#include <lamina/lamina.hpp>\n",
    "a worker's step": WORKER,
    "a server's step": SERVER,
}


def measure(include: pathlib.Path, runs: int) -> dict[str, dict[str, dict[str, float]]]:
    """By compiler and source: seconds of processor time (user and system, so that other work on the machine counts little)
    with -std=c++20 -O2, as the median of `runs` runs that take turns; and the object's bytes of code and data."""
    environment = dict(os.environ, CCACHE_DISABLE="1")
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        source, target = pathlib.Path(directory) / "source.cpp", pathlib.Path(directory) / "source.o"
        for compiler in filter(shutil.which, ("g++", "clang++")):
            command = [compiler, "-std=c++20", "-O2", f"-I{include}", "-c", str(source), "-o", str(target)]
            taken: dict[str, list[float]] = {name: [] for name in SOURCES}
            size = {}
            for number in range(runs + 1):
                for name, text in SOURCES.items():
                    source.write_text(text)
                    seconds = _processor_seconds(command, environment)
                    if number == 0:  # fills the file cache
                        size[name] = _object_bytes(target)
                    else:
                        taken[name].append(seconds)
            found[compiler] = {name: {"seconds": statistics.median(taken[name]), "bytes": size[name], "runs": taken[name]}
                               for name in SOURCES}
    if not found:
        raise RuntimeError("neither g++ nor clang++ was found")
    return found


def surplus(measured: dict) -> list[Ratio]:
    """What lamina.hpp costs beyond <vector> and <string>, over what those cost, for each compiler, against its limit: of the
    runs, which take turns, the median, the least and the most. Seconds alone say more of the machine: one and the same
    machine took 0.6 and 1.3 s for the same file within ten minutes."""
    found = []
    for compiler, sources in measured.items():
        runs = [whole / part - 1 for whole, part in zip(sources["lamina.hpp"]["runs"], sources["vector, string"]["runs"])]
        found.append(Ratio(f"include_over_std/{compiler}", statistics.median(runs), min(runs), max(runs), MOST_OF_INCLUDES))
    return found


def _processor_seconds(command: list[str], environment: dict) -> float:
    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = used()
    subprocess.run(command, check=True, env=environment)
    return used() - before


def _object_bytes(target: pathlib.Path) -> int:
    done = subprocess.run(["size", str(target)], check=True, capture_output=True, text=True)
    text, data, bss = map(int, done.stdout.splitlines()[1].split()[:3])
    return text + data + bss
