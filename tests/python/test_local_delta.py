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
    difference = np.concatenate(x) - np.concatenate(y)
    cut = np.split(difference, [4096, 5000])
    expected = {"mean_abs": [np.abs(fragment).mean() for fragment in cut],
                "root_mean_square": [np.sqrt((fragment ** 2).mean()) for fragment in cut],
                "l2_norm": [np.sqrt((fragment ** 2).sum()) for fragment in cut]}[value]
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
    with pytest.raises(lamina.DecodeError):
        lamina.Server(worker.fragments).add(data)


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


def test_what_does_not_fit_is_named():
    worker, x, y = drifting()
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
        (ValueError, "kind must be one of gradients, updates", lambda: lamina.Server(worker.fragments, kind="parameters")))
    y[1][3] = np.nan
    with pytest.raises(ValueError, match="'b'.*not finite"):
        worker.observe_all(x, y)
    assert worker.step == 0
    outer = lamina.OuterOptimizer(worker.fragments, momentum=0.5)
    with pytest.raises(ValueError, match="mean has 3 elements, the fragments 70"):
        outer([2], np.zeros(3, np.float32))
    with pytest.raises(IndexError):
        outer([3], np.zeros(3, np.float32))
    outer([2], np.full(70, 3e38, np.float32) / 2)
    with pytest.raises(ValueError, match="holds NaN or infinity, or its update would"):
        outer([2], np.full(70, 3e38, np.float32))
    with pytest.raises(ValueError, match="the saved outer optimizer has 3 and 0 elements"):
        outer.restore(np.zeros(3, np.float32), outer.rounding())


def test_arrays_are_looked_at_once():
    layout, draw = lamina.Layout({"a": (70, 3), "empty": (0,), "b": (64,)}), np.random.default_rng(0)
    own = [np.zeros(size, np.float32) for size in (210, 0, 64)]
    lists, flat = ([np.zeros(size, np.float32) for size in layout.sizes] for _ in range(2))
    one, other = (lamina.LocalDelta(layout, drop_ratio=0.3) for _ in range(2))
    shared, local = (lamina.Arrays(layout, arrays, [(l, 0) for l in range(3)]) for arrays in (flat, own))
    for step in range(1, 4):
        for each in own:
            each += draw.standard_normal(len(each)).astype(np.float32)
        before = [each.copy() for each in own]
        packed = [np.empty(274, np.float32) for _ in range(2)]
        for delta, x, y, to in ((one, lists, before, packed[0]), (other, shared, local, packed[1])):
            delta.observe_all(x, y)
            delta.select()
            delta.pack(x, y, to[:delta.sent_elements])
            delta.commit()
            delta.apply(step, to[:delta.sent_elements], x, y)
        assert one.sent == other.sent and np.array_equal(packed[0][:one.sent_elements], packed[1][:one.sent_elements])
        assert all(map(np.array_equal, lists + before, flat + own)) and any(each.any() for each in flat)
    wide = lamina.Arrays(layout, [np.zeros(size) for size in layout.sizes], [(l, 0) for l in range(3)])
    with pytest.raises(TypeError, match="local: the array of layer 0 'a' must be of float32"):
        other.observe_all(shared, wide)
    with pytest.raises(ValueError, match="3 layers, got 1"):
        other.observe_all(lamina.Arrays(lamina.Layout({"a": (210,)}), [flat[0]], [(0, 0)]), local)
