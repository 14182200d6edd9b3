#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Reads a data packet or a control message as docs/bounded-loss-protocol.md describes them: the second implementation of that page's
tables, in Python's standard library alone, for any machine. What is refused ends with status 1 and the page's name for it.

    read_packet.py FILE --secret HEXADECIMAL
"""
from __future__ import annotations

import argparse
import struct
import sys
from pathlib import Path
from typing import NamedTuple

from read_frame import Refused, refuse_if
from xxh3 import xxh3_64

PACKET = struct.Struct("<4sBBBBHHIIIIIQIIQ")
PACKET_CHECK_AT = 48
PACKET_MAGIC = b"\xf4LAP"
CONTROL = struct.Struct("<IBBHIIQ")
CONTROL_CHECK_AT = 16
VERSION = 1
KNOWN_FLAGS = 3
KNOWN_TAGS = 7
TYPES = {1: "HELLO", 2: "BEGIN", 3: "READY", 4: "REPORT", 5: "PROBE", 6: "WANTED", 7: "STOP", 8: "ABORT",
         10: "PING", 11: "PONG", 12: "BYE", 13: "TICK"}


class Packet(NamedTuple):
    flags: int
    tag: int
    sender: int
    receiver: int
    transfer: int
    fragment: int
    chunk: int
    chunks: int
    transmission: int
    offset: int
    sent_at: int
    data: bytes


class Control(NamedTuple):
    type: str
    transfer: int
    round: int
    body: bytes


def read_packet(datagram: bytes, secret: int) -> Packet:
    """Raises Refused. Whether fragment, chunk and sizes are those of a layout is for who knows it."""
    refuse_if(len(datagram) < PACKET.size, "truncated")
    (magic, version, flags, tag, reserved, sender, receiver, transfer, fragment, chunk, chunks, transmission, offset,
     data_bytes, sent_at, check) = PACKET.unpack_from(datagram)
    data = datagram[PACKET.size:]
    refuse_if(magic != PACKET_MAGIC, "bad_magic")
    refuse_if(version != VERSION, "unsupported_version")
    refuse_if(flags & ~KNOWN_FLAGS != 0 or tag & ~KNOWN_TAGS != 0 or reserved != 0, "nonzero_reserved")
    refuse_if(data_bytes != len(data), "wrong_sizes")
    refuse_if(check != xxh3_64(datagram[:PACKET_CHECK_AT] + data, secret), "bad_check")
    return Packet(flags, tag, sender, receiver, transfer, fragment, chunk, chunks, transmission, offset, sent_at, data)


def read_control(message: bytes, secret: int) -> Control:
    """Raises Refused."""
    refuse_if(len(message) < CONTROL.size, "truncated")
    body_bytes, kind, version, reserved, transfer, round_, check = CONTROL.unpack_from(message)
    body = message[CONTROL.size:]
    refuse_if(version != VERSION, "unsupported_version")
    refuse_if(reserved != 0, "nonzero_reserved")
    refuse_if(kind not in TYPES, "unknown_type")
    refuse_if(len(body) < body_bytes, "truncated")
    refuse_if(len(body) > body_bytes, "wrong_length")
    refuse_if(check != xxh3_64(message[:CONTROL_CHECK_AT] + body, secret), "bad_check")
    return Control(TYPES[kind], transfer, round_, body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--secret", required=True, type=lambda text: int(text, 16))
    options = parser.parse_args()
    try:
        data = options.file.read_bytes()
        print((read_packet if data[:4] == PACKET_MAGIC else read_control)(data, options.secret))
    except Refused as refusal:
        sys.exit(f"{options.file}: {refusal}")


if __name__ == "__main__":
    main()
