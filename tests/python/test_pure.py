# SPDX-License-Identifier: MIT
"""The package that LAMINA_PURE=1 makes, without the extension: what it decides, what it trains, and what it refuses by name."""

import hashlib
import os
import pathlib
import random
import subprocess
import sys
import zipfile

import pytest
import torch
import torch.distributed as dist

import lamina
import lamina._pure
import lamina.torch
import models
import ranks

OPTIONS = {
    "drop_ratio": {"drop_ratio": 0.7}, "everything": {"drop_ratio": 0.0}, "warm_up_steps": {"drop_ratio": 0.9, "warm_up_steps": 5},
    "search_every": {"drop_ratio": 0.6, "search_every": 4}, "send_budget": {"send_budget": 0.2},
    "at_least_every": {"drop_ratio": 0.9, "at_least_every": 3}, "budget and age": {"send_budget": 0.1, "at_least_every": 4},
    "by_score": {"drop_ratio": 0.8, "by_score": True}, "budget by score": {"send_budget": 0.15, "by_score": True},
    "fragments": {"send_budget": 0.1, "fragment_elements": 4096}, "momentum": {"drop_ratio": 0.5, "momentum": 0.9}}
SHAPES = {"a": (70, 100), "a[0]": (3,), "b]": (33, 4), "empty": (0,), "large": (9000,), "one": (), "ü": (4096,)}
VALUES = [0.0, -0.0, 1.0, 1.0, 2.0, 0.25, float("inf"), float("nan"), 1e-300]


@pytest.mark.parametrize("options", OPTIONS)
def test_decisions_and_states_are_bitwise_the_extensions(options):
    made = random.Random(options)
    one, other = (module.Selector(module.Layout(SHAPES), **OPTIONS[options]) for module in (lamina, lamina._pure))
    assert (other.fragments.names, other.fragments.sizes, other.fragments.fingerprint) == (
        one.fragments.names, one.fragments.sizes, one.fragments.fingerprint)
    count, elements = len(one.fragments), one.fragments.elements
    assert [other.fragments_of(layer) for layer in range(len(SHAPES))] == [one.fragments_of(layer) for layer in range(len(SHAPES))]
    residual = torch.randn(elements)
    velocity = residual + 1 if "momentum" in OPTIONS[options] else None
    for step in range(1, 40):
        if made.random() < 0.1:
            sent = [fragment for fragment in range(count) if made.random() < 0.3]
            one.take(step, sent), other.take(step, sent)
        for _ in range(made.choice((1, 1, 2))):  # a step may be decided anew
            values = torch.tensor([made.choice(VALUES) if made.random() < 0.5 else made.random() for _ in range(count)], dtype=torch.float64)
            held = made.choice((None, bytes(made.random() < 0.2 for _ in range(count))))
            assert other.decide(step, values, held) == one.decide(step, values, held)
            assert (repr(other.threshold), other.sent_elements, other.sent_bitmap) == (repr(one.threshold), one.sent_elements, one.sent_bitmap)
        values = torch.rand(count, dtype=torch.float64)
        assert bytes(other.forecast(step, values)) == bytes(memoryview(one.forecast(step, values)).cast("B"))
        one.commit(step), other.commit(step)
        if made.random() < 0.3:  # each goes on with the other's
            saved = [each.save(step, residual, velocity, values) for each in (other, one)]
            loaded = [[bytes(memoryview(part).cast("B")) if len(part) else b"" for part in found[1:]]
                      for found in (each.load(state) for each, state in zip((one, other), saved))]
            assert loaded[0] == loaded[1] and loaded[0][0] == residual.numpy().tobytes()
    state, residual[5] = one.save(39, residual), torch.nan
    for wrong in (state[:-1], state + b"1", b"1" + state[1:], state[:16] + b"12345678" + state[24:]):
        with pytest.raises((lamina.DecodeError, lamina._pure.DecodeError)):
            other.load(wrong)
    with pytest.raises(ValueError, match="residual holds NaN or infinity"):
        other.save(1, residual)


@pytest.mark.parametrize("options, message", [({"drop_ratio": 1.5}, "drop ratio"), ({"search_every": 0}, "search_every"),
                                              ({"send_budget": 0.0}, "send_budget"), ({"fragment_elements": 5}, "fragment_elements")])
def test_options_are_refused_alike(options, message):
    said = []
    for module in (lamina, lamina._pure):
        with pytest.raises(ValueError, match=message) as refused:
            module.Selector(module.Layout({"a": (1,)}), **options)
        said.append(str(refused.value))
    assert said[0] == said[1]


@pytest.fixture(scope="module")
def pure(tmp_path_factory):
    """Where the package lies unpacked."""
    if "LAMINA_DIST" not in os.environ:
        pytest.skip("LAMINA_DIST is not set: tests/python/run makes the package")
    wheel, folder = next(pathlib.Path(os.environ["LAMINA_DIST"]).glob("pure/*.whl")), tmp_path_factory.mktemp("pure")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    assert not list(folder.rglob("*.so"))
    return folder


def trains(which, store):
    """A program: prints the models that the hook and local updates have trained."""
    assert lamina.HAS_EXTENSION == (which == "extension")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    torch.set_num_threads(1)
    backend, model, other = "torch" if lamina.HAS_EXTENSION else "auto", models.small(), models.small()
    ddp, state = models.dropping(model, drop_ratio=0.6, backend=backend)
    models.train(ddp, 6)
    local = lamina.torch.LocalUpdates(torch.optim.AdamW(other.parameters(), 0.01), send_budget=0.3, payload="ternary", delay=2, backend=backend)
    models.train_local(other, local, 6)
    for each in (state, local):
        each.load_state_dict(each.state_dict())
    print(*(hashlib.sha1(models.bits(each)).hexdigest() for each in (model, other)), flush=True)
    os._exit(0)  # gloo may abort where all is done


if __name__ == "__main__":
    trains(*sys.argv[1:])


def test_it_trains_as_with_the_extension(pure, tmp_path):
    outputs = {}
    for which, path in (("extension", pathlib.Path(lamina.__file__).parents[1]), ("pure", pure)):
        done = subprocess.run([sys.executable, "-B", __file__, which, str(tmp_path / which)], capture_output=True, text=True,
                              env={"PYTHONPATH": str(path), "GLOO_SOCKET_IFNAME": "lo"}, timeout=ranks.SECONDS)
        assert done.returncode == 0, done.stderr
        outputs[which] = done.stdout.split()
    assert outputs["pure"] == outputs["extension"] and len(set(outputs["pure"])) == 2


ASKS = """
import lamina.torch
for what in ("lamina.Worker", "lamina.merge_states", "from lamina import encode_payload", "lamina.torch._options.uses_cpu('cpu', 'cpu')"):
    try:
        exec(what)
    except ImportError as error:
        print(error)
"""


def test_what_needs_the_extension_says_so(pure):
    done = subprocess.run([sys.executable, "-c", ASKS], env={"PYTHONPATH": str(pure)}, capture_output=True, text=True)
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        f"{what} needs the extension lamina._core, which this installation was made without (LAMINA_PURE=1)"
        for what in ("lamina.Worker", "lamina.merge_states", "lamina.encode_payload", "backend 'cpu'")], done.stderr
