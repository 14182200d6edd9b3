# SPDX-License-Identifier: MIT
"""Prints the results, and writes them as JSON, as a table and as pictures."""

import dataclasses
import json
import pathlib

HEAD = ("", "worker s", "server s", "communication s", "model s", "total s", "up MB", "down MB", "sent up", "sent down",
        "counted up", "counted down")


def _share(counted: int, said: int) -> str:
    """How far the interface's payload is from what the program says."""
    return f"{100 * (counted / said - 1):+.1f} %" if said else ""


def cells_of(result) -> tuple[str, ...]:
    model = "" if result.model_seconds is None else f"{result.model_seconds:.3f}"
    return (result.row, f"{result.worker_seconds:.3f}", f"{result.server_seconds:.3f}",
            f"{result.communication_seconds:.3f}", model, f"{result.total_seconds:.3f}",
            f"{result.bytes_up / 1e6:.1f}", f"{result.bytes_down / 1e6:.1f}", f"{100 * result.sent_up:.2f} %",
            f"{100 * result.sent_down:.2f} %", _share(result.counted_up, result.said_up),
            _share(result.counted_down, result.said_down))


def line_of(result) -> str:
    return "  " + ", ".join(f"{name} {value}" for name, value in zip(HEAD[1:], cells_of(result)[1:]) if value)


def _change(before: float, after: float) -> str:
    return f"{100 * (after / before - 1):+.1f} %"


def table(results: list, paper: dict) -> str:
    lines = []
    groups = dict.fromkeys((result.rate, result.topology) for result in results)
    for rate, topology in groups:
        rows = [result for result in results if (result.rate, result.topology) == (rate, topology)]
        lines += ["", f"### {rate}, {topology}", "", "| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
        dense = next((result for result in rows if result.row.endswith("everything")), None)
        for result in rows:
            lines.append("| " + " | ".join(cells_of(result)) + " |")
            if dense is not None and result is not dense:
                lines.append("| | " + " | ".join([
                    _change(dense.worker_seconds, result.worker_seconds),
                    _change(dense.server_seconds, result.server_seconds),
                    _change(dense.communication_seconds, result.communication_seconds), "",
                    _change(dense.total_seconds, result.total_seconds), "", "", "", "", "", ""]) + " |")
        for kind in ("everything", "dropping"):
            if (rate, topology, kind) in paper:
                worker, server, communication, total = paper[rate, topology, kind]
                lines.append(f"| the paper, {kind} | {worker} | {server} | {communication} | | {total} |" + " |" * 6)
    return "\n".join(lines).strip() + "\n"


def write(directory: pathlib.Path, results: list, environment: dict, paper: dict) -> None:
    (directory / "results.json").write_text(json.dumps(
        {"environment": environment, "results": [dataclasses.asdict(result) for result in results]}, indent=1) + "\n")
    text = table(results, paper)
    (directory / "table.md").write_text(text)
    print("\n" + text)
    print(f"Written to {directory}: results.json, table.md, step.svg")
