# SPDX-License-Identifier: MIT
"""examples/method.py and the library are the same method, bitwise: values, thresholds, layers sent, residuals, means, replies."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import lamina

ROOT = pathlib.Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("method", ROOT / "examples/method.py")
method = importlib.util.module_from_spec(spec)
spec.loader.exec_module(method)


def bits(array):
    return np.asarray(array).tobytes()


@pytest.mark.parametrize("drop_ratio", [0.5, 0.95])
def test_three_workers_and_a_server_are_those_of_the_library(drop_ratio):
    sizes, workers, draw = [*method.SIZES, 1, 65, 300_000], 3, np.random.default_rng(1)
    layout = lamina.Layout({f"layer {l}": (n,) for l, n in enumerate(sizes)})
    own = [method.Worker(sizes, drop_ratio) for _ in range(workers)]
    theirs = [lamina.Worker(layout, drop_ratio=drop_ratio, sender=w) for w in range(workers)]
    server, their_server = method.Server(method.zeros(sizes)), lamina.Server(layout, workers=workers)
    parameters, mean = method.zeros(sizes), method.zeros(sizes)
    replicas, scales = [method.zeros(sizes) for _ in own], draw.lognormal(size=len(sizes))
    dropped = 0
    for step in range(9):
        frames = []
        if step > 0:
            for one, other in zip(own, theirs):
                gradients = [(scale * draw.standard_normal(n)).astype(np.float32) for scale, n in zip(scales, sizes)]
                frame, their_step = one.frame(gradients), other.add(gradients)
                assert bits(their_step.values()) == bits(one.values)
                data = their_step.frame()
                assert their_step.sent == sorted(frame) and bits(other.threshold) == bits(one.threshold)
                assert len(data) == method.frame_bytes(frame, sizes)
                decoded = lamina.decode(data, layout)
                for l in frame:
                    layer = np.empty(sizes[l], np.float32)
                    decoded.restore(l, layer)
                    assert bits(layer) == bits(frame[l])
                their_server.add(data)
                their_step.commit()
                one.commit(frame)
                frames.append(frame)
                dropped += len(sizes) - len(frame)
                assert all(bits(other.residual(l)) == bits(a) for l, a in enumerate(one.residual))
            server.update(frames)
            for l in their_server.update(mean):
                parameters[l] -= method.RATE * mean[l]
        reply = server.reply()
        for w, one in enumerate(own):
            one.receive({l: x.copy() for l, x in reply.items()})
            their_reply = their_server.reply(w, parameters)
            assert len(their_reply.bytes) == method.frame_bytes(reply, sizes)
            decoded = lamina.decode(their_reply.bytes, layout)
            assert decoded.sent == sorted(reply)
            for l, replica in enumerate(replicas[w]):
                decoded.apply_to(l, replica)
                assert bits(replica) == bits(one.parameters[l]) == bits(server.parameters[l])
            their_server.commit(w, their_reply.clock)
    assert 0 < dropped < 8 * workers * len(sizes)


def test_it_prints_what_the_quickstart_prints():
    """Whose end examples.quickstart compares with the same text."""
    end = re.search(r'LAMINA_QUICKSTART_OUTPUT\s*"([^"]*)"', (ROOT / "tests/CMakeLists.txt").read_text())[1].replace("\\n", "\n")
    printed = subprocess.run([sys.executable, str(ROOT / "examples/method.py")], check=True, capture_output=True, text=True).stdout
    assert len(end) > 100 and re.search(end, printed)
