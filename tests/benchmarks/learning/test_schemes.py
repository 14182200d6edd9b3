# SPDX-License-Identifier: MIT
"""What holds exactly of the schemes. L2, L3, ... are the numbers of docs/algorithm.md."""

import io

import lamina
import numpy as np
import pytest
import torch

import schemes
from fragments import Fragments
from payload import PAYLOADS
from rows import parsed
from toy import Toy

RATE = 0.5
EVERYTHING = "traffic=2"  # more than all there is
FOUR_STEPS = {"as_is": 0.28, "int8": 0.1, "int4": 0.06, "top4": 0.032}  # with this traffic everything can go out each fourth step


def made(text, scheme=None):
    row = parsed(f"workers=4 steps=9 optimizer=sgd outer_rate=0.5 outer_momentum=1 {text}")
    return (scheme or schemes.SCHEMES[row.scheme])(Toy(row), row)


class Sent:
    """Keeps count of what a scheme of local updates brought together."""

    def __init__(self, scheme):
        self.total = torch.zeros_like(scheme.replicas.y)
        bring_together = scheme.bring_together

        def counting(fragments, elements, delta, sent, periods):
            self.total[:, elements] += sent
            bring_together(fragments, elements, delta, sent, periods)

        scheme.bring_together = counting


def is_conserved(scheme):
    """L2: what each worker did is what it sent, what is left in its local delta, and what waits outside of it, at every element after every
    step."""
    sent, did = Sent(scheme), torch.zeros_like(scheme.replicas.y)
    for step in range(1, scheme.row.steps + 1):
        did -= RATE * scheme.task.drawn[step - 1]
        scheme.step(step, RATE)
        waiting = scheme.shared - scheme.replicas.y + (0 if scheme.rest is None else scheme.rest)
        if not torch.equal(-did, sent.total + waiting):
            return False
    return True


class Overwriting(schemes.Local):
    def bring_together(self, fragments, elements, delta, sent, periods):
        self.shared[elements] -= self.outer_optimizer(fragments, elements, sent.mean(0), periods)
        self.replicas.y[:, elements] = self.shared[elements]


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("choice, payload, traffic", [
    *((choice, payload, 0.4) for choice in ("value", "value at_least_every=2", "turn") for payload in ("as_is", "int4")),
    ("value age_power=1", "int8", 0.4), ("value age_power=1", "top4", 0.4), *(("all", payload, traffic) for payload, traffic in FOUR_STEPS.items()),
    *(("value age_power=1 error_feedback=1", payload, 0.125) for payload in ("int4", "ternary"))])
def test_nothing_is_lost(choice, payload, traffic, delay):
    scheme = made(f"scheme=local choice={choice} payload={payload} delay={delay} traffic={traffic}")
    assert is_conserved(scheme)
    assert not torch.equal(scheme.shared, scheme.task.begin)
    assert scheme.rest is None or scheme.rest.any()


@pytest.mark.parametrize("code", ["entropy", "trits", "blocks", "top"])
def test_nothing_is_lost_in_levels(code):
    scheme = made(f"scheme=levels code={code} traffic=0.2 period=1.5 outer_rate=0.7 outer_momentum=0.9")
    did = torch.zeros_like(scheme.replicas.y)
    for step in range(1, 10):
        did -= RATE * scheme.task.drawn[step - 1]
        result = scheme.step(step, RATE)
        waiting = scheme.shared - scheme.replicas.y + scheme.rest
        # The server's rest is that of the mean.
        left = -did.mean(0) - waiting.mean(0) - scheme.server_rest
        assert torch.allclose(left, scheme.task.begin - scheme.shared, atol=1e-3)
        assert 0 < result.up_bytes < 4 * 330
    assert scheme.rest.any()


def test_what_is_lost_is_seen():
    assert is_conserved(made(f"scheme=local {EVERYTHING}", Overwriting))
    assert not is_conserved(made(f"scheme=local delay=1 {EVERYTHING}", Overwriting))
    assert not is_conserved(made(f"scheme=local payload=int4 {EVERYTHING}", Overwriting))


def test_averaging_everything_is_dense_sgd():
    """L3; and with D = 0 all workers have the shared parameters."""
    dense = made("scheme=dense")
    local, gradients = made(f"scheme=local outer_rate=1 outer_momentum=0 {EVERYTHING}"), made("scheme=gradients drop_ratio=0 held_back=nothing")
    for step in range(1, 10):
        for scheme in (dense, local, gradients):
            scheme.step(step, RATE)
            assert torch.equal(scheme.parameters(), dense.parameters())
        assert torch.equal(local.replicas.y, local.shared.expand(4, -1))


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


@pytest.mark.parametrize("text", ["scheme=dense", "scheme=gradients drop_ratio=0.5 payload=int4",
                                  "scheme=gradients held_back=nothing clipped=gradients", "scheme=powersgd",
                                  "scheme=sparseloco interval=3 top=8", "scheme=sparseloco interval=3 top=8 unsent=within answer=rounded",
                                  "scheme=sparseloco interval=3 sends=fragments share=0.5",
                                  "scheme=dgc ramp_steps=8 optimizer=sgd correction=0.5", "scheme=scalecom share=0.1 low_pass=0.5", "scheme=demo top=8",
                                  "scheme=onebit dense_steps=3",
                                  "scheme=local payload=int4 delay=3 traffic=0.4", "scheme=levels traffic=0.2 period=1.5", "scheme=levels code=top traffic=0.2",
                                  "scheme=local payload=ternary error_feedback=1 delay=2 traffic=0.125", "scheme=local choice=turn delay=1 traffic=0.4",
                                  "scheme=local optimizer=sgd age_power=1 outer_clock=steps outer_momentum=0.5 traffic=0.4",
                                  "scheme=local choice=all traffic=0.4 delta_kept=0.9", "scheme=local optimizer=adamw_of_mean traffic=0.4"])
def test_saved_and_resumed_is_the_uninterrupted_run(text):
    """L6, with fragments under way."""
    whole, first, second = (made(f"optimizer=adamw {text}") for _ in range(3))
    expected = [whole.step(step, 0.1) for step in range(1, 10)]
    assert [first.step(step, 0.1) for step in range(1, 5)] == expected[:4]
    memory = io.BytesIO()
    torch.save(first.state(4), memory)
    memory.seek(0)
    second.load(torch.load(memory, weights_only=False))
    assert [second.step(step, 0.1) for step in range(5, 10)] == expected[4:]
    assert torch.equal(second.parameters(), whole.parameters())
    assert second.facts(9) == whole.facts(9)


def test_a_local_delta_may_fade():
    """What a worker had not sent, and what it has just done; and fragments go out as they are then."""
    scheme = made("scheme=local delta_kept=0.75 traffic=0.4 outer_rate=1 outer_momentum=0")
    sent = Sent(scheme)
    for step in range(1, 10):
        had = 0.75 * (scheme.shared - scheme.replicas.y + RATE * scheme.task.drawn[step - 1])
        before = sent.total.clone()
        scheme.step(step, RATE)
        went = sent.total - before
        assert torch.allclose(scheme.shared - scheme.replicas.y, had - went, atol=1e-4)
        is_sent = (went != 0).any(0)
        assert is_sent.any() and torch.allclose(went[:, is_sent], had[:, is_sent], atol=1e-4)


@pytest.mark.parametrize("correction", [0, 0.5])
def test_dropped_gradients_are_the_librarys_own(correction):
    """Choice, residual, momentum, rounding and bytes of W workers."""
    scheme = made(f"scheme=gradients payload=int8 drop_ratio=0.6 workers=2 outer_rate=0.7 outer_momentum=0.9 correction={correction}")
    scheme.task.drawn *= 1.37  # so that rounding leaves something
    layout = lamina.Layout(scheme.task.shapes())
    workers = [lamina.Worker(layout, drop_ratio=0.6, payload="int8", momentum=correction) for _ in range(2)]
    splits = np.cumsum([64, 130, 70])
    for step in range(1, 10):
        result = scheme.step(step, RATE)
        steps = [worker.add([np.ascontiguousarray(each).reshape(shape)
                             for each, shape in zip(np.split(gradient, splits), scheme.task.shapes().values())])
                 for worker, gradient in zip(workers, scheme.task.drawn[step - 1].numpy())]
        agreed = np.mean([each.values() for each in steps], axis=0)
        for worker, each, residual in zip(workers, steps, scheme.residual.numpy()):
            each.select(np.ascontiguousarray(agreed, np.float64))
            assert result.up_bytes == len(each.frame()) + scheme.fragments.value_bytes
            each.commit()
            assert np.array_equal(np.concatenate([worker.residual(layer) for layer in range(4)]), residual)


@pytest.mark.parametrize("payload", ["as_is", "bfloat16", "int8", "int4", "ternary"])
def test_bytes_and_roundings_are_the_librarys_own(payload):
    fragments = Fragments(Toy(parsed("steps=1")).shapes(), parsed(f"payload={payload}"))
    numbers = torch.randn(330, generator=torch.Generator().manual_seed(1)) * torch.logspace(-20, 20, 330)
    worker = lamina.Worker(fragments.layout, drop_ratio=0.0, payload=payload)
    frame = worker.add([np.ascontiguousarray(each) for each in np.split(numbers.numpy(), np.cumsum(fragments.sizes)[:-1])]).frame()
    everything = list(range(4))
    assert fragments.frame_bytes(everything) == len(frame)
    assert fragments.frame_bytes([]) == 0
    decoded, arriving = lamina.decode(frame, fragments.layout), fragments.arriving(everything, numbers).numpy()
    for layer, (begin, size) in enumerate(zip(fragments.begins, fragments.sizes)):
        restored = np.empty(size, np.float32)
        decoded.restore(layer, restored)
        assert np.array_equal(restored, arriving[begin:begin + size])


@pytest.mark.parametrize("payload, size, mantissas, error", [
    ("int2", 4096 * 2 // 8 + 64, [0.5, 0.75], 0.13), ("int1", 4096 // 8 + 64, [0.5], 0.38),
    ("top4", 64 * 5, [0, 0.5], 0.70), ("top2", 64 * 3, [0, 0.5], 0.82), ("top1", 64 * 2, [0, 0.5], 0.90)])
def test_few_bits_are_few_multiples_of_a_power_of_two(payload, size, mantissas, error):
    rounded = PAYLOADS[payload].rounded
    numbers = torch.randn(100, 4096, generator=torch.Generator().manual_seed(1)) * torch.logspace(-20, 20, 100)[:, None]
    arrived = rounded(numbers)
    assert PAYLOADS[payload].bytes(4096) == size
    assert arrived.abs().frexp().mantissa.unique().tolist() == mantissas
    assert torch.equal(arrived.sign()[arrived != 0], numbers.sign()[arrived != 0])
    errors = (arrived - numbers).double().square().mean(1) / numbers.double().square().mean(1)
    assert errors.mean().item() == pytest.approx(error, rel=0.03)
    # A block of 64 after the other, each with a power of its own.
    assert torch.equal(rounded(numbers[:, 64:128]), arrived[:, 64:128])
    assert rounded(numbers[:, :70]).shape == (100, 70)


def followed(text, steps=700):
    """The steps in which each fragment comes, and the local deltas after each, with 8 a step of 33 of one size: all workers move by the same in
    a step, one layer faster than the other."""
    row = parsed(f"workers=1 steps={steps} optimizer=sgd scheme=local outer_rate=1 outer_momentum=0 traffic=0.44 {text}")
    task, speeds = Toy(row), np.float32(np.geomspace(1, 64, 33))
    task.shapes = lambda: {str(layer): (10,) for layer in range(33)}
    task.drawn[:] = torch.from_numpy(np.repeat(speeds, 10))
    scheme = schemes.Local(task, row)
    came, deltas = [[] for _ in speeds], []
    for step in range(1, steps + 1):
        before = scheme.times.copy()
        scheme.step(step, 1.0)
        for fragment in np.flatnonzero(scheme.times != before):
            came[fragment].append(step)
        deltas.append((scheme.shared - scheme.replicas.y[0]).abs())
    times, waits = [len(of) for of in came], [np.diff([0, *of, steps]).max() for of in came]
    assert scheme.facts(steps) == {"came_least": min(times), "came_most": max(times), "waited_longest": max(waits)}
    return came, torch.stack(deltas)[steps // 2:]


def test_ages_count_as_asked():
    """Of fragments whose local deltas grow as 1 to 64, by representative value the slowest comes about 64 times as rarely as the fastest, which can come
    in every step; by score 8 times; in turn as often; and with a largest age no more rarely than that. By score the mean local delta is
    least, by representative value the largest one."""
    runs = {text: followed(text) for text in ("age_power=0", "age_power=0.5", "age_power=1", "age_power=4", "choice=turn")}
    ratios = {text: len(came[-1]) / len(came[0]) for text, (came, _) in runs.items()}
    assert ratios["age_power=0"] > 4 * ratios["age_power=1"] > 16
    assert ratios["choice=turn"] == pytest.approx(1, abs=0.01)
    came, _ = followed("at_least_every=20")
    assert max(np.diff(came[0])) == 20 and max(np.diff(came[-1])) < 5
    del runs["choice=turn"]
    assert min(runs, key=lambda text: runs[text][1].mean()) == "age_power=1"
    assert min(runs, key=lambda text: runs[text][1].max()) == "age_power=0"


def test_momentum_by_steps_is_a_speed():
    """Under a steady move, brought together at whatever times, the momentum comes to the same; counted by sends it depends on them."""
    for clock, is_same in (("steps", True), ("fading", False), ("sends", False)):
        momentum = []
        for periods in (0.25, 1.0, 3.0):
            scheme = made(f"scheme=local outer_momentum=0.5 outer_clock={clock} {EVERYTHING}")
            for _ in range(100):
                scheme.outer_optimizer([0], scheme.fragments.indices([0]), torch.full((64,), 8 * periods), np.array([periods]))
            momentum.append(float(scheme.momentum[0]))
        assert (momentum == pytest.approx([16] * 3, rel=1e-4)) == is_same
    # What was gathered fades with the time, and counts for the time.
    scheme = made(f"scheme=local outer_momentum=0.5 outer_rate=1 outer_clock=steps {EVERYTHING}")
    scheme.momentum[:] = 16
    taken = scheme.outer_optimizer([0, 2], scheme.fragments.indices([0, 2]), torch.zeros(134), np.array([1.0, 2.0]))
    assert scheme.momentum[[0, 64, 194]].tolist() == [8, 16, 4]
    assert taken[[0, 64]].tolist() == [0.5 * 8, 2 * 0.25 * 4]


def test_dropped_fragments_stand_still():
    """With the optimizer's state, their own count of steps, and without weight decay; unless zeros are what it gets."""
    still, moved = 0, {"nothing": False, "zeros": False}
    for held_back in moved:
        scheme = made(f"scheme=gradients held_back={held_back} drop_ratio=0.6 optimizer=adamw steps=40")
        for step in range(1, 41):
            before = scheme.replicas.y.clone()
            residual = scheme.residual.clone()
            scheme.step(step, 0.1)
            is_held = (scheme.residual == residual + scheme.task.drawn[step - 1]).all(0) & (step > 1)
            still += int(is_held.sum())
            moved[held_back] |= bool((scheme.replicas.y != before)[0, is_held].any())
        if held_back == "nothing":
            counts = {int(state["step"]) for state in scheme.replicas.state()["optimizer"]["state"].values()}
            assert len(counts) > 1 and max(counts) <= 40
    assert still and moved == {"nothing": False, "zeros": True}


@pytest.mark.parametrize("clipped, adds_up", [("gradients", True), ("arrived", False)])
def test_gradients_are_clipped_before_they_add_up(clipped, adds_up):
    """What is taken off is the sum of each gradient, clipped, but for what is still in the residual: also where several arrive together."""
    row = parsed(f"workers=4 steps=40 optimizer=sgd scheme=gradients drop_ratio=0.6 clipped={clipped}")
    task = Toy(row)
    task.clip = 1.0
    scheme = schemes.SCHEMES["gradients"](task, row)
    begin, sums, is_sum = scheme.parameters().clone(), torch.zeros(4, 330), []
    for step in range(1, 41):
        sums += task.drawn[step - 1] / task.drawn[step - 1].norm(dim=1, keepdim=True)
        scheme.step(step, 1.0)
        is_sum.append(torch.allclose(begin - scheme.parameters(), (sums - scheme.residual).mean(0), atol=1e-4))
    assert all(is_sum) == adds_up


@pytest.mark.parametrize("choice", ["value", "value at_least_every=9", "turn", "all"])
@pytest.mark.parametrize("payload, traffic", [("as_is", 0.5), ("int4", 0.2)])
def test_bytes_are_within_what_was_asked(choice, payload, traffic):
    scheme = made(f"scheme=local choice={choice} payload={payload} traffic={traffic} steps=60")
    results = [scheme.step(step, RATE) for step in range(1, 61)]
    share = sum(result.up_bytes for result in results) / (60 * 4 * 330)
    assert traffic / 2 < share <= 1.001 * traffic  # which fragments go out decides how many blocks of scales are not full
    assert share == sum(result.down_bytes for result in results) / (60 * 4 * 330)
