# SPDX-License-Identifier: MIT
"""The second readers on the golden frames, and on the golden packets and control messages: readers_test.py Frames|Packets."""
from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Callable, Iterator

sys.dont_write_bytecode = True
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from read_frame import Refused, elements_of, fingerprint_of, lines_of, model_named, read_frame  # noqa: E402
from read_packet import PACKET, TYPES, read_control, read_packet  # noqa: E402
from xxh3 import xxh3_64  # noqa: E402

TABLE = HERE / "frames.txt"
# Of the first so many bytes of i * 131 + floor(i / 256) * 7 + 3 modulo 256, with this seed, by xxHash 0.8.1: every class of lengths.
SEED = 0x0123456789ABCDEF
HASHES = {
    16: 0x6C15EEA1DAA9123E, 17: 0x00D8A12B6E33D3C6, 128: 0x180B890270F99B9F, 129: 0x3EBD6E509A573802, 240: 0x286FAB7231319030,
    241: 0xD8DA04C4D2AFC13B, 1025: 0x3D582E8F60529B73, 1088: 0x0F8E39B971BE8EF8, 2049: 0xC1B007CEBC0A68CE}


def by_formula(layer: int, begin: int, count: int, most: int = 127) -> list[float]:
    if most == 1:
        return [(0 if i % 64 % 3 == 0 else 1 - (i + layer) % 2 * 2) * 2.0 ** ((layer + i // 64) % 8 - 4) for i in range(begin, begin + count)]
    return [((37 * i + 101 * layer + 11) % (2 * most + 1) - most) * 2.0 ** ((layer + i // 64) % 8 - 4) for i in range(begin, begin + count)]


def bits(values: list[float]) -> bytes:
    """Tells zeros of both signs apart, and no NaN from another."""
    return b"".join(struct.pack("<d", math.nan if math.isnan(value) else value) for value in values)


class Readers(unittest.TestCase):
    def check_damage(self, data: bytes, refused_as: Callable[[bytes], str]) -> None:
        """Cut anywhere, or with any bit flipped, data with a checksum is refused."""
        self.assertEqual(refused_as(data), "")
        for length in range(len(data)):
            self.assertIn(refused_as(data[:length]), ("truncated", "wrong_sizes"), length)
        for bit in range(8 * len(data)):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            self.assertNotEqual(refused_as(bytes(flipped)), "", bit)

    def run_on(self, program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        # An emulated Python cannot start itself.
        python = os.environ.get("LAMINA_PYTHON", f"{sys.executable} -B").split()
        return subprocess.run([*python, str(HERE / program), *map(str, arguments)], capture_output=True, text=True, check=False)

    def check_page(self, page: str, program: str) -> None:
        """Every name that the reader gives stands in the page."""
        lines = (HERE / program).read_text(encoding="utf-8").splitlines()
        names = {line.rsplit('"', 2)[1] for line in lines if line.strip().startswith("refuse_if(")}
        self.assertGreater(len(names), 6)
        text = (HERE.parents[1] / "docs" / page).read_text(encoding="utf-8")
        self.assertEqual([name for name in names if f"`{name}`" not in text], [])


def refusal_of(read: Callable[[], object]) -> str:
    try:
        read()
    except Refused as refusal:
        return str(refusal)
    return ""


class Frames(Readers):
    def test_every_frame(self) -> None:
        count = 0
        for words in lines_of(TABLE):
            if words[0] != "frame":
                continue
            count += 1
            file, name, *says = words[1:] + ["0", "0", "last", "-"][len(words) - 12:]
            kind, element_type, payload_type, checksum, step, sender, present, size, fingerprint, run, sequence, place, user = says
            model, data = model_named(f"{TABLE}:{name}"), (HERE / "frames" / file).read_bytes()
            self.assertEqual((len(data), fingerprint_of(model)), (int(size), int(fingerprint, 16)), file)
            *found, layers = read_frame(data, model, element_type)
            self.assertEqual(found, [kind, element_type, payload_type, checksum == "xxh3", int(step), int(sender), int(run), int(sequence),
                                     place == "last", bytes.fromhex(user.strip("-"))], file)
            sent = range(len(model)) if present == "all" else [int(index) for index in present.split(",") if present != "none"]
            most = {"int4": 7, "ternary": 1}.get(payload_type, 127)
            expected = [by_formula(layer, 0, each.size, most) if layer in sent and each.size > 0 else None for layer, each in enumerate(model)]
            self.assertEqual(layers, expected, file)
        self.assertGreater(count, 40)

    def test_the_table_names_every_file_and_every_kind_with_every_type(self) -> None:
        lines = list(lines_of(TABLE))
        named = {words[1] for words in lines if words[0] in ("frame", "special")}
        self.assertEqual(named, {path.name for path in (HERE / "frames").iterdir()})
        combinations = {tuple(words[3:6]) for words in lines if words[0] == "frame" and words[6] == "xxh3"}
        self.assertEqual(len(combinations), 3 * 2 * 5 + 2 * 2)  # no parameters are ternary

    def test_what_no_writer_writes(self) -> None:
        lines = list(lines_of(TABLE))
        specials = [number for number, words in enumerate(lines) if words[0] == "special"]
        self.assertEqual(len(specials), 12)
        for number in specials:
            (_, file, element_type, payload_type, _), written, means = lines[number:number + 3]
            data = (HERE / "frames" / file).read_bytes()
            self.assertEqual(data[128:], b"".join(bytes.fromhex(word)[::-1] for word in written[1:]), file)
            frame = read_frame(data, model_named(f"{TABLE}:special"), element_type)
            self.assertEqual(frame.payload_type, payload_type, file)
            numbers = [float.fromhex(word) if "0x" in word else float(word) for word in means[1:]]
            self.assertEqual(bits([element for layer in frame.layers for element in layer or []]), bits(numbers), file)

    def test_what_is_cut_damaged_or_of_another_model_is_refused(self) -> None:
        data = (HERE / "frames" / "mixed_gradients_float_int8_some.lamina").read_bytes()
        mixed, nine = (model_named(f"{TABLE}:{name}") for name in ("mixed", "nine"))
        self.check_damage(data, lambda damaged: refusal_of(lambda: read_frame(damaged, mixed, "float")))
        for given, model, element_type, name in ((data + b"\0", mixed, None, "trailing_bytes"), (data, nine, None, "wrong_layout"),
                                                 (data, mixed, "double", "wrong_element_type")):
            self.assertEqual(refusal_of(lambda: read_frame(given, model, element_type)), name)

    def test_the_command(self) -> None:
        file = HERE / "frames" / "nine_parameters_float_binary16_some.lamina"
        result = self.run_on("read_frame.py", file, "--model", f"{TABLE}:nine")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn(", sender 0, run 0, frame 0, the last\nelements: float, written as binary16\n  layer0: dropped\n", result.stdout)
        self.assertIn(f"  layer8: 3 elements: {' '.join(f'{each:g}' for each in by_formula(8, 0, 3))}\n", result.stdout)
        result = self.run_on("read_frame.py", TABLE, "--model", HERE.parents[1] / "benchmarks" / "models" / "resnet50.txt")
        self.assertEqual((result.returncode, result.stderr), (1, f"{TABLE}: bad_magic\n"))
        self.check_page("wire-format.md", "read_frame.py")


class Packets(Readers):
    @staticmethod
    def rows(kind: str) -> Iterator[tuple[bytes, int, list[str]]]:
        for words in lines_of(HERE / "packets.txt"):
            if words[0] == kind:
                yield (HERE / "packets" / words[1]).read_bytes(), int(words[2], 16), words[3:]

    def test_the_checksum(self) -> None:
        data = bytes((i * 131 + (i >> 8) * 7 + 3) % 256 for i in range(max(HASHES)))
        for length, expected in HASHES.items():
            self.assertEqual(xxh3_64(data[:length], SEED), expected, length)

    def test_every_packet(self) -> None:
        for data, secret, (element_type, payload_type, *numbers) in self.rows("packet"):
            *expected, count, sent_at = map(int, numbers)
            *fields, payload = read_packet(data, secret)
            self.assertEqual(fields, [*expected, sent_at])
            self.assertEqual(elements_of(payload, payload_type, element_type, count), by_formula(expected[5], expected[9], count))

    def test_every_control_message(self) -> None:
        for data, secret, (kind, transfer, round_, body) in self.rows("control"):
            self.assertEqual(read_control(data, secret), (TYPES[int(kind)], int(transfer), int(round_), bytes.fromhex(body.strip("-"))))

    def test_the_table_names_every_file(self) -> None:
        named = {words[1] for words in lines_of(HERE / "packets.txt")}
        self.assertEqual(named, {path.name for path in (HERE / "packets").iterdir()})
        self.assertEqual(len(named), 12)

    def test_what_is_cut_or_damaged_is_refused(self) -> None:
        for kind, read in (("packet", read_packet), ("control", read_control)):
            data, secret, _ = list(self.rows(kind))[1]
            self.check_damage(data, lambda damaged: refusal_of(lambda: read(damaged, secret)))
            self.assertEqual(refusal_of(lambda: read(data, secret + 1)), "bad_check")
            if kind == "packet":
                self.assertEqual(refusal_of(lambda: read(data[:PACKET.size], secret)), "wrong_sizes")

    def test_the_command(self) -> None:
        result = self.run_on("read_packet.py", HERE / "packets" / "short.packet", "--secret", "0123456789abcdef")
        self.assertIn("transmission=17, offset=128", result.stdout)
        result = self.run_on("read_packet.py", HERE / "packets" / "tick.control", "--secret", "1")
        self.assertEqual(result.returncode, 1)
        self.assertIn("tick.control: bad_check", result.stderr)
        self.check_page("bounded-loss-protocol.md", "read_packet.py")


if __name__ == "__main__":
    unittest.main()
