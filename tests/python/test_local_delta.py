# SPDX-License-Identifier: MIT
"""Local updates without torch: frames, steps that are joined or lost, and what is refused."""

import numpy as np
import pytest

import lamina
import ranks


def drifting(payload="as_is", **options):
    layout = lamina.Layout({"a": (5000,), "b": (70,)})
    worker = lamina.LocalDelta(layout, fragment_elements=4096, payload=payload, **options)
    draw = np.random.default_rng(1)
    x = [np.zeros(size, np.float32) for size in layout.sizes]
    y = [draw.standard_normal(size).astype(np.float32) for size in layout.sizes]
    return worker, x, y


@pytest.mark.parametrize("payload, value", [
    ("as_is", "mean_abs"), ("float16", "root_mean_square"), ("bfloat16", "l2_norm"), ("int8", "mean_abs"), ("int4", "root_mean_square"),
    ("ternary", "l2_norm")])
def test_frames_say_what_is_packed(payload, value):
    worker, x, y = drifting(payload, drop_ratio=0.3, value=value)
    worker.observe_all(x, y)
    measure = {"mean_abs": lambda d: np.abs(d).mean(), "root_mean_square": lambda d: np.sqrt((d ** 2).mean()), "l2_norm": np.linalg.norm}[value]
    expected = [measure(fragment) for fragment in np.split(np.concatenate(x) - np.concatenate(y), [4096, 5000])]
    assert worker.values().tolist() == pytest.approx(expected, rel=1e-5)
    sent = worker.select()
    assert 0 < len(sent) <= 3
    packed = np.empty(worker.sent_elements, np.float32)
    worker.pack(x, y, packed)
    data = worker.encode(x, y)
    frame = lamina.decode(data, worker.fragments)
    assert (frame.kind, frame.step, frame.sent) == ("updates", 1, sent)
    server = lamina.Server(worker.fragments, kind="updates")
    server.add(data)
    means = [np.empty(size, np.float32) for size in worker.fragments.sizes]
    assert server.update(means) == sent
    np.testing.assert_array_equal(np.concatenate([means[fragment] for fragment in sent]), packed)
    ranks.refused((lamina.DecodeError, None, lambda: lamina.Server(worker.fragments).add(data)))
    worker.commit()
    worker.apply(1, packed, x, y)
    moved = np.split(-np.concatenate(x), [4096, 5000])
    np.testing.assert_array_equal(np.concatenate([moved[fragment] for fragment in sent]), packed)
    assert not any(moved[fragment].any() for fragment in range(3) if fragment not in sent)


def test_one_that_joins_or_loses_a_step_holds_the_same_fragments():
    worker, x, y = drifting(drop_ratio=0)
    worker.observe_all(x, y)
    worker.encode(x, y)
    worker.commit()
    joining = drifting(drop_ratio=0)[0]
    joining.join(worker.save())
    assert joining.step == 1 and joining.steps_under_way == 1
    joining.observe_all(x, x)
    assert joining.select() == []
    joining.abandon()
    worker.forget(1)
    before = [each.copy() for each in y]
    worker.apply(1, np.zeros(5070, np.float32), x, y)
    np.testing.assert_array_equal(y[0], before[0])  # nothing of it was sent, so nothing comes back
    worker.observe_all(x, y)
    worker.select()
    worker.commit_lost()
    worker.abandon(2)
    assert worker.steps_under_way == 0


def arrays_of(layers, dtype=np.float32):
    layout = lamina.Layout({"ab"[number]: (len(each),) for number, each in enumerate(layers)})
    return lamina.Arrays(layout, [each.astype(dtype, copy=False) for each in layers], [(number, 0) for number in range(len(layers))])


def test_what_does_not_fit_is_named():
    worker, x, y = drifting()
    outer, three = lamina.OuterOptimizer(worker.fragments, momentum=0.5), np.zeros(3, np.float32)
    outer([2], np.full(70, 3e38, np.float32) / 2)
    ranks.refused(
        (ValueError, "value must be one of mean_abs, root_mean_square, l2_norm", lambda: drifting(value="max_abs")),
        (ValueError, "payload must be one of", lambda: drifting("int5")),
        (ValueError, "send_budget", lambda: drifting(send_budget=2)),
        (TypeError, "local: the array of layer 1 'b' must be of float32", lambda: worker.observe_all(x, [y[0], y[1].astype("f8")])),
        (TypeError, "shared: the array of layer 0 'a' is not contiguous", lambda: worker.observe_all([x[0][::2], x[1]], y)),
        (ValueError, "2 layers, got 1", lambda: worker.observe_all(x[:1], y)),
        (RuntimeError, "observe the next one first", lambda: worker.select()),
        (RuntimeError, "nothing to commit", lambda: worker.commit()),
        (RuntimeError, "not under way", lambda: worker.forget(3)),
        (lamina.DecodeError, "saved local delta", lambda: worker.load(b"xxx")),
        (ValueError, "outer rate", lambda: lamina.OuterOptimizer(worker.fragments, rate=0)),
        (ValueError, "outer momentum", lambda: lamina.OuterOptimizer(worker.fragments, momentum=1)),
        (ValueError, "kind must be one of gradients, updates", lambda: lamina.Server(worker.fragments, kind="parameters")),
        (ValueError, "'b'.*not finite", lambda: worker.observe_all(x, [y[0], y[1] * np.nan])),
        (ValueError, "mean has 3 elements, the fragments 70", lambda: outer([2], three)), (IndexError, None, lambda: outer([3], three)),
        (ValueError, "holds NaN or infinity, or its update would", lambda: outer([2], np.full(70, 3e38, np.float32))),
        (ValueError, "the saved outer optimizer has 3 and 0 elements", lambda: outer.restore(three, outer.rounding())),
        (TypeError, "local: the array of layer 0 'a' must be of float32", lambda: worker.observe_all(arrays_of(x), arrays_of(x, np.float64))),
        (ValueError, "2 layers, got 1", lambda: worker.observe_all(arrays_of(x[:1]), arrays_of(y))))
    assert worker.step == 0
