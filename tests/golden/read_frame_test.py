# SPDX-License-Identifier: MIT
"""The second reader on the golden frames and on what becomes of them when they are cut or damaged."""
from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Iterator, NamedTuple

sys.dont_write_bytecode = True
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from models import lines_of, models_of_table  # noqa: E402
from read_frame import FrameError, bytes_before_payload, layer_bytes, read_frame  # noqa: E402
from xxh3 import xxh3_64  # noqa: E402

TABLE = HERE / "frames.txt"
MODELS = models_of_table(TABLE)
# Of the first so many bytes of i * 131 + floor(i / 256) * 7 + 3 modulo 256, by xxHash 0.8.1: every class of lengths.
HASHES = {
    9: 0xD6FDE0887A1893CA, 16: 0xCA4738193200D5BF, 17: 0x02EC68113D62488B, 64: 0x37D7807C33E74A3C, 128: 0xA67AE43AEC758836,
    129: 0xFB628A6571944E54, 240: 0x2408051B9D580275, 241: 0xEF630BB6BB6CFE02, 257: 0x80E9D6D3C637BC5C, 1024: 0x46703F18D0B7ABC5,
    1025: 0x178C11EF15CB206E, 1088: 0x5AE094D2D2EFB3DB, 2049: 0xB1DC89FA1CB577DD, 19149: 0x86847B9BD4845FC4}


class Row(NamedTuple):
    """A line "frame"."""

    file: str
    model: str
    says: tuple[object, ...]  # kind, elements, payload, whether it has a checksum, step, sender, run, sequence, is_last, user
    present: list[bool]
    size: int
    fingerprint: int


def rows() -> Iterator[Row]:
    for words in lines_of(TABLE):
        if words[0] == "frame":
            w = words[1:] + ["0", "0", "last", "-"][len(words) - 12:]
            says = (*w[2:5], w[5] == "xxh3", int(w[6]), int(w[7]), int(w[11]), int(w[12]), w[13] == "last", bytes.fromhex(w[14].strip("-")))
            yield Row(w[0], w[1], says, presence(w[8], w[1]), int(w[9]), int(w[10], 16))


def presence(text: str, model: str) -> list[bool]:
    if text == "all":
        return [size > 0 for size in MODELS[model].sizes]
    indices = set() if text == "none" else {int(index) for index in text.split(",")}
    return [layer in indices for layer in range(len(MODELS[model]))]


def data_of(file: str) -> bytes:
    return (HERE / "frames" / file).read_bytes()


def elements_by_formula(layer: int, count: int, payload_type: str) -> list[float]:
    most = 7 if payload_type == "int4" else 127
    return [((37 * i + 101 * layer + 11) % (2 * most + 1) - most) * 2.0 ** ((layer + i // 64) % 8 - 4) for i in range(count)]


def number_of(word: str) -> float:
    return float.fromhex(word) if "0x" in word else float(word)


def bits(values: list[float]) -> bytes:
    """Tells zeros of both signs apart, and no NaN from another."""
    return b"".join(struct.pack("<d", math.nan if math.isnan(value) else value) for value in values)


def name_of_refusal(data: bytes, row: Row) -> str:
    """The name for which the frame is refused, empty if it is not."""
    try:
        read_frame(data, MODELS[row.model], row.says[1])
    except FrameError as refusal:
        return str(refusal)
    return ""


def flipped(data: bytes) -> Iterator[tuple[int, bytes]]:
    damaged = bytearray(data)
    for bit in range(8 * len(data)):
        damaged[bit // 8] ^= 1 << bit % 8
        yield bit, bytes(damaged)
        damaged[bit // 8] ^= 1 << bit % 8


def names_for(bit: int, payload_at: int, has_checksum: bool) -> set[str]:
    """The names of which one refuses a whole frame, with layers in it, that has this bit flipped; "" if it may be read."""
    only_checksum = "checksum_mismatch" if has_checksum else ""
    if bit == 65:
        return {only_checksum}  # it is not the last of its step
    # User bytes that are claimed lie in the padding, or would make the frame longer.
    fields = [(4, "bad_magic"), (6, "unsupported_version"), (7, "wrong_element_type"), (8, "unknown_kind"),
              (12, "checksum_mismatch" if bit == 64 else "nonzero_reserved"), (24, only_checksum),
              (36, "wrong_layout"), (38, only_checksum), (39, "unknown_payload_type|bad_payload_size"),
              (40, f"{only_checksum}|nonzero_reserved|truncated|bad_presence|bad_payload_size"), (48, "bad_payload_size"), (52, only_checksum),
              (56, "nonzero_reserved"), (64, "checksum_mismatch"), (payload_at, "bad_presence|bad_payload_size")]
    for end, names in fields:
        if bit // 8 < end:
            return set(names.split("|"))
    return {only_checksum}


class Checksum(unittest.TestCase):
    def test_every_class_of_lengths(self) -> None:
        data = bytes((i * 131 + (i >> 8) * 7 + 3) % 256 for i in range(max(HASHES)))
        for length, expected in HASHES.items():
            self.assertEqual(hex(xxh3_64(data[:length])), hex(expected), length)


class GoldenFrames(unittest.TestCase):
    def test_every_frame(self) -> None:
        self.assertGreater(len(list(rows())), 40)
        for row in rows():
            data = data_of(row.file)
            self.assertEqual((len(data), MODELS[row.model].fingerprint), (row.size, row.fingerprint), row.file)
            frame = read_frame(data, MODELS[row.model], row.says[1])
            self.assertEqual((frame.kind, frame.element_type, frame.payload_type, frame.has_checksum, frame.step, frame.sender, frame.run,
                              frame.sequence, frame.is_last, frame.user), row.says, row.file)
            for layer, size in enumerate(frame.model.sizes):
                expected = elements_by_formula(layer, size, frame.payload_type) if row.present[layer] else None
                self.assertEqual(frame.elements(layer), expected, (row.file, layer))

    def test_what_no_writer_writes(self) -> None:
        lines = list(lines_of(TABLE))
        specials = [number for number, words in enumerate(lines) if words[0] == "special"]
        self.assertEqual(len(specials), 10)
        for number in specials:
            (_, file, element_type, payload_type, size), written, means = lines[number:number + 3]
            data = data_of(file)
            self.assertEqual(len(data), int(size), file)
            payload = b"".join(bytes.fromhex(word)[::-1] for word in written[1:])
            self.assertEqual(data[128:], payload, file)
            frame = read_frame(data, MODELS["special"], element_type)
            self.assertEqual(frame.payload_type, payload_type, file)
            read = [element for layer in range(8) for element in frame.elements(layer)]
            self.assertEqual(bits(read), bits([number_of(word) for word in means[1:]]), file)

    def test_sizes_of_larger_models(self) -> None:
        sizes = [words[1:] for words in lines_of(TABLE) if words[0] == "size"]
        self.assertGreater(len(sizes), 10)
        for name, element_type, payload_type, present, before_payload, size, fingerprint in sizes:
            model = MODELS[name]
            payload = sum(layer_bytes(payload_type, element_type, n) for n in model.sizes if present == "all")
            self.assertEqual(bytes_before_payload(len(model)), int(before_payload), name)
            self.assertEqual(bytes_before_payload(len(model)) + payload, int(size), name)
            self.assertEqual(model.fingerprint, int(fingerprint, 16), name)


class Damage(unittest.TestCase):
    def test_every_truncation(self) -> None:
        for row in rows():
            data = data_of(row.file)
            for length in range(len(data)):
                self.assertEqual(name_of_refusal(data[:length], row), "truncated", (row.file, length))

    def test_trailing_bytes(self) -> None:
        for row in rows():
            for more in (1, 64):
                self.assertEqual(name_of_refusal(data_of(row.file) + bytes(more), row), "trailing_bytes", row.file)

    def test_every_flipped_bit(self) -> None:
        """One frame of each payload type with a checksum, and without."""
        chosen = [row for row in rows() if row.file.startswith("mixed_gradients_float") and "_some" in row.file]
        self.assertEqual(len({row.says[2:4] for row in chosen}), 10)
        for row in chosen:
            payload_at = bytes_before_payload(len(MODELS[row.model]))
            for bit, damaged in flipped(data_of(row.file)):
                name = name_of_refusal(damaged, row)
                if name not in names_for(bit, payload_at, row.says[3]):
                    self.fail(f"{row.file}, bit {bit}: {name or 'read'}")

    def test_of_another_model_or_type(self) -> None:
        row = next(rows())
        for model, element_type, name in ((MODELS["nine"], None, "wrong_layout"), (MODELS[row.model], "double", "wrong_element_type")):
            with self.assertRaisesRegex(FrameError, f"^{name}$"):
                read_frame(data_of(row.file), model, element_type)


class Command(unittest.TestCase):
    def run_on(self, file: Path, model: str) -> subprocess.CompletedProcess[str]:
        # An emulated Python cannot start itself.
        python = os.environ.get("LAMINA_PYTHON", f"{sys.executable} -B").split()
        command = [*python, str(HERE / "read_frame.py"), str(file), "--model", model]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def test_prints_fields_and_layers(self) -> None:
        file = HERE / "frames" / "nine_parameters_float_binary16_some.lamina"
        result = self.run_on(file, f"{TABLE}:nine")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn(", sender 0, run 0, frame 0, the last\nelements: float, written as binary16\n"
                      "layers: 2 of 9, 12 bytes of payload\n  layer0: dropped\n", result.stdout)
        first = " ".join(f"{element:g}" for element in elements_by_formula(8, 3, "int8"))
        self.assertIn(f"  layer8: 3 elements: {first}\n", result.stdout)

    def test_names_the_refusal(self) -> None:
        result = self.run_on(TABLE, str(HERE.parents[1] / "benchmarks" / "models" / "resnet50.txt"))
        self.assertEqual(result.returncode, 1)
        self.assertEqual(result.stderr, f"{TABLE}: bad_magic\n")


class Page(unittest.TestCase):
    def test_names_of_errors(self) -> None:
        """Every name that the reader gives stands in the page."""
        page = (HERE.parents[1] / "docs/wire-format.md").read_text(encoding="utf-8")
        reader = (HERE / "read_frame.py").read_text(encoding="utf-8")
        refusing = [line for line in reader.splitlines() if "refuse_if(" in line or "bits_of(" in line]
        names = {line.rsplit('"', 2)[1] for line in refusing if '"' in line}
        self.assertGreater(len(names), 10)
        for name in names:
            self.assertIn(f"`{name}`", page)


if __name__ == "__main__":
    unittest.main()
