#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Reads a frame as docs/wire-format describes it: the second implementation of these pages, in Python's standard
library alone, for any machine. A frame that is refused ends with status 1 and the page's name for the reason.

    read_frame.py FRAME --model LAYERS          a file with a line a layer: its name, and its shape as 64x3x7x7
    read_frame.py FRAME --model frames.txt:mixed     the model of that name in a table of this directory
"""
from __future__ import annotations

import argparse
import math
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from models import Model, model_named
from xxh3 import xxh3_64

HEADER = struct.Struct("<4sHBBIIQQQQBBHIQ")
CHECKSUM_AT = 56
ALIGNMENT = 64
MAGIC = b"\xf4LAM"
VERSION = 1
ELEMENT_TYPES = {1: "float", 2: "double"}
ELEMENT_BYTES = {"float": 4, "double": 8}
KINDS = {1: "gradients", 2: "parameters", 4: "updates"}
PAYLOAD_TYPES = {0: "as_is", 1: "binary16", 2: "bfloat16", 3: "int8", 4: "int4"}
FLAG_CHECKSUM = 1
FLAG_PART = 2
FLAG_LAST_PART = 4
BLOCK = 64


class FrameError(Exception):
    """A frame that is refused; its text is the page's name for the reason."""


def bytes_before_payload(layers: int, is_part: bool = False) -> int:
    bitmaps = (layers + 7) // 8 * (2 if is_part else 1)
    return (HEADER.size + bitmaps + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def layer_bytes(payload_type: str, element_type: str, elements: int) -> int:
    if payload_type == "as_is":
        return elements * ELEMENT_BYTES[element_type]
    blocks = (elements + BLOCK - 1) // BLOCK
    if payload_type == "int8":
        return blocks + elements
    if payload_type == "int4":
        return blocks + (elements + 1) // 2
    return 2 * elements


def as_float(value: float) -> float:
    """Rounded to binary32."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def scale_of(byte: int) -> float:
    if byte == 0:
        return 0.0
    return math.inf if byte == 255 else 2.0 ** (byte - 127)


def elements_of(payload: bytes, payload_type: str, element_type: str, count: int) -> list[float]:
    if payload_type == "as_is":
        return list(struct.unpack(f"<{count}{'f' if element_type == 'float' else 'd'}", payload))
    if payload_type == "binary16":
        return list(struct.unpack(f"<{count}e", payload))
    if payload_type == "bfloat16":
        halves = struct.unpack(f"<{count}H", payload)
        return list(struct.unpack(f"<{count}f", struct.pack(f"<{count}I", *(half << 16 for half in halves))))
    blocks = (count + BLOCK - 1) // BLOCK
    scales = [scale_of(byte) for byte in payload[:blocks]]
    if payload_type == "int4":
        halves = [half for byte in payload[blocks:] for half in (byte & 15, byte >> 4)][:count]
        integers = [half if half < 8 else half - 16 for half in halves]
    else:
        integers = list(struct.unpack(f"<{count}b", payload[blocks:]))
    products = [float(integer) * scales[i // BLOCK] for i, integer in enumerate(integers)]
    return [as_float(product) for product in products] if element_type == "float" else products


@dataclass(frozen=True)
class Frame:
    kind: str
    element_type: str
    payload_type: str
    has_checksum: bool
    sender: int
    run: int
    step: int
    model: Model
    part: int | None  # of a step; None of a whole frame
    is_last: bool
    present: list[bool]
    decided: list[bool]
    payload: bytes

    def elements(self, layer: int) -> list[float] | None:
        """Those of a layer; None if it is not in the frame."""
        if not self.present[layer]:
            return None
        sizes = [layer_bytes(self.payload_type, self.element_type, n) if here else 0
                 for n, here in zip(self.model.sizes, self.present)]
        begin = sum(sizes[:layer])
        return elements_of(self.payload[begin:begin + sizes[layer]], self.payload_type, self.element_type,
                           self.model.sizes[layer])


def refuse_if(bad: bool, name: str) -> None:
    if bad:
        raise FrameError(name)


def bits_of(bitmap: bytes, model: Model, name: str) -> list[bool]:
    """A bit a layer; bits beyond the last, and those of empty layers, are refused by the name."""
    bits = [bool(bitmap[bit // 8] >> bit % 8 & 1) for bit in range(8 * len(bitmap))]
    refuse_if(any(bits[len(model):]), name)
    refuse_if(any(here and n == 0 for n, here in zip(model.sizes, bits)), name)
    return bits[:len(model)]


def presence_of(bitmaps: bytes, model: Model, is_part: bool, is_last: bool) -> tuple[list[bool], list[bool]]:
    """Which layers are present, and which are decided; the bitmaps come with their padding."""
    size = (len(model) + 7) // 8
    present = bits_of(bitmaps[:size], model, "bad_presence")
    refuse_if(any(bitmaps[size * (2 if is_part else 1):]), "bad_presence")
    if not is_part:
        return present, [True] * len(model)
    decided = bits_of(bitmaps[size:2 * size], model, "bad_decided")
    refuse_if(any(here and not known for here, known in zip(present, decided)), "bad_decided")
    decided = [known or n == 0 for n, known in zip(model.sizes, decided)]
    refuse_if(is_last and not all(decided), "bad_decided")
    return present, decided


def read_frame(data: bytes, model: Model, element_type: str | None = None) -> Frame:
    """Raises FrameError. `element_type` is the reader's own, "float" or "double"; without one, the frame's will do."""
    refuse_if(len(data) < HEADER.size, "truncated")
    (magic, version, element_code, kind, flags, sender, step, fingerprint, layers, payload_bytes, payload_code,
     reserved, part, run, checksum) = HEADER.unpack_from(data)
    refuse_if(magic != MAGIC, "bad_magic")
    refuse_if(version != VERSION, "unsupported_version")
    own_type = ELEMENT_TYPES.get(element_code)
    refuse_if(own_type is None or own_type != (element_type or own_type), "wrong_element_type")
    refuse_if(kind not in KINDS, "unknown_kind")
    refuse_if(payload_code not in PAYLOAD_TYPES, "unknown_payload_type")
    is_part, is_last = bool(flags & FLAG_PART), bool(flags & FLAG_LAST_PART)
    refuse_if(flags & ~(FLAG_CHECKSUM | FLAG_PART | FLAG_LAST_PART) != 0 or reserved != 0, "nonzero_reserved")
    refuse_if(not is_part and (is_last or part != 0), "nonzero_reserved")
    refuse_if(fingerprint != model.fingerprint or layers != len(model), "wrong_layout")

    begin = bytes_before_payload(layers, is_part)
    refuse_if(len(data) < begin, "truncated")
    present, decided = presence_of(data[HEADER.size:begin], model, is_part, is_last)

    payload_type = PAYLOAD_TYPES[payload_code]
    sent = [n for n, here in zip(model.sizes, present) if here]
    refuse_if(payload_bytes != sum(layer_bytes(payload_type, own_type, n) for n in sent), "bad_payload_size")
    refuse_if(any(layer_bytes("as_is", own_type, n) >= 1 << 64 for n in sent), "bad_payload_size")
    refuse_if(len(data) - begin < payload_bytes, "truncated")
    refuse_if(len(data) - begin > payload_bytes, "trailing_bytes")

    expected = xxh3_64(data[:CHECKSUM_AT] + data[HEADER.size:]) if flags & FLAG_CHECKSUM else 0
    refuse_if(checksum != expected, "checksum_mismatch")
    return Frame(KINDS[kind], own_type, payload_type, bool(flags & FLAG_CHECKSUM), sender, run, step, model,
                 part if is_part else None, is_last or not is_part, present, decided, data[begin:])


def print_frame(frame: Frame) -> None:
    print(f"{frame.kind} of step {frame.step}, sender {frame.sender}" + (f", run {frame.run}" if frame.run else ""))
    if frame.part is not None:
        print(f"part {frame.part}" + (", the last" if frame.is_last else ""))
    print(f"elements: {frame.element_type}, written as {frame.payload_type}")
    print(f"checksum: {'holds' if frame.has_checksum else 'none'}")
    print(f"layers: {sum(frame.present)} of {len(frame.model)}, {len(frame.payload)} bytes of payload")
    for layer, name in enumerate(frame.model.names):
        elements = frame.elements(layer)
        if elements is None:
            print(f"  {name}: " + ("held back" if frame.part is None else
                                   "in no part from here on" if frame.decided[layer] else "not decided yet"))
            continue
        first = " ".join(f"{each:g}" for each in elements[:6]) + (" ..." if len(elements) > 6 else "")
        print(f"  {name}: {len(elements)} elements: {first}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frame", type=Path)
    parser.add_argument("--model", required=True, help="LAYERS, or TABLE:NAME")
    parser.add_argument("--elements", choices=tuple(ELEMENT_BYTES), help="the type expected; either without it")
    options = parser.parse_args()
    try:
        print_frame(read_frame(options.frame.read_bytes(), model_named(options.model), options.elements))
    except FrameError as refusal:
        sys.exit(f"{options.frame}: {refusal}")


if __name__ == "__main__":
    main()
