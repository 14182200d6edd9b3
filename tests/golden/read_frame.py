#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Reads a frame as docs/wire-format.md describes it: a second implementation of that page, in Python's standard library alone, for any
machine. A frame that is refused ends with status 1 and the page's name for the reason.

    read_frame.py FRAME --model LAYERS            a file with a line a layer: its name, and its shape as 64x3x7x7
    read_frame.py FRAME --model frames.txt:mixed  the model of that name in a table of this directory
"""
from __future__ import annotations

import argparse
import math
import struct
import sys
from pathlib import Path
from typing import Iterator, NamedTuple

from xxh3 import xxh3_64

HEADER = struct.Struct("<4sHBBIIQQIHBBQIIQ")
CHECKSUM_AT = 56
ELEMENTS = {1: "float", 2: "double"}
ELEMENT_BYTES = {"float": 4, "double": 8}
KINDS = {1: "gradients", 2: "parameters", 4: "updates"}
PAYLOADS = {0: "as_is", 1: "binary16", 2: "bfloat16", 3: "int8", 4: "int4", 5: "ternary"}
HAS_CHECKSUM, IS_LAST = 1, 2


class Layer(NamedTuple):
    name: str
    shape: tuple[int, ...]
    size: int


def layer(name: str, shape: str = "") -> Layer:
    """64x3x7x7; a scalar has none."""
    extents = tuple(int(extent) for extent in shape.split("x")) if shape else ()
    return Layer(name, extents, math.prod(extents))


def fingerprint_of(model: list[Layer]) -> int:
    encoded = [struct.pack("<Q", len(model))]
    for name, shape, _ in model:
        encoded += [struct.pack("<Q", len(name.encode())), name.encode(), struct.pack(f"<{1 + len(shape)}Q", len(shape), *shape)]
    value = 0xCBF29CE484222325
    for byte in b"".join(encoded):
        value = (value ^ byte) * 0x100000001B3 % 2 ** 64
    return value


def lines_of(path: Path) -> Iterator[list[str]]:
    lines = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return (words for words in lines if words and words[0] != "#")


def model_named(text: str) -> list[Layer]:
    """FILE, or TABLE:NAME."""
    if Path(text).is_file():
        return [layer(*words) for words in lines_of(Path(text))]
    path, _, name = text.rpartition(":")
    model: list[Layer] = []
    found = ""
    for words in lines_of(Path(path)):
        if words[0] == "model":
            found = words[1]
        elif found == name and words[0] == "layer":
            model.append(layer(*words[1:]))
        elif found == name and words[0] == "layers":
            model += [layer(f"{words[2]}{index}", words[3]) for index in range(int(words[1]))]
        elif found == name and words[0] == "file":
            model += model_named(str(Path(path).parent / words[1]))
    return model


class Refused(Exception):
    """What is refused; its text is the page's name for the reason."""


def refuse_if(bad: bool, name: str) -> None:
    if bad:
        raise Refused(name)


def bytes_before_payload(layers: int, user: int = 0) -> int:
    return (HEADER.size + (layers + 7) // 8 + user + 63) // 64 * 64


def layer_bytes(payload_type: str, element_type: str, elements: int) -> int:
    blocks = (elements + 63) // 64
    return {"as_is": elements * ELEMENT_BYTES[element_type], "int8": blocks + elements,
            "int4": blocks + (elements + 1) // 2, "ternary": blocks + elements // 64 * 13 + (elements % 64 + 4) // 5}.get(payload_type, 2 * elements)


def as_float(value: float) -> float:
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def elements_of(data: bytes, payload_type: str, element_type: str, count: int) -> list[float]:
    if payload_type == "as_is":
        return list(struct.unpack(f"<{count}{'f' if element_type == 'float' else 'd'}", data))
    if payload_type == "binary16":
        return list(struct.unpack(f"<{count}e", data))
    if payload_type == "bfloat16":
        return [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in struct.unpack(f"<{count}H", data)]
    blocks = (count + 63) // 64
    scales = [0.0 if byte == 0 else math.inf if byte == 255 else 2.0 ** (byte - 127) for byte in data[:blocks]]
    if payload_type == "ternary":
        integers = []
        for begin in range(0, count, 64):
            size = min(64, count - begin)
            stride = (size + 4) // 5
            block = data[blocks + begin // 64 * 13:][:stride]
            packed = struct.unpack(f"<{stride}b", block)
            refuse_if(any(abs(each) > 121 for each in packed), "bad_trits")
            integers += [(packed[i % stride] + 121) // 3 ** (i // stride) % 3 - 1 for i in range(size)]
    elif payload_type == "int8":
        integers = struct.unpack(f"<{count}b", data[blocks:])
    else:
        halves = [half for byte in data[blocks:] for half in (byte & 15, byte >> 4)][:count]
        integers = [half if half < 8 else half - 16 for half in halves]
    products = [float(integer) * scales[i // 64] for i, integer in enumerate(integers)]
    return [as_float(product) for product in products] if element_type == "float" else products


class Frame(NamedTuple):
    kind: str
    element_type: str
    payload_type: str
    has_checksum: bool
    step: int
    sender: int
    run: int
    sequence: int
    is_last: bool
    user: bytes
    layers: list[list[float] | None]  # None of one that was dropped


def read_frame(data: bytes, model: list[Layer], element_type: str | None = None) -> Frame:
    """Raises Refused. `element_type` is the reader's own, "float" or "double"; without one, the frame's will do."""
    refuse_if(len(data) < HEADER.size, "truncated")
    (magic, version, element_code, kind, flags, sender, step, fingerprint, layers, sequence, payload_code, user_bytes,
     payload_bytes, run, reserved, checksum) = HEADER.unpack_from(data)
    refuse_if(magic != b"\xf4LAM", "bad_magic")
    refuse_if(version != 2, "unsupported_version")
    own_type = ELEMENTS.get(element_code)
    refuse_if(own_type is None or own_type != (element_type or own_type), "wrong_element_type")
    refuse_if(kind not in KINDS, "unknown_kind")
    refuse_if(payload_code not in PAYLOADS, "unknown_payload_type")
    refuse_if(flags & ~(HAS_CHECKSUM | IS_LAST) != 0 or user_bytes > 64 or reserved != 0, "nonzero_reserved")
    refuse_if(fingerprint != fingerprint_of(model) or layers != len(model), "wrong_layout")

    begin = bytes_before_payload(layers, user_bytes)
    refuse_if(len(data) < begin, "truncated")
    user_at = HEADER.size + (layers + 7) // 8
    bits = [bool(byte >> bit & 1) for byte in data[HEADER.size:user_at] for bit in range(8)]
    is_sent_empty = any(here and each.size == 0 for each, here in zip(model, bits))
    refuse_if(any(bits[layers:]) or any(data[user_at + user_bytes:begin]) or is_sent_empty, "bad_presence")

    payload_type = PAYLOADS[payload_code]
    sizes = [layer_bytes(payload_type, own_type, each.size) if here else 0 for each, here in zip(model, bits)]
    refuse_if(payload_bytes != sum(sizes), "bad_payload_size")
    refuse_if(len(data) - begin < payload_bytes, "truncated")
    refuse_if(len(data) - begin > payload_bytes, "trailing_bytes")
    expected = xxh3_64(data[:CHECKSUM_AT] + data[HEADER.size:]) if flags & HAS_CHECKSUM else 0
    refuse_if(checksum != expected, "checksum_mismatch")
    elements: list[list[float] | None] = []
    for each, here, size in zip(model, bits, sizes):
        elements.append(elements_of(data[begin:begin + size], payload_type, own_type, each.size) if here else None)
        begin += size
    return Frame(KINDS[kind], own_type, payload_type, bool(flags & HAS_CHECKSUM), step, sender, run, sequence,
                 bool(flags & IS_LAST), data[user_at:user_at + user_bytes], elements)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frame", type=Path)
    parser.add_argument("--model", required=True, help="LAYERS, or TABLE:NAME")
    options = parser.parse_args()
    model = model_named(options.model)
    try:
        frame = read_frame(options.frame.read_bytes(), model)
    except Refused as refusal:
        sys.exit(f"{options.frame}: {refusal}")
    print(f"{frame.kind} of step {frame.step}, sender {frame.sender}, run {frame.run}, frame {frame.sequence}"
          f"{', the last' if frame.is_last else ''}\nelements: {frame.element_type}, written as {frame.payload_type}")
    for each, elements in zip(model, frame.layers):
        print(f"  {each.name}: " + ("dropped" if elements is None else f"{len(elements)} elements: " +
                                    " ".join(f"{value:g}" for value in elements[:6]) + (" ..." if len(elements) > 6 else "")))


if __name__ == "__main__":
    main()
