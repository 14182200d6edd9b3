# SPDX-License-Identifier: MIT
"""Slices of parts for their owners, and payloads without a frame."""

import numpy as np
import pytest

import lamina

PARTS = lamina.Layout({"a": (300,), "b": (5,), "c": (64,), "d": (0,), "e": (1000,)})


@pytest.mark.parametrize("owners", [1, 2, 3, 7])
def test_every_element_has_one_owner(owners):
    slices = lamina.Slices(PARTS, owners)
    assert slices.owners == owners
    for sent in ([0, 1, 2, 3, 4], [1, 4], [3], []):
        sizes = [PARTS.sizes[part] for part in sent]
        elements = np.arange(sum(sizes), dtype=np.float32)
        again = np.full_like(elements, -1)
        for owner in range(owners):
            own = slices.of(owner)
            taken = np.empty(sum(own.sizes[part] for part in sent), np.float32)
            slices.take(owner, sent, elements, taken)
            offsets = np.cumsum([0, *sizes])
            expected = [elements[offset + slices.begin(owner, part):][:own.sizes[part]] for offset, part in zip(offsets, sent)]
            np.testing.assert_array_equal(taken, np.concatenate(expected or [elements]))
            assert all(slices.begin(owner, part) % 64 == 0 for part in sent if own.sizes[part])
            assert (again[np.isin(elements, taken)] == -1).all()  # nobody else's
            slices.put(owner, sent, taken, again)
        np.testing.assert_array_equal(again, elements)


@pytest.mark.parametrize("payload, bits, error", [("as_is", 32, 0), ("float16", 16, 2**-11), ("bfloat16", 16, 2**-8),
                                                  ("int8", 8, 1 / 127), ("int4", 4, 1 / 7)])
def test_a_payload_is_what_stands_in_a_frame(payload, bits, error):
    sent = [0, 1, 2, 4]
    elements = np.random.default_rng(0).standard_normal(1369).astype(np.float32)
    there = lamina.encode_payload(PARTS, sent, elements, payload)
    blocks = {"int8": 23, "int4": 23}.get(payload, 0)  # of 64 elements, the last of a part shorter: 5, 1, 1 and 16
    assert len(there) == lamina.payload_bytes(PARTS, sent, payload) == blocks + (1369 * bits + 7) // 8
    again = np.empty_like(elements)
    lamina.decode_payload(PARTS, sent, there, payload, again)
    assert (np.abs(again - elements) <= error * np.abs(elements).max()).all() and (error == 0) == (again == elements).all()
    assert lamina.encode_payload(PARTS, sent, again, payload) == there  # whose numbers it can say
    # The same bytes as in the frame of a worker whose drift this is.
    local = [np.zeros(size, np.float32) for size in PARTS.sizes]
    for part, piece in zip(sent, np.split(elements, np.cumsum([PARTS.sizes[part] for part in sent])[:-1])):
        local[part] = -piece
    worker = lamina.DriftCompressor(PARTS, drop_ratio=0, payload=payload)
    shared = [np.zeros_like(each) for each in local]
    worker.observe_all(shared, local)
    worker.select()
    assert worker.encode(shared, local).endswith(there)


def test_what_does_not_fit_is_named():
    slices, four, none = lamina.Slices(PARTS, 2), np.zeros(4, np.float32), np.zeros(0, np.float32)
    b = np.zeros(5, np.float32)
    for error, message, call in [
            (ValueError, "at least one owner", lambda: lamina.Slices(PARTS, 0)),
            (IndexError, "owner 2 is out of range: there are 2", lambda: slices.of(2)),
            (IndexError, "5", lambda: slices.begin(0, 5)),
            (IndexError, "owner 2", lambda: slices.take(2, [1], b, none)),
            (ValueError, "elements has 4 elements, what is sent 5", lambda: slices.take(0, [1], four, none)),
            (ValueError, "to has 4 elements, what is sent", lambda: slices.take(0, [1], b, four)),
            (ValueError, "slices has 4 elements, what is sent", lambda: slices.put(0, [1], four, b)),
            (ValueError, "layer 1 comes behind layer 1", lambda: slices.put(0, [1, 1], b, b)),
            (TypeError, "to must be of float32", lambda: slices.take(0, [1], b, b.astype(np.float64))),
            (ValueError, "payload must be one of as_is, float16, bfloat16, int8, int4, got 'int5'",
             lambda: lamina.encode_payload(PARTS, [1], b, "int5")),
            (ValueError, "payload must be one of", lambda: lamina.payload_bytes(PARTS, [1], "x")),
            (ValueError, "layer 0 comes behind layer 4", lambda: lamina.payload_bytes(PARTS, [4, 0], "int8")),
            (IndexError, "5", lambda: lamina.payload_bytes(PARTS, [5], "int8")),
            (ValueError, "elements has 5 elements, what is sent 64", lambda: lamina.encode_payload(PARTS, [2], b, "int8")),
            (ValueError, "there are 5 bytes, what is sent has 6", lambda: lamina.decode_payload(PARTS, [1], bytes(5), "int8", b)),
            (ValueError, "there are 5 bytes, what is sent has 20", lambda: lamina.decode_payload(PARTS, [1], bytes(5), "as_is", b)),
            (TypeError, "elements is not contiguous", lambda: lamina.encode_payload(PARTS, [1], np.zeros(10, np.float32)[::2], "int8"))]:
        with pytest.raises(error, match=message):
            call()
    assert not b.any()
