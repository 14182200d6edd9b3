# SPDX-License-Identifier: MIT
"""lamina without torch: what it does besides tests/python/test_method.py, and what it refuses."""

import threading

import numpy as np
import pytest

import lamina


def test_an_asynchronous_server_and_two_workers():
    layout = lamina.Layout({"weight": (30, 40), "bias": (40,)})
    parameters = [np.zeros(size, np.float32) for size in layout.sizes]
    replicas = [[np.full(size, 7, np.float32) for size in layout.sizes] for _ in range(2)]
    workers = [lamina.Worker(layout, drop_ratio=0.5, sender=w) for w in range(2)]
    server = lamina.Server(layout, 2, asynchronous=True)
    given = np.zeros(layout.elements)
    for number in range(1, 6):
        for w, worker in enumerate(workers):
            gradients = [np.full(size, (w + 1) * (l + 1) * number, np.float32) for l, size in enumerate(layout.sizes)]
            given += np.concatenate(gradients) / 2
            step = worker.add(gradients)
            server.add(step.frame(b"loss"))
            step.commit()
            mean = [np.full(size, 9, np.float32) for size in layout.sizes]
            arrived = server.update(mean)
            assert all(np.all(mean[layer] == 9) for layer in range(2) if layer not in arrived)
            for layer in arrived:
                parameters[layer] += mean[layer]
            assert server.workers == [w]
            reply = server.reply(w, parameters)
            frame = lamina.decode(reply.bytes, layout)
            for layer, own in enumerate(replicas[w]):
                assert frame.apply_to(layer, own) == (layer in frame.sent)
                np.testing.assert_array_equal(own, parameters[layer])
            server.commit(w, reply.clock)
    waiting = sum(np.concatenate([worker.residual(l) for l in range(2)]) for worker in workers) / 2
    np.testing.assert_array_equal(np.concatenate(parameters) + waiting, given)


def frames_of(worker, gradients):
    frames = []
    for each in gradients:
        step = worker.add(each)
        frames.append(step.frame())
        step.commit()
    return frames


def test_saved_bytes_go_on():
    layout = lamina.Layout({"a": (100,), "b": (5000,)})
    draw = np.random.default_rng(3)
    gradients = [[draw.standard_normal(size).astype(np.float32) for size in layout.sizes] for _ in range(6)]
    whole, first, second = (lamina.Worker(layout, drop_ratio=0.7, momentum=0.9) for _ in range(3))
    frames = frames_of(whole, gradients)
    frames_of(first, gradients[:3])
    second.load(first.save())
    assert frames_of(second, gradients[3:]) == frames[3:]
    assert lamina.merge_states([whole.save(), whole.save()], layout) == whole.save()
    damaged = bytearray(whole.save())
    damaged[100] ^= 1
    with pytest.raises(lamina.DecodeError, match="checksum|finite|NaN"):
        first.load(damaged)


def test_a_step_that_was_planned():
    layout = lamina.Layout({"a": (4,), "b": (6,), "c": (5000,)})
    worker = lamina.Worker(layout, drop_ratio=0.6, fragment_elements=4096)
    assert worker.plan() == [0, 1, 2, 3]  # nothing is known yet
    taken, counts = [np.zeros(size, np.float32) for size in layout.sizes], []
    for number in range(1, 6):
        sent = worker.plan()
        step = worker.begin(sent)
        assert step.sent == sent
        for layer in (2, 1, 0):
            assert step.add(layer, np.full(layout.sizes[layer], layer + number, np.float32))
            elements = sum(worker.fragments.sizes[f] for f in range(*worker.fragments_of(layer)) if f in sent)
            packed = np.empty(elements, np.float32)
            assert step.pack_layer(layer, packed) == elements
            taken[layer][:elements] += packed if elements == layout.sizes[layer] else 0
        counts.append(step.sent_elements)
        step.commit()
    assert counts[0] == layout.elements and 0 < min(counts) < layout.elements
    assert np.all(taken[0] + worker.residual(0) == 15)


def test_a_refused_gradient_is_a_result():
    worker = lamina.Worker(LAYOUT)
    step = worker.add([np.ones((3, 4), np.float32), np.full(4, np.nan, np.float32)])
    assert not step and step.refused_layer == 1 and worker.steps == 0 and not np.any(worker.residual(0))
    step = worker.begin()
    assert not step.add(0, np.full(12, np.inf, np.float32)) and step.refused_layer == 0
    assert step.add(0, np.ones(12, np.float32)) and step and step.refused_layer is None


LAYOUT = lamina.Layout({"weight": (3, 4), "bias": (4,)})


def a_step():
    return lamina.Worker(LAYOUT).add([np.ones((3, 4), np.float32), np.ones(4, np.float32)])


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


def test_results_are_never_written_into_a_copy():
    step = a_step()
    frame = lamina.decode(step.frame(), LAYOUT)
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
        step.pack(np.zeros(32, np.float32)[::2])


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
        lamina.Arrays(LAYOUT, list(arrays), table)


@pytest.mark.parametrize("options, text", [
    ({"drop_ratio": 1.5}, "drop ratio"), ({"send_budget": 0.0}, "budget"), ({"search_every": 0}, "search_every"),
    ({"fragment_elements": 100}, "fragment_elements"), ({"momentum": 1.0}, "momentum"),
    ({"value": "median"}, "value must be one of"), ({"non_finite": "x"}, "non_finite must be one of"),
    ({"payload": "int5"}, "payload must be one of"),
    ({"always_sent": [2]}, "always_sent"),
])
def test_an_option_outside_its_range_is_named(options, text):
    with pytest.raises(ValueError, match=text):
        lamina.Worker(LAYOUT, **options)


@pytest.mark.parametrize("options, error, text", [
    ({"drop_ratio": -0.1}, ValueError, r"drop_ratio must be a share in \[0, 1\), got -0.1"), ({"warm_up_steps": -1}, ValueError, "warm_up_steps"),
    ({"at_least_every": -1}, ValueError, "at_least_every"), ({"fragment_elements": -4096}, ValueError, "fragment_elements"),
    ({"value": "signed_mean"}, ValueError, "value must be one of"), ({"drop_ratio": "a"}, TypeError, "drop_ratio must be a number"),
    ({"at_least_every": 1.5}, TypeError, "at_least_every must be a number"), ({"at_least_every": 2**70}, ValueError, "at_least_every must lie in"),
    ({"drop_ratio": 1.0}, ValueError, "drop_ratio must be a share"), ({"drop_ratio": float("nan")}, ValueError, "drop_ratio must be a share"),
    ({"send_budget": 0}, ValueError, r"send_budget must be a share in \(0, 1\], got 0"),
    ({"send_budget": float("nan")}, ValueError, "send_budget must be a share"),
    ({"drop_rate": 0.5}, TypeError, "drop_rate"),
])
def test_options_are_checked_where_they_are_made(options, error, text):
    with pytest.raises(error, match=text):
        lamina.Options(**options)


def test_options_have_the_defaults_of_the_library():
    by_default, given = lamina.Worker(LAYOUT), lamina.Options()
    as_given = lamina.Worker(LAYOUT, **{field: getattr(given, field) for field in given.__dataclass_fields__})
    gradients = [np.ones((3, 4), np.float32), np.ones(4, np.float32)]
    assert by_default.add(gradients).frame() == as_given.add(gradients).frame() and given.drop_ratio == 0.95


def test_options_become_numbers_of_python():
    given = lamina.Options(drop_ratio=np.float64(0.5), at_least_every=np.int64(3), send_budget=np.float32(0.5))
    assert [type(value) for value in (given.drop_ratio, given.at_least_every, given.send_budget)] == [float, int, float]


@pytest.mark.parametrize("shapes, text", [({"a": (-1,)}, "layer 'a'"), ({"a": (1.5,)}, "layer 'a'"), ({1: (2,)}, "names and shapes"),
                                          ({"a": "33"}, "names and shapes")])
def test_a_layout_is_of_names_and_shapes(shapes, text):
    with pytest.raises(TypeError, match=text):
        lamina.Layout(shapes)


def test_bytes_are_never_copied():
    frame = np.frombuffer(a_step().frame(), np.uint8)
    spread = np.zeros(2 * frame.size, np.uint8)
    spread[::2] = frame
    with pytest.raises(TypeError):
        lamina.decode(spread[::2], LAYOUT)
    assert lamina.decode(frame, LAYOUT).sent == [0, 1]


def test_a_step_that_is_let_go_stays_in_the_residual():
    made = lamina.Worker(LAYOUT)
    made.add([np.ones((3, 4), np.float32), np.ones(4, np.float32)])
    again = lamina.Worker(LAYOUT)
    again.load(made.save())
    assert again.steps == 0 and np.all(np.asarray(again.residual(0)) == 1)


def test_calls_out_of_order():
    made = lamina.Worker(LAYOUT)
    step = made.begin()
    for call in (step.select, step.commit, step.frame, step.values, made.begin, made.save, made.plan):
        with pytest.raises(RuntimeError):
            call()
    with pytest.raises(IndexError, match="layer index 2"):
        step.add(2, np.zeros(1, np.float32))
    step.add_all([np.ones(12, np.float32), np.ones(4, np.float32)])
    step.frame()
    step.commit()
    with pytest.raises(RuntimeError, match="step 1 is over"):
        step.commit()


def test_one_object_is_used_by_one_thread_at_a_time():
    layout = lamina.Layout({"a": (4_000_000,)})
    made, gradient, refused, begin = lamina.Worker(layout), [np.ones(4_000_000, np.float32)], [], threading.Barrier(2)

    def add():
        begin.wait()
        for _ in range(50):
            try:
                made.add(gradient)
            except RuntimeError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=add) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert refused and any("another thread uses this object" in text for text in refused)
    assert np.asarray(made.residual(0))[-1] == 100 - len(refused)


@pytest.mark.parametrize("bad", [b"", b"abc", b"\0" * 64])
def test_bytes_that_are_no_frame(bad):
    with pytest.raises(lamina.DecodeError):
        lamina.decode(bytearray(bad), LAYOUT)


def test_a_frame_of_another_model_is_refused():
    frame = a_step().frame()
    with pytest.raises(lamina.DecodeError, match="another model"):
        lamina.decode(frame, lamina.Layout({"weight": (4, 3), "bias": (4,)}))
    server = lamina.Server(LAYOUT)
    server.add(frame)
    with pytest.raises(lamina.DecodeError, match="taken already"):
        server.add(frame)


def test_half_width_packing_loses_nothing():
    made = lamina.Worker(lamina.Layout({"a": (5000,)}), drop_ratio=0.0, payload="float16")
    gradient = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    step = made.add([gradient])
    step.select()
    packed = np.empty(5000, np.float16)
    with pytest.raises(ValueError, match="scaled"):
        step.pack(packed, 0.5)
    step.pack(packed)
    step.commit()
    waits = np.asarray(made.residual(0))
    assert np.any(waits)
    np.testing.assert_array_equal(packed.astype(np.float32) + waits, gradient)
    step = lamina.Worker(lamina.Layout({"a": (5000,)}), payload="bfloat16").add([gradient])
    step.select()
    with pytest.raises(ValueError, match="payload"):
        step.pack(packed)
