# SPDX-License-Identifier: MIT
"""What lamina.torch needs of lamina._core where that was not built (LAMINA_PURE=1): the layout of a model, and which fragments a step
sends. Decisions are bitwise those of the extension, whose names and errors these are, and saved states are read by either. A decision
takes some microseconds a fragment."""

import array
import functools
import importlib.metadata
import itertools
import math
import struct
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

version = importlib.metadata.version("lamina")

_BLOCK = 4096  # elements; fragments have whole ones, but for a layer's last
_INVALID = -1.0  # the threshold where the elements never exceed what is to be dropped: everything is sent
_STATE = struct.Struct("<IHBBQQQQddQ")  # the header of lamina/state.hpp
_MAGIC, _VERSION, _FLOAT32 = 0x534D4CF5, 1, 1
_CHECKSUM, _VELOCITY, _EXPECTED = 1, 2, 4


class DecodeError(ValueError):
    """Bytes that are not a state of this model: damaged, cut short, or of another model."""


class Layout:
    """Names and shapes of a model's layers, in order."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self.names, self.shapes = list(shapes), [list(shape) for shape in shapes.values()]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.elements = sum(self.sizes)
        if "" in shapes:
            raise ValueError(f"layer {self.names.index('')} has an empty name")

    def __len__(self) -> int:
        return len(self.names)

    @functools.cached_property
    def fingerprint(self) -> int:
        parts = [struct.pack("<Q", len(self))]
        for name, shape in zip(self.names, self.shapes):
            said = name.encode()
            parts += [struct.pack("<Q", len(said)), said, struct.pack(f"<{len(shape) + 1}Q", len(shape), *shape)]
        hashed = 0xCBF29CE484222325
        for byte in b"".join(parts):  # FNV-1a
            hashed = (hashed ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
        return hashed


def _cut(layout: Layout, most: int) -> Tuple[Layout, List[int]]:
    """The fragments, and the first one of each layer, and of one after the last."""
    if most % _BLOCK:
        raise ValueError(f"fragment_elements must be a multiple of {_BLOCK}, got {most}")
    brackets = 1
    for name in layout.names:
        while name.endswith("]" * brackets) and "[" * brackets in name:
            brackets += 1
    fragments: Dict[str, List[int]] = {}
    first: List[int] = []
    for name, shape, size in zip(layout.names, layout.shapes, layout.sizes):
        first.append(len(fragments))
        if most == 0 or size <= most:
            fragments[name] = shape
            continue
        for number, begin in enumerate(range(0, size, most)):
            fragments[f"{name}{'[' * brackets}{number}{']' * brackets}"] = [min(most, size - begin)]
    return Layout(fragments), [*first, len(fragments)]


class Selector:
    """The decision of a step: values in, fragments out."""

    def __init__(self, layout: Layout, *, drop_ratio: float = 0.95, warm_up_steps: int = 0, search_every: int = 1,
                 send_budget: Optional[float] = None, at_least_every: int = 0, by_score: bool = False, fragment_elements: int = 0,
                 momentum: float = 0.0) -> None:
        if not 0 <= drop_ratio <= 1:
            raise ValueError(f"drop ratio must lie in [0, 1], got {drop_ratio:g}")
        if search_every == 0:
            raise ValueError("search_every must be at least 1 step")
        if send_budget is not None and not 0 < send_budget <= 1:
            raise ValueError(f"send_budget must lie in (0, 1], got {send_budget:g}")
        self.fragments, self._first = _cut(layout, fragment_elements)
        self._sizes = self.fragments.sizes
        self._drop_ratio, self._warm_up_steps, self._search_every = drop_ratio, warm_up_steps, search_every
        self._send_budget, self._at_least_every, self._by_score, self._has_momentum = send_budget, at_least_every, by_score, momentum > 0
        self.threshold, self._allowance = _INVALID, 0.0
        self._before = (0, 0.0, 0.0)  # the step that was decided last, with threshold and allowance as they were before it
        self._sent_in, self._sent = [0] * len(self._sizes), [False] * len(self._sizes)

    def fragments_of(self, layer: int) -> Tuple[int, int]:
        return self._first[layer], self._first[layer + 1]

    # --- a step ---

    def decide(self, step: int, values: Any, held: Optional[bytes] = None) -> List[int]:
        self._begin(step)
        scores = [math.inf if value != value else value for value in _numbers(values, "d")]
        if len(scores) != len(self._sizes) or held is not None and len(held) != len(scores):
            raise ValueError(f"select: {len(scores)} values for {len(self._sizes)} fragments")
        if self._by_score:
            scores = [score * (step - sent_in) for score, sent_in in zip(scores, self._sent_in)]
        flags: Iterable[int] = itertools.repeat(0) if held is None else held
        sends_all, ends = False, len(scores)
        if self._send_budget is not None:
            ends = self._search_budget(scores, flags)
        else:
            ratio = self._drop_ratio_in(step)
            sends_all = ratio in (0, 1)
            if ratio > 0 and ((step - 1) % self._search_every == 0 or step <= self._warm_up_steps or self.threshold == _INVALID
                              or self.threshold == 0 or math.isinf(self.threshold)):
                searched = [(-math.inf if flag else score, size) for score, size, flag in zip(scores, self._sizes, flags) if size]
                found = _beyond(sorted(searched), ratio * self.fragments.elements)
                self.threshold = _INVALID if found is None else found
        for fragment, (score, size, flag) in enumerate(zip(scores, self._sizes, flags)):
            self._sent[fragment] = bool(size) and not flag and (
                sends_all or 0 < self._at_least_every <= step - self._sent_in[fragment]
                or score != 0 and (score > self.threshold or score == self.threshold and fragment < ends))
        return self._chosen()

    def _search_budget(self, scores: List[float], flags: Iterable[int]) -> int:
        """Sets threshold and allowance; of the fragments whose score is the threshold those before the result are sent."""
        self._allowance = self._grown()
        left, ends = max(self._allowance, 0.0), len(scores)
        searched = [(score, size) for score, size, flag in zip(scores, self._sizes, flags) if size and not flag]
        crossing = _beyond(sorted(searched, reverse=True), left)
        self.threshold = -math.inf
        if crossing is None:
            return ends
        larger = [(score, size) for score, size in searched if score > crossing]
        self.threshold = min((score for score, _ in larger), default=math.inf)
        left -= sum(size for _, size in larger)
        is_any = False
        for fragment, (score, size, flag) in enumerate(zip(scores, self._sizes, flags)):
            if not size or flag or score != crossing:
                continue
            left -= size
            if left < 0:
                ends = fragment
                break
            is_any = True
        if is_any:
            self.threshold = crossing
        return ends if self.threshold == crossing else len(scores)

    def take(self, step: int, sent: Sequence[int]) -> None:
        if self._before[0] != step:
            self._begin(step)
            if self._send_budget is not None:
                self._allowance = self._grown()
        chosen = set(sent)
        self._sent = [fragment in chosen and size > 0 for fragment, size in enumerate(self._sizes)]

    def forecast(self, step: int, values: Any) -> bytearray:
        expected = [(0.0 if is_sent else value) + value / (step - sent_in)
                    for value, is_sent, sent_in in zip(_numbers(values, "d"), self._sent, self._sent_in)]
        return bytearray(array.array("d", expected))

    def commit(self, step: int) -> None:
        if self._send_budget is not None:
            self._allowance -= self.sent_elements
        for fragment in self._chosen():
            self._sent_in[fragment] = step

    def _begin(self, step: int) -> None:
        if self._before[0] == step:
            _, self.threshold, self._allowance = self._before
        self._before = (step, self.threshold, self._allowance)

    def _grown(self) -> float:
        assert self._send_budget is not None
        share = self._send_budget * self.fragments.elements
        return min(self._allowance + share, share + max(self._sizes, default=0))

    def _drop_ratio_in(self, step: int) -> float:
        if step >= self._warm_up_steps or self._drop_ratio == 1:
            return self._drop_ratio
        # (1 - R)^(step / warm_up_steps), by products and square roots, which are rounded alike everywhere.
        result, root, exponent = 1.0, 1 - self._drop_ratio, step / self._warm_up_steps
        while exponent > 0:
            if exponent >= 1:
                result, exponent = result * root, exponent - 1
            root, exponent = math.sqrt(root), exponent * 2
        return 1 - result

    def _chosen(self) -> List[int]:
        return [fragment for fragment, is_sent in enumerate(self._sent) if is_sent]

    @property
    def sent_elements(self) -> int:
        return sum(itertools.compress(self._sizes, self._sent))

    @property
    def sent_bitmap(self) -> bytes:
        bits = bytearray(-(-len(self._sizes) // 8))
        for fragment in self._chosen():
            bits[fragment // 8] |= 1 << fragment % 8
        return bytes(bits)

    # --- checkpoints ---

    def save(self, step: int, residual: Any, velocity: Any = None, expected: Any = None) -> bytes:
        """Without the extension's checksum: state_dict() of lamina.torch has one over all of it."""
        _, threshold, allowance = self._before if self._before[0] > step else (0, self.threshold, self._allowance)
        kept = {"residual": _numbers(residual, "f"), "velocity": _numbers(() if velocity is None else velocity, "f")}
        for name, numbers in kept.items():
            if len(numbers) != self.fragments.elements and (name == "residual" or len(numbers)):
                raise ValueError(f"{name} has another size")
            _require_finite(f"save: the {name}", numbers)
        values = _numbers(() if expected is None else expected, "d")
        flags = (_VELOCITY if len(kept["velocity"]) else 0) | (_EXPECTED if len(values) else 0)
        header = _STATE.pack(_MAGIC, _VERSION, _FLOAT32, flags, self.fragments.fingerprint, len(self._sizes), self.fragments.elements,
                             step, threshold, allowance, 0)
        return b"".join([header, array.array("Q", self._sent_in), values, *kept.values()])

    def load(self, given: Any) -> Tuple[int, bytearray, bytearray, bytearray]:
        state = memoryview(given).cast("B")
        if len(state) < _STATE.size:
            raise DecodeError("saved state: cut short")
        magic, number, kind, flags, fingerprint, fragments, elements, step, threshold, allowance, _ = _STATE.unpack_from(state)
        for is_wrong, why in ((magic != _MAGIC, "not a state"), (number != _VERSION, "of another version"),
                              (kind != _FLOAT32, "of another element type"),
                              ((fingerprint, fragments, elements) != (self.fragments.fingerprint, len(self._sizes), self.fragments.elements),
                               "of another model"),
                              (flags & ~(_CHECKSUM | _VELOCITY | _EXPECTED), "of another version"),
                              (bool(flags & _VELOCITY) != self._has_momentum, "of another setting of momentum"),
                              (threshold != threshold or not math.isfinite(allowance), "without a threshold or an allowance")):
            if is_wrong:
                raise DecodeError(f"saved state: {why}")
        sizes = [8 * fragments, 8 * fragments * bool(flags & _EXPECTED), 4 * elements, 4 * elements * bool(flags & _VELOCITY)]
        if len(state) != _STATE.size + sum(sizes):
            raise DecodeError("saved state: cut short, or with more behind it")
        ends = list(itertools.accumulate(sizes, initial=_STATE.size))
        ages, expected, residual, velocity = (bytearray(state[begin:end]) for begin, end in zip(ends, ends[1:]))
        sent_in = memoryview(ages).cast("Q").tolist()
        if any(each > step for each in sent_in):
            raise DecodeError("saved state: a fragment was sent after the state's step")
        for numbers in (residual, velocity):
            _require_finite("saved state", memoryview(numbers).cast("f"))
        self._sent_in, self.threshold, self._allowance, self._before = sent_in, threshold, allowance, (0, 0.0, 0.0)
        return step, residual, velocity, expected


def _beyond(ordered: List[Tuple[float, int]], limit: float) -> Optional[float]:
    """The value with which, from the first on, the elements are more than the limit."""
    elements = 0
    for value, size in ordered:
        elements += size
        if elements > limit:
            return value + 0.0  # of the two zeros it is +0
    return None


def _numbers(given: Any, kind: Any) -> Any:
    """Flat: what has the buffer protocol, as bytes of such numbers or as the numbers themselves; a tensor; a list."""
    if hasattr(given, "numpy"):
        given = given.numpy()
    if isinstance(given, (list, tuple)):
        return array.array(kind, given)
    view = memoryview(given)
    return view.cast("B").cast(kind) if view.nbytes else array.array(kind)


def _require_finite(what: str, numbers: Any) -> None:
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{what} holds NaN or infinity")
