# SPDX-License-Identifier: MIT
"""Models as text: a file with a line a layer, NAME SHAPE, or those of a table such as frames.txt beside this file."""
from __future__ import annotations

import functools
import math
import struct
from pathlib import Path
from typing import Iterator

Layer = tuple[str, tuple[int, ...]]


class Model:
    """The layers in order, and the fingerprint that docs/wire-format.md gives them."""

    def __init__(self, layers: list[Layer]) -> None:
        self.names = [name for name, _ in layers]
        self.shapes = [shape for _, shape in layers]
        self.sizes = [math.prod(shape) for shape in self.shapes]

    def __len__(self) -> int:
        return len(self.names)

    @functools.cached_property
    def fingerprint(self) -> int:
        def number(value: int) -> bytes:
            return struct.pack("<Q", value)

        pieces = [number(len(self))]
        for name, shape in zip(self.names, self.shapes):
            encoded = name.encode()
            pieces += [number(len(encoded)), encoded, number(len(shape)), *map(number, shape)]
        value = 0xCBF29CE484222325
        for byte in b"".join(pieces):
            value = (value ^ byte) * 0x100000001B3 % 2 ** 64
        return value


def lines_of(path: Path) -> Iterator[list[str]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if words and words[0] != "#":
            yield words


def shape_of(words: list[str]) -> tuple[int, ...]:
    """64x3x7x7; a scalar has none."""
    return tuple(int(extent) for extent in words[0].split("x")) if words else ()


def model_of_file(path: Path) -> list[Layer]:
    return [(words[0], shape_of(words[1:])) for words in lines_of(path)]


def models_of_table(path: Path) -> dict[str, Model]:
    models: dict[str, list[Layer]] = {}
    layers: list[Layer] = []
    for words in lines_of(path):
        if words[0] == "model":
            layers = models.setdefault(words[1], [])
        elif words[0] == "layer":
            layers.append((words[1], shape_of(words[2:])))
        elif words[0] == "layers":
            layers += [(f"{words[2]}{index}", shape_of(words[3:])) for index in range(int(words[1]))]
        elif words[0] == "file":
            layers += model_of_file(path.parent / words[1])
    return {name: Model(layers) for name, layers in models.items()}


def model_named(text: str) -> Model:
    """FILE, or TABLE:NAME."""
    if Path(text).is_file():
        return Model(model_of_file(Path(text)))
    path, _, name = text.rpartition(":")
    return models_of_table(Path(path))[name]
