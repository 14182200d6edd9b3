# SPDX-License-Identifier: MIT
"""The records of a file of results: of Markdown and text each line, of JSON each object. For page_numbers.py."""

import functools
import json
import pathlib
import re

Record = tuple[str, list[float]]  # the words in it, in its heading and in the keys above it; its numbers


@functools.cache
def of_file(file: pathlib.Path) -> list[Record]:
    """The words above and in each record, and its numbers, in order of size."""
    text = file.read_text(encoding="utf-8")
    found = of_json(json.loads(text), "") if file.suffix == ".json" else of_lines(text)
    return [(words, sorted(map(abs, numbers))) for words, numbers in found if numbers]


def of_lines(text: str) -> list[Record]:
    found: list[Record] = []
    heading = ""
    for line in text.splitlines():
        if line.startswith(("#", "**")):
            heading = line
        if re.match(r"\|\s*\|", line) and found:
            found[-1] = (found[-1][0] + "\n" + line, found[-1][1] + plain_numbers(line))
        else:
            found.append((heading + "\n" + line, plain_numbers(line)))
    return found


def of_json(node: object, above: str) -> list[Record]:
    if isinstance(node, list):
        return [each for part in node for each in of_json(part, above)] if any(isinstance(part, dict) for part in node) \
            else [(above, leaves(node))]
    if not isinstance(node, dict):
        return [(above, leaves(node))]
    own = above + "".join(f" {key}: {part}" for key, part in node.items() if isinstance(part, (str, int, float)))
    found = [(own, plain_numbers(above) + [number for part in node.values() if not isinstance(part, dict) for number in leaves(part)])]
    for key, part in node.items():
        if isinstance(part, dict) or isinstance(part, list) and any(isinstance(each, dict) for each in part):
            found += of_json(part, f"{own} {key}")
    return found


def leaves(node: object) -> list[float]:
    if isinstance(node, list):
        return [number for part in node for number in leaves(part)]
    if isinstance(node, str):
        return plain_numbers(node)
    return [float(node)] if isinstance(node, (int, float)) and not isinstance(node, bool) else []


def plain_numbers(text: str) -> list[float]:
    return [float(each.replace(",", "")) for each in re.findall(r"(?<![\w.])\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?", text)]
