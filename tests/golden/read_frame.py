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
from dataclasses import dataclass
from pathlib import Path

from models import Model, model_named
from xxh3 import xxh3_64

HEADER = struct.Struct("<4sHBBIIQQIHBBQIIQ")
CHECKSUM_AT = 56
ELEMENTS = {1: "float", 2: "double"}
ELEMENT_BYTES = {"float": 4, "double": 8}
KINDS = {1: "gradients", 2: "parameters", 4: "updates"}
PAYLOADS = {0: "as_is", 1: "binary16", 2: "bfloat16", 3: "int8", 4: "int4"}
HAS_CHECKSUM, IS_LAST = 1, 2


class FrameError(Exception):
    """A frame that is refused; its text is the page's name for the reason."""


def refuse_if(bad: bool, name: str) -> None:
    if bad:
        raise FrameError(name)


def bytes_before_payload(layers: int, user: int = 0) -> int:
    return (HEADER.size + (layers + 7) // 8 + user + 63) // 64 * 64


def layer_bytes(payload_type: str, element_type: str, elements: int) -> int:
    blocks = (elements + 63) // 64
    return {"as_is": elements * ELEMENT_BYTES[element_type], "int8": blocks + elements,
            "int4": blocks + (elements + 1) // 2}.get(payload_type, 2 * elements)


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
    if payload_type == "int8":
        integers = struct.unpack(f"<{count}b", data[blocks:])
    else:
        halves = [half for byte in data[blocks:] for half in (byte & 15, byte >> 4)][:count]
        integers = [half if half < 8 else half - 16 for half in halves]
    products = [float(integer) * scales[i // 64] for i, integer in enumerate(integers)]
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
    sequence: int
    is_last: bool
    user: bytes
    model: Model
    present: list[bool]
    payload: bytes

    def elements(self, layer: int) -> list[float] | None:
        """Those of a layer; None if it was dropped."""
        if not self.present[layer]:
            return None
        begin = sum(layer_bytes(self.payload_type, self.element_type, n)
                    for n, here in zip(self.model.sizes[:layer], self.present) if here)
        size = layer_bytes(self.payload_type, self.element_type, self.model.sizes[layer])
        return elements_of(self.payload[begin:begin + size], self.payload_type, self.element_type, self.model.sizes[layer])


def read_frame(data: bytes, model: Model, element_type: str | None = None) -> Frame:
    """Raises FrameError. `element_type` is the reader's own, "float" or "double"; without one, the frame's will do."""
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
    refuse_if(fingerprint != model.fingerprint or layers != len(model), "wrong_layout")

    begin = bytes_before_payload(layers, user_bytes)
    refuse_if(len(data) < begin, "truncated")
    bitmap, padding = (layers + 7) // 8, data[HEADER.size + (layers + 7) // 8 + user_bytes:begin]
    bits = [bool(data[HEADER.size + bit // 8] >> bit % 8 & 1) for bit in range(8 * bitmap)]
    refuse_if(any(bits[layers:]) or any(padding) or any(here and n == 0 for n, here in zip(model.sizes, bits)), "bad_presence")

    payload_type = PAYLOADS[payload_code]
    sent = [n for n, here in zip(model.sizes, bits) if here]
    refuse_if(payload_bytes != sum(layer_bytes(payload_type, own_type, n) for n in sent), "bad_payload_size")
    refuse_if(len(data) - begin < payload_bytes, "truncated")
    refuse_if(len(data) - begin > payload_bytes, "trailing_bytes")
    expected = xxh3_64(data[:CHECKSUM_AT] + data[HEADER.size:]) if flags & HAS_CHECKSUM else 0
    refuse_if(checksum != expected, "checksum_mismatch")
    user = data[HEADER.size + bitmap:HEADER.size + bitmap + user_bytes]
    return Frame(KINDS[kind], own_type, payload_type, bool(flags & HAS_CHECKSUM), sender, run, step, sequence,
                 bool(flags & IS_LAST), user, model, bits[:layers], data[begin:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frame", type=Path)
    parser.add_argument("--model", required=True, help="LAYERS, or TABLE:NAME")
    options = parser.parse_args()
    try:
        frame = read_frame(options.frame.read_bytes(), model_named(options.model))
    except FrameError as refusal:
        sys.exit(f"{options.frame}: {refusal}")
    print(f"{frame.kind} of step {frame.step}, sender {frame.sender}, run {frame.run}, frame {frame.sequence}"
          f"{', the last' if frame.is_last else ''}\nelements: {frame.element_type}, written as {frame.payload_type}\n"
          f"layers: {sum(frame.present)} of {len(frame.model)}, {len(frame.payload)} bytes of payload")
    for layer, name in enumerate(frame.model.names):
        elements = frame.elements(layer)
        print(f"  {name}: " + ("dropped" if elements is None else f"{len(elements)} elements: " +
                               " ".join(f"{each:g}" for each in elements[:6]) + (" ..." if len(elements) > 6 else "")))


if __name__ == "__main__":
    main()
