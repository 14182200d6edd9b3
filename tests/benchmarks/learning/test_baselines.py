# SPDX-License-Identifier: MIT
"""What the schemes of others do, by their papers."""

import math

import pytest
import torch

import schemes
from baselines.demo import Tiles
from baselines.largest import place_bits
from optimizers import OPTIMIZERS
from payload import PAYLOADS
from rows import parsed
from toy import Toy

RATE = 0.5
MIXED = {"a": (8, 8), "b": (65, 2), "c": (70,), "d": (6, 11)}  # three matrices, and a vector that is sent whole
MATRICES = {"matrix": (15, 20), "vector": (30,)}
DECAYED = {"clip": 20.0, "is_decayed": lambda layer: layer in "bd"}
LAYERS = [(0, 64, 6), (64, 130, 13), (194, 70, 70), (264, 66, 7)]  # of MIXED: where they begin, elements, and a tenth of them or all


def made(text, shapes=None, **attributes):
    """A scheme on the toy, which may have layers and attributes in place of its own."""
    row = parsed(f"workers=4 steps=9 optimizer=sgd {text}")
    task = Toy(row)
    vars(task).update(attributes, **({"shapes": lambda: shapes} if shapes else {}))
    return schemes.SCHEMES[row.scheme](task, row)


def distinct(scheme):
    """No two elements are alike."""
    scheme.task.drawn += torch.rand(scheme.task.drawn.shape, generator=torch.Generator().manual_seed(1))
    return scheme


def place_bytes(size, count):
    return math.ceil(math.log2(math.comb(size, count)) / 8)


def power(text):
    return made(f"scheme=powersgd steps=40 {text}", MATRICES)


def test_powersgd_restores_gradients_of_its_rank_and_keeps_the_rest():
    scheme = power("rank=2")
    generator = torch.Generator().manual_seed(1)
    factors = torch.randn(40, 15, 2, generator=generator), torch.randn(40, 2, 20, generator=generator)
    scheme.task.drawn[:, :, :300] = (factors[0] @ factors[1]).flatten(1)[:, None]
    before = scheme.parameters().clone()
    assert scheme.step(1, 1.0).up_bytes == 4 * (2 * (15 + 20) + 30)
    assert torch.allclose(before - scheme.parameters(), scheme.task.drawn[0].mean(0), atol=1e-3)
    # What would not shrink to half goes out as it is.
    assert [power(f"rank={rank}").step(1, 1.0).up_bytes for rank in (4, 5)] == [4 * (4 * (15 + 20) + 30), 4 * 330]
    for payload, width, is_rounded in (("as_is", 4, False), ("bfloat16", 2, True)):
        scheme = distinct(power(f"rank=1 payload={payload}"))
        begin = scheme.parameters().clone()
        for step in range(1, 41):
            before = scheme.parameters().clone()
            assert scheme.step(step, 1.0).up_bytes == width * (15 + 20 + 30)
            done = scheme.task.drawn[:step].sum(0).mean(0)
            assert torch.allclose((begin - scheme.parameters())[:300], (done - scheme.left.mean(0))[:300], atol=1e-2)
            mean = scheme.task.drawn[step - 1, :, 300:]
            mean = mean.bfloat16().float().mean(0).bfloat16().float() if is_rounded else mean.mean(0)
            assert torch.allclose((before - scheme.parameters())[300:], mean, atol=1e-3)
        assert not scheme.left[:, 300:].any()


def test_powersgd_goes_on_from_its_last_step():
    """Power iteration over the steps finds the largest singular value's direction, where a new start each time would not."""
    scheme = power("rank=1")
    scheme.task.drawn[:] = scheme.task.drawn[0, 0]
    left, values, right = torch.linalg.svd(scheme.task.drawn[0, 0, :300].view(15, 20))
    for step in range(1, 41):
        scheme.left[:] = 0  # what is left over would join
        before = scheme.parameters().clone()
        scheme.step(step, 1.0)
    best = values[0] * torch.outer(left[:, 0], right[0])
    assert torch.allclose((before - scheme.parameters())[:300].view(15, 20), best, atol=0.05 * float(values[0]))


def test_powersgd_takes_a_convolution_as_the_matrix_of_its_outputs_and_may_begin_dense():
    flat, deep = (made("steps=5 scheme=powersgd rank=2 dense_steps=2", shapes)
                  for shapes in (MATRICES, {"convolution": (15, 5, 2, 2), "vector": (30,)}))
    for step in range(1, 6):
        result = flat.step(step, 1.0)
        assert result == deep.step(step, 1.0)
        assert (result.up_bytes == 4 * 330) == (step <= 2) == (not flat.left.any())
    assert torch.equal(flat.parameters(), deep.parameters())


def sparse(text):
    return distinct(made(f"scheme=sparseloco interval=3 top=8 outer_rate=1 {text}"))


@pytest.mark.parametrize("averaged", ["senders", "workers"])
def test_sparseloco_sends_the_largest_and_keeps_most_of_the_rest(averaged):
    scheme = sparse(f"averaged={averaged}")
    for step in range(1, 10):
        shared, left = scheme.shared.clone(), scheme.left.clone()
        result = scheme.step(step, RATE)
        if step % 3:
            assert torch.equal(scheme.shared, shared) and torch.equal(scheme.left, left) and result.up_bytes == result.down_bytes == 0
            continue
        # 8 of each of 4 layers, with their places and 2 bits, and five float32 a layer.
        up = math.ceil((sum(math.ceil(math.log2(math.comb(size, 8))) for _, size, _ in LAYERS) + 2 * 32) / 8) + 80
        assert (result.up_bytes, result.down_bytes) == (up, 3 * up)
        assert torch.equal(scheme.replicas.y, scheme.shared.expand(4, -1))
        had = left + RATE * scheme.task.drawn[step - 3:step].sum(0)
        sent = had - scheme.left / 0.95
        senders = (sent.abs() > 1e-3).sum(0)
        for begin, size, _ in LAYERS:
            for of_worker, all_of in zip(sent[:, begin:begin + size], had[:, begin:begin + size]):
                went = of_worker.abs() > 1e-3
                assert went.sum() <= 8 and all_of.abs()[went].min() >= all_of.abs().sort().values[-8] - 1e-3
                assert len(of_worker[went].mul(1e3).round().unique()) <= 4
                assert of_worker.sum() == pytest.approx(float(all_of[all_of.abs().topk(8).indices].sum()), abs=1e-2)
        assert torch.allclose(shared - scheme.shared, sent.sum(0) / (senders.clamp(min=1) if averaged == "senders" else 4), atol=1e-3)


def test_sparseloco_may_leave_what_it_does_not_send_within_the_parameters_or_keep_all_of_it():
    """Where gradients do not depend on the parameters, it sends the same."""
    outside, within, whole = (sparse(f"averaged=workers {text}") for text in ("unsent=outside", "unsent=within", "left_kept=1"))
    computed_with, gradients = [], within.task.gradients
    within.task.gradients = lambda parameters, step: computed_with.append(parameters.clone()) or gradients(parameters, step)
    for step in range(1, 10):
        own = within.replicas.y.clone()
        assert outside.step(step, RATE) == within.step(step, RATE) == whole.step(step, RATE)
        assert torch.equal(computed_with[-1], own)
        assert torch.allclose(within.parameters(), outside.parameters(), atol=1e-3)
        if step % 3 == 0:
            assert outside.left.abs().max() > 1 and not within.left.any()
            assert torch.allclose(within.shared - within.replicas.y, outside.left, atol=1e-3)
            done = whole.task.begin - RATE * whole.task.drawn[:step].sum(0).mean(0)
            assert torch.allclose(whole.shared - whole.left.mean(0), done, atol=1e-2)


def test_sparseloco_may_send_whole_fragments():
    """Those of the largest mean magnitude over all workers: the same of each, in 4 bits."""
    scheme = sparse("averaged=workers left_kept=1 sends=fragments share=0.5")
    for step in range(1, 10):
        shared, left = scheme.shared.clone(), scheme.left.clone()
        result = scheme.step(step, RATE)
        if step % 3:
            continue
        had = left + RATE * scheme.task.drawn[step - 3:step].sum(0)
        chosen = sorted(LAYERS, key=lambda layer: -float(had[:, layer[0]:layer[0] + layer[1]].abs().mean()))[:2]
        sent = torch.zeros(4, 330)
        for begin, size, _ in chosen:
            sent[:, begin:begin + size] = PAYLOADS["int4"].rounded(had[:, begin:begin + size])
        assert torch.allclose(scheme.left, had - sent, atol=1e-3)
        assert torch.allclose(shared - scheme.shared, sent.mean(0), atol=1e-3)
        assert result.up_bytes == 4 * 4 + sum(PAYLOADS["int4"].bytes(size) for _, size, _ in chosen) == result.down_bytes / 3


def test_sparseloco_may_have_its_reply_rounded():
    """To as many elements as a worker sends, and what that takes comes later."""
    relayed, rounded = (sparse(f"averaged=workers answer={reply}") for reply in ("relayed", "rounded"))
    for step in range(1, 10):
        before = rounded.shared.clone()
        whole, result = relayed.step(step, RATE), rounded.step(step, RATE)
        assert result.up_bytes == result.down_bytes == whole.up_bytes == whole.down_bytes / 3
        if step % 3 == 0:
            assert 0 < ((before - rounded.shared).abs() > 1e-3).sum() <= 4 * 8
            assert torch.allclose(rounded.shared - rounded.unanswered, relayed.shared, atol=1e-2)


def test_sparseloco_cuts_chunks_of_4096_and_sends_in_the_last_step():
    drawn = 1 + torch.rand(9, 4, 4100, generator=torch.Generator().manual_seed(1))
    scheme = made("scheme=sparseloco interval=1 top=3 outer_rate=1", {"a": (4100,)}, begin=torch.zeros(4100), drawn=drawn)
    scheme.step(1, 1.0)
    sent = drawn[0] - scheme.left / 0.95
    assert ((sent[:, :4096].abs() > 0.5).sum(1) == 3).all() and ((sent[:, 4096:].abs() > 0.5).sum(1) == 3).all()
    scheme = made("scheme=sparseloco interval=5 top=8")
    assert [step for step in range(1, 10) if scheme.step(step, RATE).up_bytes] == [5, 9]


@pytest.mark.parametrize("text, payload", [("dgc", "as_is"), ("dgc", "int4"), ("scalecom", "as_is"), ("scalecom low_pass=0.25", "as_is")])
def test_dgc_and_scalecom_send_the_largest_of_each_worker_or_of_one(text, payload):
    scheme = made(f"scheme={text} share=0.1 payload={payload}", MIXED)
    scheme = scheme if payload == "int4" else distinct(scheme)
    for step in range(1, 10):
        before, left = scheme.parameters().clone(), scheme.residual.clone()
        had, sent = left + scheme.task.drawn[step - 1], torch.zeros(4, 330)
        scheme.step(step, 1.0)
        if payload == "int4":  # what rounding takes is kept
            assert torch.equal((before - scheme.parameters()) + scheme.residual.mean(0), had.mean(0))
            continue
        for begin, size, count in LAYERS:
            for worker in range(4):
                chooses = worker if text == "dgc" else (step - 1) % 4
                places = begin + had[chooses, begin:begin + size].abs().sort(descending=True).indices[:count]
                sent[worker, places] = had[worker, places]
        low_pass = scheme.row.low_pass if text != "dgc" else 1
        assert torch.allclose(scheme.residual, (1 - low_pass) * left + low_pass * (had - sent), atol=1e-4)
        assert torch.allclose(before - scheme.parameters(), sent.mean(0), atol=1e-5)


def test_places_take_what_telling_them_apart_does():
    assert place_bits(8, 8) == 0 and place_bits(256, 1) == 8 and place_bits(16, 8) == math.ceil(math.log2(12870))
    values = 4 * sum(count for _, _, count in LAYERS)
    up = values + sum(place_bytes(size, count) for _, size, count in LAYERS)
    result = made("scheme=dgc share=0.1", MIXED).step(1, 1.0)
    assert (result.up_bytes, result.down_bytes) == (up, 3 * (up - 4 * 70) + 4 * 70)  # the vector is summed on the way
    result = made("scheme=scalecom share=0.1", MIXED).step(1, 1.0)
    assert (result.up_bytes, result.down_bytes) == (values + math.ceil((up - values) / 4), up)


def test_dgc_with_everything_sent_is_nesterov():
    """Decay included, which momentum would bring to 1 / (1 - 0.9) times as much."""
    everything, dense = made("scheme=dgc share=1 correction=0.9", MIXED), made("scheme=dense optimizer=nesterov", MIXED)
    for step in range(1, 10):
        everything.step(step, 0.01)
        dense.step(step, 0.01)
        assert torch.allclose(everything.parameters(), dense.parameters(), atol=1e-5)
    for text, decay in (("scheme=dgc share=1 correction=0.9", 5e-3), ("scheme=gradients correction=0.5", 1e-3)):
        groups = made(text, **DECAYED).replicas.optimizer.param_groups
        assert [group["weight_decay"] for group in groups] == pytest.approx([0, decay, 0, decay])


def test_dgc_corrects_momentum_masks_it_and_sends_fewer_and_fewer():
    """Where nothing is sent it is momentum, summed up; what is sent has none left, but for vectors, which are sent whole."""
    scheme = made("scheme=dgc share=0.02 correction=0.5", MIXED)
    velocity = residual = torch.zeros(4, 330)
    is_quiet = torch.ones(4, 330, dtype=bool)
    is_matrix = torch.ones(330, dtype=bool)
    is_matrix[194:264] = False
    for step in range(1, 6):
        drawn = scheme.task.drawn[step - 1]
        velocity = 0.5 * (velocity + drawn)
        residual = residual + velocity + drawn
        scheme.step(step, 1.0)
        is_quiet &= (scheme.velocity != 0) | (velocity == 0)
        assert torch.equal(scheme.velocity[is_quiet], velocity[is_quiet])
        assert torch.equal(scheme.residual[is_quiet & is_matrix], residual[is_quiet & is_matrix])
        assert is_quiet[:, ~is_matrix].all() and not scheme.residual[:, ~is_matrix].any()
    assert 0.8 < is_quiet[:, is_matrix].float().mean() < 0.99
    scheme = made("scheme=dgc share=0.01 ramp_steps=8", MIXED)
    assert [scheme.share(step) for step in range(1, 11)] == [0.25] * 2 + [0.0625] * 2 + [0.015625] * 2 + [0.01] * 4


@pytest.mark.parametrize("text, norm", [("scheme=dgc share=1 workers=4", 12.0), ("scheme=scalecom share=1 clipped=gradients", 6.0),
                                        ("scheme=powersgd rank=1 clipped=gradients", 6.0),
                                        ("scheme=local traffic=2 outer_rate=1 outer_momentum=0", 6.0)])
def test_each_worker_is_clipped(text, norm):
    """The gradient, not what comes of it."""
    scheme = made(text, {"vector": (330,)}, clip=6.0)
    begin, drawn = scheme.parameters().clone(), scheme.task.drawn[0]
    drawn[0] *= 0.01  # which is not so long
    scheme.step(1, 1.0)
    assert torch.allclose(begin - scheme.parameters(), (drawn * (norm / drawn.norm(dim=1, keepdim=True)).clamp(max=1)).mean(0), atol=1e-4)


@pytest.mark.parametrize("shape, sides", [((128, 192), [64, 64]), ((130, 40), [26, 40]), ((65,), [13])])
def test_demo_has_the_components_of_a_cosine_transform(shape, sides):
    """Of the definition: sum over the places n of x_n cos(pi / N (n + 1/2) k), with a norm of one."""
    numbers = torch.randn(2, math.prod(shape), generator=torch.Generator().manual_seed(1))
    tiles = Tiles(shape)
    assert tiles.sides == sides
    components = tiles.components(numbers)
    assert torch.allclose(tiles.numbers(components), numbers, atol=1e-4)
    high, wide = ([1] + tiles.sides)[-2:]
    tile = numbers[1].view(-1, shape[-1])[:high, :wide]
    for k, l in ((0, 0), (min(2, high - 1), 5)):
        wave = torch.outer(*(torch.cos(torch.pi / size * (torch.arange(size) + 0.5) * of) for size, of in ((high, k), (wide, l))))
        assert float(components[1, 0, k * wide + l]) == pytest.approx(float((tile * wave).sum() / wave.norm()), abs=1e-4)


def test_demo_steps_by_the_sign_of_the_largest_components():
    scheme = distinct(made("scheme=demo top=5 momentum_kept=0.5", MATRICES))
    for step in range(1, 6):
        before, had = scheme.parameters().clone(), 0.5 * scheme.momentum + 0.25 * scheme.task.drawn[step - 1]
        result = scheme.step(step, 0.25)
        up = 2 * 5 * 4 + sum(place_bytes(size, 5) for size in (300, 30))
        assert (result.up_bytes, result.down_bytes) == (up, 3 * up)
        sent, arrived = had - scheme.momentum, []
        for begin, shape in ((0, (15, 20)), (300, (30,))):
            tiles, here = Tiles(shape), slice(begin, begin + math.prod(shape))
            went, all_of = tiles.components(sent[:, here]), tiles.components(had[:, here])
            is_sent = went.abs() > 1e-4
            assert (is_sent.sum(2) == 5).all()
            assert torch.allclose(went[is_sent], all_of[is_sent], atol=1e-4)
            assert (all_of.abs().masked_fill(is_sent, 0).amax(2) <= all_of.abs().masked_fill(~is_sent, torch.inf).amin(2)).all()
            arrived.append(tiles.numbers((went * is_sent).sum(0, keepdim=True) / is_sent.sum(0, keepdim=True).clamp(min=1)))
        moved, arrived = before - scheme.parameters(), torch.cat(arrived, dim=1)[0]
        is_clear = arrived.abs() > 1e-3
        assert is_clear.float().mean() > 0.9
        assert torch.allclose(moved[is_clear], 0.25 * arrived[is_clear].sign(), atol=1e-5)


def test_demo_counts_tiles_rounds_what_it_sends_and_decays():
    scheme = made("scheme=demo top=3 payload=bfloat16", {"b": (2, 97), "a": (68, 2)}, **DECAYED)
    begin = scheme.parameters().clone()
    # 97 is prime: 97 tiles of 2; of 68 the largest part is 34, so 2 tiles of 68.
    assert scheme.bytes == 2 * (97 * 2 + 2 * 3) + math.ceil(2 * 16 / 8)
    scheme.step(1, 0.25)
    moved = (begin - scheme.parameters() - 0.25 * 0.1 * begin * (torch.arange(330) < 194)).abs()
    assert torch.allclose(moved, torch.full((330,), 0.25), atol=1e-4)
    sent = scheme.tiles[1].components((0.25 * scheme.task.drawn[0] - scheme.momentum)[:, 194:]).abs().topk(3).values
    assert torch.allclose(sent, sent.bfloat16().float(), atol=1e-5)


def test_one_bit_adam_is_adamw_while_it_is_dense():
    one_bit, dense = made("scheme=onebit dense_steps=9", **DECAYED), made("scheme=dense optimizer=adamw", **DECAYED)
    for step in range(1, 10):
        assert one_bit.step(step, 0.01) == dense.step(step, 0.01)
        assert torch.allclose(one_bit.parameters(), dense.parameters(), atol=1e-5)


def test_one_bit_adam_sends_signs_and_keeps_the_rest():
    scheme = made("scheme=onebit dense_steps=2 steps=9")
    for step in range(1, 3):
        scheme.step(step, 0.01)
    variance = scheme.variance.clone()
    for step in range(3, 10):
        before, momentum, left, by_all = (each.clone() for each in (scheme.y, scheme.momentum, scheme.left, scheme.left_by_all))
        assert scheme.step(step, 0.01).up_bytes == 4 * 4 + 8 + 17 + 9 + 9
        had = left + 0.9 * momentum + 0.1 * scheme.task.drawn[step - 1]
        sent = had - scheme.left
        assert torch.allclose(scheme.momentum, sent.mean(0) + by_all - scheme.left_by_all, atol=1e-4)
        for numbers, whole in ((sent, had), (scheme.momentum, sent.mean(0, keepdim=True) + by_all)):
            for begin, size, _ in LAYERS:
                layer, went = whole[:, begin:begin + size], numbers[:, begin:begin + size]
                assert torch.allclose(went.abs(), layer.square().mean(1, keepdim=True).sqrt(), atol=1e-4)
                is_clear = layer.abs() > 1e-3
                assert torch.equal(went.sign()[is_clear], layer.sign()[is_clear])
        assert torch.equal(scheme.variance, variance)
        step_of = 0.01 * (scheme.momentum / (1 - 0.9 ** step)) / ((variance / (1 - 0.99 ** 2)).sqrt() + 1e-8)
        assert torch.allclose(before - scheme.y, step_of, atol=1e-5)


def test_muon_steps_by_orthogonal_matrices_and_by_adamw_elsewhere():
    torch.manual_seed(1)
    matrix, vector, alone = torch.zeros(2, 60), torch.zeros(2, 10), torch.zeros(2, 10)
    of = {"lr": 0.5, "weight_decay": 0.1}
    with pytest.raises(ValueError, match="optimizer=muon is for whole hidden matrices"):
        OPTIMIZERS["muon"]([{"params": [vector], "hidden": None, **of}], 2)
    muon = OPTIMIZERS["muon"]([{"params": [matrix], "hidden": (12, 5), **of}, {"params": [vector], "hidden": None, **of}], 2)
    adamw = OPTIMIZERS["adamw"]([{"params": [alone], **of}], 2)
    for _ in range(3):
        before = matrix.clone()
        matrix.grad, vector.grad = torch.randn(2, 60), torch.randn(2, 10)
        alone.grad = vector.grad
        muon.load_state_dict(muon.state_dict())
        muon.step()
        adamw.step()
        moved = (before * (1 - 0.5 * 0.1) - matrix).view(2, 12, 5) / (0.5 * 0.2 * 12 ** 0.5)
        assert torch.all((torch.linalg.svdvals(moved) - 1).abs() < 0.4)  # where five iterations bring them, which is not to 1
        assert torch.equal(vector, alone)
