# SPDX-License-Identifier: MIT
"""lamina without torch: what it does besides tests/python/test_method.py and tests/python/soak.py, and what it refuses."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import lamina
import ranks

LAYOUT = lamina.Layout({"weight": (3, 4), "bias": (4,)})
GRADIENTS = [np.ones((3, 4), np.float32), np.ones(4, np.float32)]


def test_a_refused_gradient_is_a_result():
    worker = lamina.Worker(LAYOUT)
    step = worker.add([np.ones((3, 4), np.float32), np.full(4, np.nan, np.float32)])
    assert not step and step.refused_layer == 1 and worker.steps == 0 and not np.any(worker.residual(0))
    step = worker.begin()
    assert not step.add(0, np.full(12, np.inf, np.float32)) and step.refused_layer == 0
    assert step.add(0, np.ones(12, np.float32)) and step and step.refused_layer is None


def a_step():
    return lamina.Worker(LAYOUT).add(GRADIENTS)


@pytest.mark.parametrize("gradient, error, text", [
    (np.zeros((4, 3), np.float32).T, TypeError, "layer 0 'weight' is not contiguous"),
    (np.zeros(24, np.float32)[::2], TypeError, "layer 0 'weight' is not contiguous"),
    (np.zeros(12, np.int32), TypeError, "layer 0 'weight' is not of float32"),
    (np.zeros(12), ValueError, "another element type"),
    (np.zeros(11, np.float32), ValueError, r"'weight' has shape \[3, 4\]"),
    ([0.0] * 12, TypeError, "incompatible"),
])
def test_a_gradient_that_cannot_be_taken_is_named(gradient, error, text):
    made = lamina.Worker(LAYOUT)
    with pytest.raises(error, match=text):
        made.add([gradient, None])
    assert made.steps == 0 and not np.any(made.residual(0))


def test_nothing_is_read_from_or_written_into_a_copy():
    step = a_step()
    data = np.frombuffer(step.frame(), np.uint8)
    frame, read_only = lamina.decode(data, LAYOUT), np.zeros(12, np.float32)
    assert frame.sent == [0, 1]
    read_only.flags.writeable = False
    for refused in (np.zeros(24, np.float32)[::2], np.zeros((4, 3), np.float32).T, np.zeros(12), read_only):
        with pytest.raises((TypeError, ValueError)):
            frame.restore(0, refused)
        assert not np.any(refused)
    ranks.refused((TypeError, None, lambda: step.pack(np.zeros(32, np.float32)[::2])),
                  (TypeError, None, lambda: lamina.decode(np.repeat(data, 2)[::2], LAYOUT)))


def test_what_is_outside_its_range_is_named():
    def worker(**options):
        return lambda: lamina.Worker(LAYOUT, **options)

    def options(**given):
        return lambda: lamina.Options(**given)

    def layout(shapes):
        return lambda: lamina.Layout(shapes)

    def arrays(table, given=(np.zeros(16, np.float32),)):
        return lambda: lamina.Arrays(LAYOUT, list(given), table)
    ranks.refused(
        (ValueError, "drop ratio", worker(drop_ratio=1.5)), (ValueError, "budget", worker(send_budget=0.0)),
        (ValueError, "search_every", worker(search_every=0)), (ValueError, "fragment_elements", worker(fragment_elements=100)),
        (ValueError, "momentum", worker(momentum=1.0)), (ValueError, "value must be one of", worker(value="median")),
        (ValueError, "non_finite must be one of", worker(non_finite="x")), (ValueError, "payload must be one of", worker(payload="int5")),
        (ValueError, "always_sent", worker(always_sent=[2])),
        (ValueError, r"drop_ratio must be a share in \[0, 1\), got -0.1", options(drop_ratio=-0.1)),
        (ValueError, "drop_ratio must be a share", options(drop_ratio=1.0)), (ValueError, "drop_ratio must be a share", options(drop_ratio=float("nan"))),
        (TypeError, "drop_ratio must be a number", options(drop_ratio="a")), (ValueError, "warm_up_steps", options(warm_up_steps=-1)),
        (ValueError, "at_least_every", options(at_least_every=-1)), (ValueError, "fragment_elements", options(fragment_elements=-4096)),
        (ValueError, "value must be one of", options(value="signed_mean")),
        (TypeError, "at_least_every must be a number", options(at_least_every=1.5)), (ValueError, "at_least_every must lie in", options(at_least_every=2**70)),
        (ValueError, r"send_budget must be a share in \(0, 1\], got 0", options(send_budget=0)),
        (ValueError, "send_budget must be a share", options(send_budget=float("nan"))), (TypeError, "drop_rate", options(drop_rate=0.5)),
        (TypeError, "layer 'a'", layout({"a": (-1,)})), (TypeError, "layer 'a'", layout({"a": (1.5,)})),
        (TypeError, "names and shapes", layout({1: (2,)})), (TypeError, "names and shapes", layout({"a": "33"})),
        (ValueError, "1 rows for 2 layers", arrays([(0, 0)])), (ValueError, "layer 1 'bias' lies outside", arrays([(0, 0), (0, 13)])),
        (ValueError, "layer 1 'bias' lies outside", arrays([(0, 0), (1, 0)])), (ValueError, "layer 0 'weight' lies outside", arrays([(0, 2**63), (0, 0)])),
        (TypeError, "incompatible", arrays([(0, -1), (0, 0)])),
        (TypeError, "array 0 is not contiguous", arrays([(0, 0), (0, 12)], np.zeros((1, 32), np.float32)[:, ::2])))


def test_options_have_the_defaults_of_the_library():
    by_default, given = lamina.Worker(LAYOUT), lamina.Options()
    as_given = lamina.Worker(LAYOUT, **{field: getattr(given, field) for field in given.__dataclass_fields__})
    assert by_default.add(GRADIENTS).frame() == as_given.add(GRADIENTS).frame() and given.drop_ratio == 0.95


def test_options_become_numbers_of_python():
    given = lamina.Options(drop_ratio=np.float64(0.5), at_least_every=np.int64(3), send_budget=np.float32(0.5))
    assert [type(value) for value in (given.drop_ratio, given.at_least_every, given.send_budget)] == [float, int, float]


def test_a_step_that_is_let_go_stays_in_the_residual():
    made = lamina.Worker(LAYOUT)
    made.add(GRADIENTS)
    again, saved = lamina.Worker(LAYOUT), made.save()
    damaged = bytearray(saved)
    damaged[100] ^= 1
    ranks.refused((lamina.DecodeError, "checksum|finite|NaN", lambda: again.load(damaged)))
    again.load(saved)
    assert again.steps == 0 and np.all(np.asarray(again.residual(0)) == 1)


def test_calls_out_of_order():
    made = lamina.Worker(LAYOUT)
    assert made.plan() == [0, 1]  # nothing is known yet
    step = made.begin()
    ranks.refused(*((RuntimeError, None, call) for call in (step.select, step.commit, step.frame, step.values, made.begin, made.save, made.plan)),
                  (IndexError, "layer index 2", lambda: step.add(2, np.zeros(1, np.float32))))
    step.add_all(GRADIENTS)
    step.frame()
    step.commit()
    ranks.refused((RuntimeError, "step 1 is over", step.commit))


def test_one_object_is_used_by_one_thread_at_a_time():
    layout = lamina.Layout({"a": (4_000_000,)})
    made, gradient, refused, begin = lamina.Worker(layout), [np.ones(4_000_000, np.float32)], [], threading.Barrier(2)

    def add(_):
        begin.wait()
        for _ in range(50):
            try:
                made.add(gradient)
            except RuntimeError as error:
                refused.append(str(error))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(add, range(2)))
    assert refused and any("another thread uses this object" in text for text in refused)
    assert np.asarray(made.residual(0))[-1] == 100 - len(refused)


def test_a_frame_that_cannot_be_taken_is_refused():
    frame, server = a_step().frame(), lamina.Server(LAYOUT)
    server.add(frame)
    ranks.refused(
        *((lamina.DecodeError, ".", lambda bad=bad: lamina.decode(bytearray(bad), LAYOUT)) for bad in (b"", b"abc", b"\0" * 64)),
        (lamina.DecodeError, "another model", lambda: lamina.decode(frame, lamina.Layout({"weight": (4, 3), "bias": (4,)}))),
        (lamina.DecodeError, "taken already", lambda: server.add(frame)))
    assert server.workers == [0]


def test_half_width_packing_loses_nothing():
    made = lamina.Worker(lamina.Layout({"a": (5000,)}), drop_ratio=0.0, payload="float16")
    gradient = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    step = made.add([gradient])
    step.select()
    packed = np.empty(5000, np.float16)
    ranks.refused((ValueError, "scaled", lambda: step.pack(packed, 0.5)))
    step.pack(packed)
    step.commit()
    waits = np.asarray(made.residual(0))
    assert np.any(waits)
    np.testing.assert_array_equal(packed.astype(np.float32) + waits, gradient)
    step = lamina.Worker(lamina.Layout({"a": (5000,)}), payload="bfloat16").add([gradient])
    step.select()
    ranks.refused((ValueError, "payload", lambda: step.pack(packed)))
