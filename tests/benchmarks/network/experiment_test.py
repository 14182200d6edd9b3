#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The experiment of benchmarks/network, small: experiment_test.py PROGRAM. Ends with 77 where there can be no cluster."""

import json
import pathlib
import subprocess
import sys
import tempfile

from here import NETWORK, python_with_matplotlib, require, skip_without_clusters


def main() -> None:
    skip_without_clusters()
    with tempfile.TemporaryDirectory() as directory:
        output = pathlib.Path(directory)
        words = [python_with_matplotlib(), str(NETWORK / "experiment.py"), "--program", sys.argv[1], "--output", directory,
                 "--rates", "1 Gb/s", "--topologies", "first", "--rows", "nodes, R = 0.95",
                 "flat, R = 0.95, udp, p = 0.1", "--steps", "5", "--recorded-steps", "6"]
        kept = json.dumps({"runs": [{"commit": "abc", "segments": "packets"}], "results": []})
        (output / "results.json").write_text(kept)
        refused = subprocess.run(words, capture_output=True, text=True)
        require(refused.returncode != 0 and "give another --output" in refused.stderr, f"mixes other links: {refused.stderr}")
        require((output / "results.json").read_text() == kept, "what was refused has changed the results")
        (output / "results.json").unlink()
        done = subprocess.run(words, capture_output=True, text=True)
        require(done.returncode == 0, done.stderr)
        written = json.loads((output / "results.json").read_text())
        require(written["runs"][0]["segments"] == "offloaded", f"does not say over which links: {written['runs']}")
        result, packets = written["results"]
        require(result["worker_seconds"] >= 0.388 and result["server_seconds"] >= 0.073, f"too quick: {result}")
        require(0 < result["node_seconds"] < result["communication_seconds"], f"the node's share is none: {result}")
        require(0.03 < result["sent_up"] < 0.5, f"layers are not dropped: {result}")
        # The model goes down once and little more: what the interface counted is what the program said.
        for way in ("up", "down"):
            off = result[f"counted_{way}"] / result[f"said_{way}"] - 1
            require(abs(off) < 0.03, f"{way}: the interface and the program are {100 * off:.1f} % apart")
        # Of the gradients the smallest tenth is left out, and each packet has a header of its own.
        up, down = (packets[f"counted_{way}"] / packets[f"said_{way}"] - 1 for way in ("up", "down"))
        require(-0.1 < up < 0.0 < down < 0.1, f"over UDP the interface counts {100 * up:+.1f} % and {100 * down:+.1f} %")
        require("| nodes, R = 0.95 |" in (output / "table.md").read_text(), "the table lacks the row")
        require((output / "step.svg").stat().st_size > 1000, "no picture")


main()
