# SPDX-License-Identifier: MIT
"""What holds exactly of the schemes. L1, L2, ... are the numbers of docs/learning.md."""

import io

import lamina
import numpy as np
import pytest
import torch

import schemes
from parts import Parts
from rows import parsed
from toy import Toy

RATE = 0.5
EVERYTHING = "traffic=2"  # more than all there is
FOUR_STEPS = {"as_is": 0.28, "int8": 0.1, "int4": 0.06}  # with this traffic everything can go out each fourth step


def made(text, scheme=None):
    row = parsed(f"workers=4 steps=9 optimizer=sgd outer_rate=0.5 outer_momentum=1 {text}")
    return (scheme or schemes.SCHEMES[row.scheme])(Toy(row), row)


class Sent:
    """Keeps count of what a scheme of local updates brought together."""

    def __init__(self, scheme):
        self.total = torch.zeros_like(scheme.replicas.y)
        bring_together = scheme.bring_together

        def counting(parts, elements, sent):
            self.total[:, elements] += sent
            bring_together(parts, elements, sent)

        scheme.bring_together = counting


def is_conserved(scheme):
    """L2: what each worker did is what it sent and what is left in its drift, at every element after every step."""
    sent, did = Sent(scheme), torch.zeros_like(scheme.replicas.y)
    for step in range(1, scheme.row.steps + 1):
        did -= RATE * scheme.task.drawn[step - 1]
        scheme.step(step, RATE)
        if not torch.equal(-did, sent.total + scheme.shared - scheme.replicas.y):
            return False
    return True


@pytest.mark.parametrize("choice", ["value", "turn", "all"])
@pytest.mark.parametrize("payload", ["as_is", "int8", "int4"])
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_nothing_is_lost(choice, payload, delay):
    traffic = FOUR_STEPS[payload] if choice == "all" else 0.4
    scheme = made(f"scheme=local choice={choice} payload={payload} delay={delay} traffic={traffic}")
    assert is_conserved(scheme)
    assert not torch.equal(scheme.shared, scheme.task.begin)


@pytest.mark.parametrize("delay", [0, 2])
def test_what_rounding_takes_of_the_outer_steps_comes_later(delay):
    scheme = made(f"scheme=local payload=int4 outer_momentum=0 delay={delay} {EVERYTHING}")
    sent = Sent(scheme)
    for step in range(1, 10):
        scheme.step(step, RATE)
        assert torch.equal(scheme.shared - scheme.rounding, scheme.task.begin - 0.5 * sent.total.mean(0))
    assert scheme.rounding.any()


class Overwriting(schemes.Local):
    def bring_together(self, parts, elements, sent):
        self.shared[elements] -= self.outer_step(parts, elements, sent.mean(0))
        self.replicas.y[:, elements] = self.shared[elements]


class RoundingTwice(schemes.Local):
    def bring_together(self, parts, elements, sent):
        left = self.shared[elements] - self.replicas.y[:, elements] - sent
        super().bring_together(parts, elements, sent)
        self.replicas.y[:, elements] -= left


def test_overwriting_loses_what_was_done_meanwhile():
    assert is_conserved(made(f"scheme=local {EVERYTHING}", Overwriting))
    assert not is_conserved(made(f"scheme=local delay=1 {EVERYTHING}", Overwriting))


def test_rounding_that_is_added_twice_is_seen():
    assert is_conserved(made(f"scheme=local {EVERYTHING}", RoundingTwice))
    assert not is_conserved(made(f"scheme=local payload=int4 {EVERYTHING}", RoundingTwice))


def test_with_everything_sent_all_workers_have_the_shared_parameters():
    """L1."""
    scheme = made(f"scheme=local {EVERYTHING}")
    for step in range(1, 10):
        scheme.step(step, RATE)
        assert torch.equal(scheme.replicas.y, scheme.shared.expand(4, -1))


def test_averaging_everything_is_dense_sgd():
    """L3."""
    dense = made("scheme=dense")
    others = [made(f"scheme=local outer_rate=1 outer_momentum=0 {EVERYTHING}"), made("scheme=gradients drop_ratio=0")]
    for step in range(1, 10):
        dense.step(step, RATE)
        for other in others:
            other.step(step, RATE)
            assert torch.equal(other.parameters(), dense.parameters())
    momentum = made(f"scheme=local outer_rate=1 outer_momentum=0.5 {EVERYTHING}")
    momentum.step(1, RATE)
    assert not torch.equal(momentum.parameters(), made("scheme=dense").parameters())


@pytest.mark.parametrize("setting", ["", "payload=int4 delay=2", "choice=all payload=int8", "choice=turn delay=1"])
def test_one_worker_trains_as_if_alone(setting):
    """L5, with an optimizer and rates that round."""
    alone = made("workers=1 scheme=dense optimizer=adamw")
    worker = made(f"workers=1 scheme=local optimizer=adamw outer_rate=1 outer_momentum=0 traffic=0.4 {setting}")
    for step in range(1, 10):
        alone.step(step, 0.1)
        worker.step(step, 0.1)
        assert torch.equal(worker.replicas.y, alone.replicas.y)
    assert not torch.equal(worker.shared, worker.task.begin)


class Decaying(schemes.Local):
    def outer_step(self, parts, elements, mean):
        others = torch.ones_like(self.momentum)
        others[elements] = 0
        self.momentum -= 0.5 * self.momentum * others
        return super().outer_step(parts, elements, mean)


def momentum_stands_still(scheme):
    """Of the parts that have not come in a step."""
    sent = Sent(scheme)
    moved = False
    for step in range(1, 10):
        momentum, before = scheme.momentum.clone(), sent.total.clone()
        scheme.step(step, RATE)
        came = (sent.total != before).any(0)
        for begin, size in zip(scheme.parts.begins, scheme.parts.sizes):
            part = slice(begin, begin + size)
            if came[part].any():
                moved = True
            elif not torch.equal(momentum[part], scheme.momentum[part]):
                return False
    assert moved
    return True


def test_momentum_of_parts_that_are_not_sent_stands_still():
    setting = "scheme=local traffic=0.4 outer_momentum=0.5"
    assert momentum_stands_still(made(setting))
    assert not momentum_stands_still(made(setting, Decaying))


@pytest.mark.parametrize("text", ["scheme=dense", "scheme=gradients drop_ratio=0.5 payload=int4",
                                  "scheme=local payload=int4 delay=3 traffic=0.4", "scheme=local choice=turn delay=1 traffic=0.4",
                                  "scheme=local choice=all traffic=0.4"])
def test_saved_and_resumed_is_the_uninterrupted_run(text):
    """L6, with parts under way."""
    whole, first, second = (made(f"optimizer=adamw {text}") for _ in range(3))
    for step in range(1, 10):
        expected = whole.step(step, 0.1)
        if step <= 4:
            assert first.step(step, 0.1) == expected
        if step == 4:
            memory = io.BytesIO()
            torch.save(first.state(4), memory)
            memory.seek(0)
            second.load(torch.load(memory, weights_only=False))
        if step > 4:
            assert second.step(step, 0.1) == expected
    assert torch.equal(second.parameters(), whole.parameters())


def test_a_part_under_way_is_not_chosen_again():
    scheme = made(f"scheme=local delay=3 {EVERYTHING}")
    went_out = []
    for step in range(1, 10):
        scheme.step(step, RATE)
        went_out += [step] * sum(arrival == step + 3 for arrival, _, _ in scheme.under_way)
    assert went_out == [1, 4, 7]


def test_dropped_gradients_are_the_librarys_own():
    """Choice, residual, rounding and bytes of W compressors."""
    scheme = made("scheme=gradients payload=int8 drop_ratio=0.6 workers=2 outer_rate=0.7 outer_momentum=0.9")
    scheme.task.drawn *= 1.37  # so that rounding leaves something
    layout = lamina.Layout(scheme.task.shapes())
    workers = [lamina.Compressor(layout, drop_ratio=0.6, payload="int8") for _ in range(2)]
    splits = np.cumsum([64, 130, 70])
    for step in range(1, 10):
        result = scheme.step(step, RATE)
        for worker, gradient in zip(workers, scheme.task.drawn[step - 1].numpy()):
            worker.accumulate_all([np.ascontiguousarray(each).reshape(shape)
                                   for each, shape in zip(np.split(gradient, splits), scheme.task.shapes().values())])
        agreed = np.mean([worker.values() for worker in workers], axis=0)
        for worker, residual in zip(workers, scheme.residual.numpy()):
            worker.select(np.ascontiguousarray(agreed, np.float64))
            assert result.up_bytes == len(worker.encode()) + scheme.parts.value_bytes
            worker.commit()
            assert np.array_equal(np.concatenate([worker.residual(layer) for layer in range(4)]), residual)


@pytest.mark.parametrize("payload", ["as_is", "bfloat16", "int8"])
def test_bytes_and_roundings_are_the_librarys_own(payload):
    parts = Parts(Toy(parsed("steps=1")).shapes(), parsed(f"payload={payload}"))
    numbers = torch.randn(330, generator=torch.Generator().manual_seed(1)) * torch.logspace(-20, 20, 330)
    worker = lamina.Compressor(parts.layout, drop_ratio=0.0, payload=payload)
    worker.accumulate_all([np.ascontiguousarray(each) for each in np.split(numbers.numpy(), np.cumsum(parts.sizes)[:-1])])
    frame = worker.encode()
    everything = list(range(4))
    assert parts.frame_bytes(everything) == len(frame)
    assert parts.frame_bytes([]) == 0
    decoded, arriving = lamina.decode(frame, parts.layout), parts.arriving(everything, numbers).numpy()
    for layer, (begin, size) in enumerate(zip(parts.begins, parts.sizes)):
        restored = np.empty(size, np.float32)
        decoded.restore(layer, restored)
        assert np.array_equal(restored, arriving[begin:begin + size])


@pytest.mark.parametrize("choice", ["value", "turn", "all"])
@pytest.mark.parametrize("payload, traffic", [("as_is", 0.5), ("int8", 0.3), ("int4", 0.2)])
def test_bytes_are_within_what_was_asked(choice, payload, traffic):
    scheme = made(f"scheme=local choice={choice} payload={payload} traffic={traffic} steps=60")
    results = [scheme.step(step, RATE) for step in range(1, 61)]
    share = sum(result.up_bytes for result in results) / (60 * 4 * 330)
    assert traffic / 2 < share <= 1.001 * traffic  # which parts go out decides how many blocks of scales are not full
    assert share == sum(result.down_bytes for result in results) / (60 * 4 * 330)


@pytest.mark.parametrize("text, said", [
    ("scheme=local traffic=0.01", "traffic=0.01: headers and values alone are 10.9"),
    ("scheme=local choice=all delay=2 traffic=1", "everything goes out every 2 steps"),
    ("scheme=local choice=best", "choice must be one of value, turn, all, got 'best'"),
    ("scheme=local value=mean", "value must be one of mean_abs"),
    ("scheme=local payload=int3", "payload must be one of as_is"),
    ("optimizer=adam", "optimizer must be one of adamw"),
])
def test_what_cannot_be_is_said(text, said):
    with pytest.raises(ValueError, match=said):
        made(text)
