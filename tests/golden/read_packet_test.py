# SPDX-License-Identifier: MIT
"""The second reader on the golden packets and control messages, and on what becomes of them when they are cut or damaged."""
from __future__ import annotations

import subprocess
import sys
import unittest
from pathlib import Path
from typing import Callable

sys.dont_write_bytecode = True
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from models import lines_of  # noqa: E402
from read_frame import elements_of  # noqa: E402
from read_packet import CONTROL, PACKET, TYPES, PacketError, read_control, read_packet  # noqa: E402
from xxh3 import xxh3_64  # noqa: E402

TABLE = HERE / "packets.txt"
PACKETS = [words[1:] for words in lines_of(TABLE) if words[0] == "packet"]
CONTROLS = [words[1:] for words in lines_of(TABLE) if words[0] == "control"]
# Of the first so many bytes of i * 131 + floor(i / 256) * 7 + 3 modulo 256, with this seed, by xxHash 0.8.1.
SEED = 0x0123456789ABCDEF
HASHES = {
    16: 0x6C15EEA1DAA9123E, 17: 0x00D8A12B6E33D3C6, 128: 0x180B890270F99B9F, 129: 0x3EBD6E509A573802, 240: 0x286FAB7231319030,
    241: 0xD8DA04C4D2AFC13B, 1025: 0x3D582E8F60529B73, 1088: 0x0F8E39B971BE8EF8, 2049: 0xC1B007CEBC0A68CE}


def data_of(file: str) -> bytes:
    return (HERE / "packets" / file).read_bytes()


def elements_by_formula(fragment: int, offset: int, count: int) -> list[float]:
    return [((37 * i + 101 * fragment + 11) % 255 - 127) * 2.0 ** ((fragment + i // 64) % 8 - 4)
            for i in range(offset, offset + count)]


def refusal_of(read: Callable[[bytes, int], object], data: bytes, secret: int) -> str:
    try:
        read(data, secret)
    except PacketError as refusal:
        return str(refusal)
    return ""


class Check(unittest.TestCase):
    def test_every_class_of_lengths(self) -> None:
        data = bytes((i * 131 + (i >> 8) * 7 + 3) % 256 for i in range(max(HASHES)))
        for length, expected in HASHES.items():
            self.assertEqual(xxh3_64(data[:length], SEED), expected, length)


class GoldenPackets(unittest.TestCase):
    def test_every_packet(self) -> None:
        self.assertGreater(len(PACKETS), 5)
        for file, secret, element_type, payload_type, *numbers in PACKETS:
            *expected, count, sent_at = map(int, numbers)
            packet = read_packet(data_of(file), int(secret, 16))
            self.assertEqual([packet.flags, packet.tag, packet.sender, packet.receiver, packet.transfer, packet.fragment, packet.chunk,
                              packet.chunks, packet.transmission, packet.offset, packet.sent_at], [*expected, sent_at], file)
            self.assertEqual(elements_of(packet.data, payload_type, element_type, count),
                             elements_by_formula(packet.fragment, packet.offset, count), file)

    def test_every_control_message(self) -> None:
        self.assertGreater(len(CONTROLS), 4)
        for file, secret, kind, transfer, round_, body in CONTROLS:
            control = read_control(data_of(file), int(secret, 16))
            self.assertEqual((control.type, control.transfer, control.round),
                             (TYPES[int(kind)], int(transfer), int(round_)), file)
            self.assertEqual(control.body, b"" if body == "-" else bytes.fromhex(body), file)

    def test_the_table_names_every_file(self) -> None:
        named = {row[0] for row in PACKETS + CONTROLS}
        self.assertEqual(named, {path.name for path in (HERE / "packets").iterdir()})

    def test_what_is_cut_or_damaged_is_refused(self) -> None:
        for row, read, size in [(PACKETS[1], read_packet, PACKET.size), (CONTROLS[1], read_control, CONTROL.size)]:
            data, secret = data_of(row[0]), int(row[1], 16)
            for length in range(len(data)):
                expected = {"truncated"} if length < size or read is read_control else {"wrong_sizes"}
                self.assertIn(refusal_of(read, data[:length], secret), expected)
            for bit in range(8 * len(data)):
                flipped = bytearray(data)
                flipped[bit // 8] ^= 1 << bit % 8
                self.assertNotEqual(refusal_of(read, bytes(flipped), secret), "", bit)
            self.assertEqual(refusal_of(read, data, secret + 1), "bad_check")


class Program(unittest.TestCase):
    def test_prints_a_packet(self) -> None:
        file, secret = PACKETS[1][:2]
        result = subprocess.run([sys.executable, "-B", HERE / "read_packet.py", HERE / "packets" / file, "--secret", secret],
                                check=True, capture_output=True, text=True)
        self.assertIn("transmission=17, offset=128", result.stdout)

    def test_names_the_refusal(self) -> None:
        result = subprocess.run([sys.executable, "-B", HERE / "read_packet.py", HERE / "packets" / "tick.control",
                                 "--secret", "1"], capture_output=True, text=True)
        self.assertEqual(result.returncode, 1)
        self.assertIn("tick.control: bad_check", result.stderr)


class Page(unittest.TestCase):
    def test_names_of_errors(self) -> None:
        """Every name that the reader gives stands in the page."""
        page = (HERE.parents[1] / "docs" / "bounded-loss-protocol.md").read_text(encoding="utf-8")
        reader = (HERE / "read_packet.py").read_text(encoding="utf-8")
        names = {line.rsplit('"', 2)[1] for line in reader.splitlines() if line.strip().startswith("refuse_if(")}
        self.assertGreater(len(names), 6)
        for name in names:
            self.assertIn(f"`{name}`", page)


if __name__ == "__main__":
    unittest.main()
