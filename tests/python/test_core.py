# SPDX-License-Identifier: MIT
"""lamina without torch: against the oracle, and what it refuses."""

import random
import threading

import numpy as np
import pytest

import lamina
import oracle


def any_layout(seed):
    chance = random.Random(seed)
    return lamina.Layout({f"layer {l}": (chance.choice([1, 7, 100, 4096, 9000]), chance.choice([1, 2, 3]))
                          for l in range(chance.randint(1, 12))})


@pytest.mark.parametrize("seed", range(50))
def test_a_step_is_algorithm_1(seed):
    layout, draw = any_layout(seed), np.random.default_rng(seed)
    cut = 4096 * (seed % 3)
    ratio = float(draw.uniform(0.1, 0.99))
    worker = lamina.Compressor(layout, drop_ratio=ratio, part_elements=cut)
    paper = oracle.Workers(1, layout.sizes, ratio, cut)
    for _ in range(4):
        gradients = [draw.standard_normal(size).astype(np.float32) for size in layout.sizes]
        worker.accumulate_all(gradients)
        values = worker.values().tolist()
        sent = worker.select()
        means, expected = paper.step([gradients])
        assert sent == expected
        assert values == pytest.approx([oracle.mean_abs(part) for part in
                                        parts_before(paper, means, expected, cut)], rel=1e-6)
        packed = np.empty(worker.sent_elements, np.float32)
        worker.pack(packed)
        worker.commit()
        out = [np.full(size, 9, np.float32) for size in layout.sizes]
        worker.scatter(packed, out)
        for layer, mean in enumerate(means):
            np.testing.assert_array_equal(out[layer], mean)
            np.testing.assert_array_equal(worker.residual(layer), paper.residuals[0][layer])


def parts_before(paper, means, sent, cut):
    """The residual's parts as they were before the step cleared what it sent."""
    index = 0
    for l, size in enumerate(paper.sizes):
        whole = paper.residuals[0][l] + means[l]
        for begin in range(0, size, cut or size):
            yield whole[begin:begin + (cut or size)]
            index += 1


def test_the_oracle_in_descending_order_is_another():
    values, sizes = [1.0, 2.0, 3.0], [10, 10, 10]
    assert oracle.threshold(values, sizes, 0.5) != oracle.threshold(values, sizes, 0.9, descending=True)
    worker = lamina.Compressor(lamina.Layout({"a": (10,), "b": (10,), "c": (10,)}), drop_ratio=0.5)
    worker.accumulate_all([np.full(10, value, np.float32) for value in values])
    worker.select()
    assert worker.threshold == oracle.threshold(values, sizes, 0.5) == 2.0
    assert worker.threshold != oracle.threshold(values, sizes, 0.9, descending=True)


def test_a_server_and_two_workers():
    dtype = np.float32
    layout = lamina.Layout({"weight": (30, 40), "bias": (40,)})
    parameters = [np.zeros(size, dtype) for size in layout.sizes]
    replicas = [[np.full(size, 7, dtype) for size in layout.sizes] for _ in range(2)]
    workers = [lamina.Compressor(layout, drop_ratio=0.5, sender=w) for w in range(2)]
    server = lamina.Aggregator(layout, 2)
    publisher = lamina.Publisher(layout, 2)
    given = np.zeros(layout.elements)
    for step in range(1, 6):
        for w, worker in enumerate(workers):
            gradients = [np.full(size, (w + 1) * (l + 1) * step, dtype) for l, size in enumerate(layout.sizes)]
            given += np.concatenate(gradients) / 2
            worker.accumulate_all(gradients)
            server.add(lamina.decode(worker.encode(), layout))
            worker.commit()
        assert server.is_complete and server.step == step
        for layer in server.arrived:
            mean = np.zeros(layout.sizes[layer], dtype)
            assert server.mean(layer, mean)
            parameters[layer] += mean
        publisher.update(server.arrived)
        server.next_step()
        frame = lamina.decode(publisher.encode_for_all(step, parameters), layout)
        publisher.commit_all()
        for replica in replicas:
            for layer, own in enumerate(replica):
                assert frame.apply_to(layer, own) == (layer in frame.sent)
                np.testing.assert_array_equal(own, parameters[layer])
    waiting = sum(np.concatenate([worker.residual(l) for l in range(2)]) for worker in workers) / 2
    np.testing.assert_array_equal(np.concatenate(parameters) + waiting, given)


def test_saved_bytes_go_on():
    layout = lamina.Layout({"a": (100,), "b": (5000,)})
    draw = np.random.default_rng(3)
    gradients = [[draw.standard_normal(size).astype(np.float32) for size in layout.sizes] for _ in range(6)]
    whole, first, second = (lamina.Compressor(layout, drop_ratio=0.7, momentum=0.9) for _ in range(3))
    frames = []
    for each in gradients:
        whole.accumulate_all(each)
        frames.append(whole.encode())
        whole.commit()
    for each in gradients[:3]:
        first.accumulate_all(each)
        first.encode()
        first.commit()
    second.load(first.save())
    for each, frame in zip(gradients[3:], frames[3:]):
        second.accumulate_all(each)
        assert second.encode() == frame
        second.commit()
    assert lamina.merge_states([whole.save(), whole.save()], layout) == whole.save()
    damaged = bytearray(whole.save())
    damaged[100] ^= 1
    with pytest.raises(lamina.DecodeError, match="checksum|finite|NaN"):
        first.load(damaged)


LAYOUT = lamina.Layout({"weight": (3, 4), "bias": (4,)})


def worker():
    made = lamina.Compressor(LAYOUT)
    made.accumulate_all([np.ones((3, 4), np.float32), np.ones(4, np.float32)])
    return made


@pytest.mark.parametrize("gradient, error, text", [
    (np.zeros((4, 3), np.float32).T, TypeError, "layer 0 'weight' is not contiguous"),
    (np.zeros(24, np.float32)[::2], TypeError, "layer 0 'weight' is not contiguous"),
    (np.zeros(12, np.int32), TypeError, "layer 0 'weight' is not of float32"),
    (np.zeros(12), ValueError, "another element type"),
    (np.zeros(11, np.float32), ValueError, r"'weight' has shape \[3, 4\]"),
    (np.full(12, np.nan, np.float32), ValueError, "'weight': the gradient holds NaN"),
    ([0.0] * 12, TypeError, "incompatible"),
])
def test_a_gradient_that_cannot_be_taken_is_named(gradient, error, text):
    made = lamina.Compressor(LAYOUT)
    with pytest.raises(error, match=text):
        made.accumulate(0, gradient)
    assert made.step == 0 and not np.any(made.residual(0))


def test_results_are_never_written_into_a_copy():
    made = worker()
    frame = lamina.decode(made.encode(), LAYOUT)
    strided = np.zeros(24, np.float32)
    for refused in (strided[::2], np.zeros((4, 3), np.float32).T, np.zeros(12)):
        with pytest.raises((TypeError, ValueError)):
            frame.restore(0, refused)
        assert not np.any(refused)
    read_only = np.zeros(12, np.float32)
    read_only.flags.writeable = False
    with pytest.raises(TypeError):
        frame.restore(0, read_only)
    with pytest.raises(TypeError):
        made.pack(np.zeros(32, np.float32)[::2])


@pytest.mark.parametrize("arrays, table, error, text", [
    ([16], [(0, 0)], ValueError, "1 rows for 2 layers"),
    ([16], [(0, 0), (0, 13)], ValueError, "layer 1 'bias' lies outside"),
    ([16], [(0, 0), (1, 0)], ValueError, "layer 1 'bias' lies outside"),
    ([16], [(0, 2**63), (0, 0)], ValueError, "layer 0 'weight' lies outside"),
    ([16], [(0, -1), (0, 0)], TypeError, "incompatible"),
    (np.zeros((1, 32), np.float32)[:, ::2], [(0, 0), (0, 12)], TypeError, "array 0 is not contiguous"),
])
def test_a_table_lies_within_its_arrays(arrays, table, error, text):
    if isinstance(arrays, list):
        arrays = [np.zeros(size, np.float32) for size in arrays]
    with pytest.raises(error, match=text):
        lamina.Gradients(LAYOUT, list(arrays), table)


@pytest.mark.parametrize("options, text", [
    ({"drop_ratio": 1.5}, "drop ratio"), ({"drop_ratio": float("nan")}, "drop ratio"), ({"byte_budget": 0.0}, "budget"),
    ({"refresh_every": 0}, "refresh"), ({"part_elements": 100}, "part_elements"), ({"momentum": 1.0}, "momentum"),
    ({"value": "median"}, "value must be one of"), ({"check": "x"}, "check must be one of"),
    ({"payload": "int5"}, "payload must be one of"), ({"value": "signed_mean"}, "value must be one of"),
    ({"always_sent": [2]}, "always_sent"),
])
def test_an_option_outside_its_range_is_named(options, text):
    with pytest.raises(ValueError, match=text):
        lamina.Compressor(LAYOUT, **options)


@pytest.mark.parametrize("options, error, text", [
    ({"drop_ratio": -0.1}, ValueError, r"drop_ratio must be a share in \[0, 1\), got -0.1"), ({"warm_up_steps": -1}, ValueError, "warm_up_steps"),
    ({"max_age": -1}, ValueError, "max_age"), ({"part_elements": -4096}, ValueError, "part_elements"),
    ({"drop_ratio": "a"}, TypeError, "drop_ratio must be a number"),
    ({"max_age": 1.5}, TypeError, "max_age must be a number"), ({"max_age": 2**70}, ValueError, "max_age must lie in"),
    ({"drop_ratio": None}, TypeError, "drop_ratio must be a number"), ({"drop_ratio": 1.0}, ValueError, "drop_ratio must be a share"),
    ({"drop_ratio": 95}, ValueError, "drop_ratio must be a share"), ({"drop_ratio": float("nan")}, ValueError, "drop_ratio must be a share"),
    ({"byte_budget": 0}, ValueError, r"byte_budget must be a share in \(0, 1\], got 0"), ({"byte_budget": 4}, ValueError, "byte_budget must be a share"),
    ({"byte_budget": float("nan")}, ValueError, "byte_budget must be a share"),
    ({"drop_rate": 0.5}, TypeError, "drop_rate"),
])
def test_options_are_checked_where_they_are_made(options, error, text):
    with pytest.raises(error, match=text):
        lamina.Options(**options)


def test_options_have_the_defaults_of_the_library():
    by_default, given = lamina.Compressor(LAYOUT), lamina.Options()
    as_given = lamina.Compressor(LAYOUT, **{field: getattr(given, field) for field in given.__dataclass_fields__})
    for made in (by_default, as_given):
        made.accumulate_all([np.ones((3, 4), np.float32), np.ones(4, np.float32)])
    assert by_default.encode() == as_given.encode() and given.drop_ratio == 0.95


def test_options_become_numbers_of_python():
    given = lamina.Options(drop_ratio=np.float64(0.5), max_age=np.int64(3), byte_budget=np.float32(0.5))
    assert [type(value) for value in (given.drop_ratio, given.max_age, given.byte_budget)] == [float, int, float]


@pytest.mark.parametrize("shapes, text", [({"a": (-1,)}, "layer 'a'"), ({"a": (1.5,)}, "layer 'a'"), ({1: (2,)}, "names and shapes"),
                                          ({"a": "33"}, "names and shapes")])
def test_a_layout_is_of_names_and_shapes(shapes, text):
    with pytest.raises(TypeError, match=text):
        lamina.Layout(shapes)


def test_bytes_are_never_copied():
    frame = np.frombuffer(worker().encode(), np.uint8)
    spread = np.zeros(2 * frame.size, np.uint8)
    spread[::2] = frame
    with pytest.raises(TypeError):
        lamina.decode(spread[::2], LAYOUT)
    assert lamina.decode(frame, LAYOUT).sent == [0, 1]


def test_a_step_that_is_abandoned_waits_in_the_residual():
    made = worker()
    made.abandon()
    again = lamina.Compressor(LAYOUT)
    again.load(made.save())
    assert again.step == 1 and np.all(np.asarray(again.residual(0)) == 1)


def test_calls_out_of_order():
    made = lamina.Compressor(LAYOUT)
    for call in (made.select, made.commit, made.encode):
        with pytest.raises(RuntimeError):
            call()
    made = worker()
    with pytest.raises(IndexError, match="layer index 2"):
        made.accumulate(2, np.zeros(1, np.float32))
    with pytest.raises(RuntimeError, match="encoded"):
        made.save()


@pytest.mark.parametrize("bad", [b"", b"abc", b"\0" * 64])
def test_bytes_that_are_no_frame(bad):
    with pytest.raises(lamina.DecodeError):
        lamina.decode(bytearray(bad), LAYOUT)


def test_a_frame_of_another_model_is_refused():
    frame = worker().encode()
    with pytest.raises(lamina.DecodeError, match="another model"):
        lamina.decode(frame, lamina.Layout({"weight": (4, 3), "bias": (4,)}))
    server = lamina.Aggregator(LAYOUT, 2, dtype="float64")
    with pytest.raises(ValueError, match="another dtype"):
        server.add(lamina.decode(frame, LAYOUT))


def test_half_width_packing_loses_nothing():
    made = lamina.Compressor(lamina.Layout({"a": (5000,)}), drop_ratio=0.0, payload="float16")
    gradient = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    made.accumulate(0, gradient)
    made.select()
    packed = np.empty(5000, np.float16)
    with pytest.raises(ValueError, match="divided"):
        made.pack(packed, 2.0)
    made.pack(packed)
    made.commit()
    waits = np.asarray(made.residual(0))
    assert np.any(waits)
    np.testing.assert_array_equal(packed.astype(np.float32) + waits, gradient)
    other = lamina.Compressor(lamina.Layout({"a": (5000,)}), payload="bfloat16")
    other.accumulate(0, gradient)
    other.select()
    with pytest.raises(ValueError, match="payload"):
        other.pack(packed)


def test_what_was_not_packed_ahead_is_not_taken_for_it():
    worker = lamina.Compressor(LAYOUT)
    worker.accumulate_all([np.ones(size, np.float32) for size in LAYOUT.sizes])
    worker.select()
    with pytest.raises(RuntimeError, match="decide is not ahead"):
        worker.use_ahead()
    assert worker.residual(0)[0] == 1


def test_two_threads_that_use_one_object_are_told():
    worker = lamina.Compressor(lamina.Layout({"a": (30_000_000,)}), drop_ratio=0)
    gradient, told = np.ones(30_000_000, np.float32), []
    adding = threading.Thread(target=worker.accumulate, args=(0, gradient))
    adding.start()
    while adding.is_alive() and not told:
        try:
            worker.values()
        except RuntimeError as error:
            told.append(str(error))
    adding.join()
    assert told == ["another thread is using this object: one at a time"]
    assert worker.values()[0] == 1  # what the first has done is not disturbed
