# SPDX-License-Identifier: MIT
"""What the schemes of others do, by their papers."""

import math

import pytest
import torch

import schemes
from payload import PAYLOADS
from rivals.demo import Tiles
from rivals.largest import place_bits
from rows import parsed
from toy import Toy

RATE = 0.5


def made(text, task=Toy):
    row = parsed(f"workers=4 steps=9 optimizer=sgd {text}")
    return schemes.SCHEMES[row.scheme](task(row), row)


class Matrices(Toy):
    """A matrix of 15 x 20, and a vector of 30."""

    def shapes(self):
        return {"matrix": (15, 20), "vector": (30,)}


def power(text):
    return made(f"scheme=powersgd steps=40 {text}", Matrices)


def test_powersgd_restores_gradients_of_its_rank():
    """Of all workers together; and of a larger rank it loses nothing but keeps it for later."""
    scheme = power("rank=2")
    generator = torch.Generator().manual_seed(1)
    factors = torch.randn(40, 15, 2, generator=generator), torch.randn(40, 2, 20, generator=generator)
    scheme.task.drawn[:, :, :300] = (factors[0] @ factors[1]).flatten(1)[:, None]
    begin = scheme.parameters().clone()
    for step in range(1, 6):
        before = scheme.parameters().clone()
        scheme.step(step, 1.0)
        assert torch.allclose(before - scheme.parameters(), scheme.task.drawn[step - 1].mean(0), atol=1e-3)
        scheme.left[:] = 0  # its rounding is of a larger rank
    scheme = power("rank=1")
    for step in range(1, 41):
        scheme.step(step, 1.0)
        done = scheme.task.drawn[:step].sum(0).mean(0)
        assert torch.allclose(begin - scheme.parameters(), done - scheme.left.mean(0), atol=1e-2)
        assert torch.linalg.matrix_rank(scheme.left[0, :300].view(15, 20)) > 1
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


def test_powersgd_sends_two_factors_and_the_vectors():
    assert power("rank=2").step(1, 1.0).up_bytes == power("rank=2").step(1, 1.0).down_bytes == 4 * (2 * (15 + 20) + 30)
    # What would not shrink to half goes out as it is.
    assert [power(f"rank={rank}").step(1, 1.0).up_bytes for rank in (4, 5, 99)] == [4 * (4 * (15 + 20) + 30), 4 * 330, 4 * 330]


def test_powersgd_rounds_factors_and_vectors_both_ways():
    """What that takes of a matrix stays with the worker."""
    def brought(numbers):
        return numbers.bfloat16().float().mean(0).bfloat16().float()

    scheme = drawn_apart(power("rank=2 payload=bfloat16"))
    begin = scheme.parameters().clone()
    for step in range(1, 41):
        before, right = scheme.parameters().clone(), scheme.right[0].clone()
        had = (scheme.left + scheme.task.drawn[step - 1])[:, :300].view(4, 15, 20)
        assert scheme.step(step, 1.0).up_bytes == 2 * (2 * (15 + 20) + 30)
        left = torch.linalg.qr(brought(had @ right)).Q
        assert torch.equal(scheme.right[0], brought(had.transpose(1, 2) @ left))
        assert torch.allclose((before - scheme.parameters())[300:], brought(scheme.task.drawn[step - 1, :, 300:]), atol=1e-3)
    done = scheme.task.drawn.sum(0).mean(0)
    assert torch.allclose((begin - scheme.parameters())[:300], (done - scheme.left.mean(0))[:300], atol=1e-2)


def test_powersgd_takes_a_convolution_as_the_matrix_of_its_outputs():
    """Of what comes of it, nothing depends on how the inputs of an output lie."""
    row = parsed("workers=4 steps=5 optimizer=sgd scheme=powersgd rank=2")
    convolution = Matrices(row)
    convolution.shapes = lambda: {"convolution": (15, 5, 2, 2), "vector": (30,)}
    flat, deep = (schemes.SCHEMES["powersgd"](of, row) for of in (Matrices(row), convolution))
    for step in range(1, 6):
        assert flat.step(step, 1.0) == deep.step(step, 1.0)
    assert torch.equal(flat.parameters(), deep.parameters())


def test_powersgd_sends_everything_in_its_dense_steps():
    scheme = power("dense_steps=3")
    for step in range(1, 4):
        before = scheme.parameters().clone()
        assert scheme.step(step, 1.0).up_bytes == 4 * 330
        assert torch.allclose(before - scheme.parameters(), scheme.task.drawn[step - 1].mean(0), atol=1e-5)
        assert not scheme.left.any()
    assert scheme.step(4, 1.0).up_bytes == 4 * (15 + 20 + 30)
    assert scheme.left.any()


def sparse(text):
    """Where no two elements are alike."""
    scheme = made(f"scheme=sparseloco interval=3 top=8 outer_rate=1 {text}")
    scheme.task.drawn += torch.rand(scheme.task.drawn.shape, generator=torch.Generator().manual_seed(1))
    return scheme


@pytest.mark.parametrize("averaged", ["senders", "workers"])
def test_sparseloco_sends_the_largest_and_keeps_most_of_the_rest(averaged):
    scheme = sparse(f"averaged={averaged}")
    chunks = [(0, 64), (64, 130), (194, 70), (264, 66)]
    for step in range(1, 10):
        shared, left = scheme.shared.clone(), scheme.left.clone()
        result = scheme.step(step, RATE)
        if step % 3:
            assert torch.equal(scheme.shared, shared) and torch.equal(scheme.left, left) and result.up_bytes == result.down_bytes == 0
            continue
        # 8 of each of 4 layers, with their places and 2 bits, and five float32 a layer.
        up = math.ceil((sum(math.ceil(math.log2(math.comb(size, 8))) for _, size in chunks) + 2 * 32) / 8) + 80
        assert (result.up_bytes, result.down_bytes) == (up, 3 * up)
        assert torch.equal(scheme.replicas.y, scheme.shared.expand(4, -1))
        did = RATE * scheme.task.drawn[step - 3:step].sum(0)
        had = left + did
        sent = had - scheme.left / 0.95
        senders = torch.zeros(330)
        for begin, size in chunks:
            for worker in range(4):
                part, all_of = sent[worker, begin:begin + size], had[worker, begin:begin + size].abs()
                went = part.abs() > 1e-3
                assert went.sum() <= 8 and all_of[went].min() >= all_of.sort().values[-8] - 1e-3
                assert len(part[went].mul(1e3).round().unique()) <= 4
                assert part.sum() == pytest.approx(float(had[worker, begin:begin + size][all_of.topk(8).indices].sum()), abs=1e-2)
                senders[begin:begin + size] += went
        assert 1 < senders[senders > 0].mean() < 4
        assert torch.allclose(shared - scheme.shared, sent.sum(0) / (senders.clamp(min=1) if averaged == "senders" else 4), atol=1e-3)


def test_sparseloco_may_leave_what_it_does_not_send_within_the_parameters():
    """Where gradients do not depend on the parameters, it sends the same."""
    outside, within = (sparse(f"unsent={unsent}") for unsent in ("outside", "within"))
    computed_with, gradients = [], within.task.gradients
    within.task.gradients = lambda parameters, step: computed_with.append(parameters.clone()) or gradients(parameters, step)
    for step in range(1, 10):
        own = within.replicas.y.clone()
        assert outside.step(step, RATE) == within.step(step, RATE)
        assert torch.equal(computed_with[-1], own)
        assert torch.allclose(within.parameters(), outside.parameters(), atol=1e-3)
        if step % 3 == 0:
            assert outside.left.abs().max() > 1 and not within.left.any()
            assert torch.allclose(within.shared - within.replicas.y, outside.left, atol=1e-3)


def test_sparseloco_may_keep_all_of_what_it_does_not_send():
    scheme = sparse("averaged=workers left_kept=1")
    for step in range(1, 10):
        scheme.step(step, RATE)
        if step % 3 == 0:
            done = scheme.task.begin - RATE * scheme.task.drawn[:step].sum(0).mean(0)
            assert torch.allclose(scheme.shared - scheme.left.mean(0), done, atol=1e-2)


def test_sparseloco_may_send_whole_parts():
    """Those of the largest mean magnitude over all workers: the same of each, in 4 bits."""
    scheme = sparse("averaged=workers left_kept=1 sends=parts share=0.5")
    chunks = [(0, 64), (64, 130), (194, 70), (264, 66)]
    for step in range(1, 10):
        shared, left = scheme.shared.clone(), scheme.left.clone()
        result = scheme.step(step, RATE)
        if step % 3:
            continue
        waiting = left + RATE * scheme.task.drawn[step - 3:step].sum(0)
        chosen = sorted(chunks, key=lambda chunk: -float(waiting[:, chunk[0]:sum(chunk)].abs().mean()))[:2]
        sent = torch.zeros(4, 330)
        for begin, size in chosen:
            sent[:, begin:begin + size] = PAYLOADS["int4"].rounded(waiting[:, begin:begin + size])
        assert torch.allclose(scheme.left, waiting - sent, atol=1e-3)
        assert torch.allclose(shared - scheme.shared, sent.mean(0), atol=1e-3)
        assert result.up_bytes == 4 * 4 + sum(PAYLOADS["int4"].bytes(size) for _, size in chosen) == result.down_bytes / 3


def test_sparseloco_may_have_its_answer_rounded():
    """To as many elements as a worker sends, and what that takes comes later."""
    relayed, rounded = (sparse(f"averaged=workers answer={answer}") for answer in ("relayed", "rounded"))
    for step in range(1, 10):
        before = rounded.shared.clone()
        whole, result = relayed.step(step, RATE), rounded.step(step, RATE)
        assert result.up_bytes == result.down_bytes == whole.up_bytes == whole.down_bytes / 3
        if step % 3 == 0:
            assert 0 < ((before - rounded.shared).abs() > 1e-3).sum() <= 4 * 8
            assert torch.allclose(rounded.left, relayed.left, atol=1e-3) and rounded.unanswered.abs().max() > 1
            assert torch.allclose(rounded.shared - rounded.unanswered, relayed.shared, atol=1e-2)


class Mixed(Toy):
    """Three matrices, and a vector that is sent whole."""

    def shapes(self):
        return {"a": (8, 8), "b": (65, 2), "c": (70,), "d": (6, 11)}


LAYERS = [(0, 64, 6), (64, 130, 13), (194, 70, 70), (264, 66, 7)]  # of Mixed: where they begin, elements, and a tenth of them or all


class Decayed(Toy):
    clip = 20.0

    def is_decayed(self, layer):
        return layer in "bd"


def drawn_apart(scheme):
    """So that no two elements are alike."""
    scheme.task.drawn += torch.rand(scheme.task.drawn.shape, generator=torch.Generator().manual_seed(1))
    return scheme


def test_dgc_sends_the_largest_of_each_worker():
    scheme = drawn_apart(made("scheme=dgc share=0.1", Mixed))
    for step in range(1, 10):
        before, waiting = scheme.parameters().clone(), scheme.residual + scheme.task.drawn[step - 1]
        scheme.step(step, 1.0)
        arrived = torch.zeros_like(waiting)
        for begin, size, count in LAYERS:
            for worker in range(4):
                places = begin + waiting[worker, begin:begin + size].abs().sort(descending=True).indices[:count]
                arrived[worker, places] = waiting[worker, places]
        assert torch.equal(scheme.residual, waiting - arrived)
        assert torch.allclose(before - scheme.parameters(), arrived.mean(0), atol=1e-5)


@pytest.mark.parametrize("scheme", ["dgc", "scalecom"])
def test_what_rounding_takes_is_kept(scheme):
    scheme = made(f"scheme={scheme} share=0.5 payload=int4", Mixed)
    begin = scheme.parameters().clone()
    for step in range(1, 10):
        scheme.step(step, 1.0)
        assert torch.equal(begin - scheme.parameters() + scheme.residual.mean(0), scheme.task.drawn[:step].sum(0).mean(0))


def test_dgc_with_everything_sent_is_nesterov():
    """Decay included, which momentum would bring to 1 / (1 - 0.9) times as much."""
    everything, dense = made("scheme=dgc share=1 correction=0.9", Mixed), made("scheme=dense optimizer=nesterov", Mixed)
    for step in range(1, 10):
        everything.step(step, 0.01)
        dense.step(step, 0.01)
        assert torch.allclose(everything.parameters(), dense.parameters(), atol=1e-5)
    groups = made("scheme=dgc share=1 correction=0.9", Decayed).replicas.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == pytest.approx([0, 5e-3, 0, 5e-3])
    assert [group["weight_decay"] for group in made("scheme=gradients correction=0.5", Decayed).replicas.optimizer.param_groups] == [
        0, 1e-3, 0, 1e-3]


def test_dgc_corrects_momentum_and_masks_it():
    """Where nothing is sent it is momentum, summed up; what is sent has none left, but for vectors, which are sent whole."""
    scheme = made("scheme=dgc share=0.02 correction=0.5", Mixed)
    velocity = residual = torch.zeros(4, 330)
    is_quiet = torch.ones(4, 330, dtype=bool)
    for step in range(1, 6):
        drawn = scheme.task.drawn[step - 1]
        velocity = 0.5 * (velocity + drawn)
        residual = residual + velocity + drawn
        scheme.step(step, 1.0)
        is_quiet &= (scheme.velocity != 0) | (velocity == 0)
        assert torch.equal(scheme.velocity[is_quiet], velocity[is_quiet])
        is_matrix = torch.ones(330, dtype=bool)
        is_matrix[194:264] = False
        assert torch.equal(scheme.residual[is_quiet & is_matrix], residual[is_quiet & is_matrix])
        assert is_quiet[:, ~is_matrix].all() and not scheme.residual[:, ~is_matrix].any()
    assert 0.8 < is_quiet[:, is_matrix].float().mean() < 0.99


def test_dgc_sends_fewer_and_fewer_at_the_beginning():
    scheme = made("scheme=dgc share=0.01 ramp_steps=8", Mixed)
    bytes_of = [scheme.step(step, RATE).up_bytes for step in range(1, 10)]
    assert bytes_of == sorted(bytes_of, reverse=True) and len(set(bytes_of)) == 4
    assert [scheme.share(step) for step in range(1, 11)] == [0.25] * 2 + [0.0625] * 2 + [0.015625] * 2 + [0.01] * 4


@pytest.mark.parametrize("text, norm", [("scheme=dgc share=1 workers=4", 12.0), ("scheme=scalecom share=1 clipped=gradients", 6.0),
                                        ("scheme=powersgd rank=1 clipped=gradients", 6.0)])
def test_each_worker_is_clipped(text, norm):
    """The gradient, not what comes of it."""
    class Clipped(Toy):
        clip = 6.0

        def shapes(self):
            return {"vector": (330,)}

    scheme = made(f"{text} optimizer=sgd", Clipped)
    begin = scheme.parameters().clone()
    scheme.step(1, 1.0)
    drawn = scheme.task.drawn[0]
    assert (drawn.norm(dim=1) > 12).all()
    assert torch.allclose(begin - scheme.parameters(), (norm * drawn / drawn.norm(dim=1, keepdim=True)).mean(0), atol=1e-4)


def test_places_take_what_telling_them_apart_does():
    assert place_bits(8, 8) == 0 and place_bits(256, 1) == 8 and place_bits(16, 8) == math.ceil(math.log2(12870))
    values = 4 * sum(count for _, _, count in LAYERS)
    up = values + sum(math.ceil(math.log2(math.comb(size, count)) / 8) for _, size, count in LAYERS)
    result = made("scheme=dgc share=0.1", Mixed).step(1, 1.0)
    assert (result.up_bytes, result.down_bytes) == (up, 3 * (up - 4 * 70) + 4 * 70)  # the vector is summed on the way
    result = made("scheme=scalecom share=0.1", Mixed).step(1, 1.0)
    assert (result.up_bytes, result.down_bytes) == (values + math.ceil((up - values) / 4), up)


@pytest.mark.parametrize("low_pass", [1.0, 0.25])
def test_scalecom_sends_what_one_of_the_workers_chooses(low_pass):
    scheme = drawn_apart(made(f"scheme=scalecom share=0.1 low_pass={low_pass}", Mixed))
    for step in range(1, 10):
        before, left, drawn = scheme.parameters().clone(), scheme.residual.clone(), scheme.task.drawn[step - 1]
        waiting, sent = left + drawn, torch.zeros(4, 330)
        for begin, size, count in LAYERS:
            places = begin + waiting[(step - 1) % 4, begin:begin + size].abs().sort(descending=True).indices[:count]
            sent[:, places] = waiting[:, places]
        scheme.step(step, 1.0)
        assert torch.allclose(before - scheme.parameters(), sent.mean(0), atol=1e-5)
        assert torch.allclose(scheme.residual, (1 - low_pass) * left + low_pass * (waiting - sent), atol=1e-4)


@pytest.mark.parametrize("shape", [(128, 192), (130, 40), (128,), (65,)])
def test_demo_has_the_components_of_a_cosine_transform(shape):
    """Of the definition: sum over the places n of x_n cos(pi / N (n + 1/2) k), with a norm of one."""
    numbers = torch.randn(2, math.prod(shape), generator=torch.Generator().manual_seed(1))
    tiles = Tiles(shape)
    assert tiles.sides == {128: [64, 64], 130: [26, 40], 65: [13]}[shape[0]][:len(shape)]
    components = tiles.components(numbers)
    assert torch.allclose(tiles.numbers(components), numbers, atol=1e-4)
    assert torch.allclose(components.norm(), numbers.norm())
    high, wide = ([1] + tiles.sides)[-2:]
    tile = numbers[1].view(-1, shape[-1])[:high, :wide]
    for k, l in ((0, 0), (min(2, high - 1), 5)):
        wave = torch.outer(*(torch.cos(torch.pi / size * (torch.arange(size) + 0.5) * of) for size, of in ((high, k), (wide, l))))
        assert float(components[1, 0, k * wide + l]) == pytest.approx(float((tile * wave).sum() / wave.norm()), abs=1e-4)


def test_demo_steps_by_the_sign_of_the_largest_components():
    scheme = drawn_apart(made("scheme=demo top=5 momentum_kept=0.5", Matrices))
    for step in range(1, 6):
        before, had = scheme.parameters().clone(), 0.5 * scheme.momentum + 0.25 * scheme.task.drawn[step - 1]
        result = scheme.step(step, 0.25)
        up = 2 * 5 * 4 + sum(math.ceil(math.log2(math.comb(size, 5)) / 8) for size in (300, 30))
        assert (result.up_bytes, result.down_bytes) == (up, 3 * up)
        sent = had - scheme.momentum
        arrived = []
        for begin, shape in ((0, (15, 20)), (300, (30,))):
            tiles, part = Tiles(shape), slice(begin, begin + math.prod(shape))
            went, waiting = tiles.components(sent[:, part]), tiles.components(had[:, part])
            is_sent = went.abs() > 1e-4
            assert (is_sent.sum(2) == 5).all()
            assert torch.allclose(went[is_sent], waiting[is_sent], atol=1e-4)
            assert (waiting.abs().masked_fill(is_sent, 0).amax(2) <= waiting.abs().masked_fill(~is_sent, torch.inf).amin(2)).all()
            arrived.append(tiles.numbers((went * is_sent).sum(0, keepdim=True) / is_sent.sum(0, keepdim=True).clamp(min=1)))
        moved, arrived = before - scheme.parameters(), torch.cat(arrived, dim=1)[0]
        is_clear = arrived.abs() > 1e-3
        assert is_clear.float().mean() > 0.9
        assert torch.allclose(moved[is_clear], 0.25 * arrived[is_clear].sign(), atol=1e-5)


def test_demo_counts_tiles_rounds_what_it_sends_and_decays():
    class Large(Decayed):
        def shapes(self):
            return {"a": (2, 97), "b": (68, 2)}

        def is_decayed(self, layer):
            return layer == "a"

    scheme = made("scheme=demo top=3 payload=bfloat16", Large)
    begin = scheme.parameters().clone()
    # 97 is prime: 97 tiles of 2; of 68 the largest part is 34, so 2 tiles of 68.
    assert scheme.bytes == 2 * (97 * 2 + 2 * 3) + math.ceil(2 * 16 / 8)
    scheme.step(1, 0.25)
    moved = (begin - scheme.parameters() - 0.25 * 0.1 * begin * (torch.arange(330) < 194)).abs()
    assert torch.allclose(moved, torch.full((330,), 0.25), atol=1e-4)
    tiles = scheme.tiles[1]
    had = 0.25 * scheme.task.drawn[0]
    sent = tiles.components((had - scheme.momentum)[:, 194:])
    assert torch.allclose(sent.abs().topk(3).values, sent.abs().topk(3).values.bfloat16().float(), atol=1e-5)
    assert not torch.allclose(tiles.components(had[:, 194:]).abs().topk(3).values, sent.abs().topk(3).values, atol=1e-5)


def test_one_bit_adam_is_adamw_while_it_is_dense():
    one_bit = made("scheme=onebit dense_steps=9", Decayed)
    dense = made("scheme=dense optimizer=adamw", Decayed)
    for step in range(1, 10):
        assert one_bit.step(step, 0.01) == dense.step(step, 0.01)
        assert torch.allclose(one_bit.parameters(), dense.parameters(), atol=1e-5)
    assert not torch.allclose(dense.parameters(), dense.task.initial(), atol=1e-2)


def test_one_bit_adam_sends_signs_and_keeps_the_rest():
    scheme = made("scheme=onebit dense_steps=2 steps=9")
    for step in range(1, 3):
        scheme.step(step, 0.01)
    variance = scheme.variance.clone()
    for step in range(3, 10):
        before, momentum, left, by_all = (each.clone() for each in (scheme.y, scheme.momentum, scheme.left, scheme.left_by_all))
        assert scheme.step(step, 0.01).up_bytes == 4 * 4 + 8 + 17 + 9 + 9
        sent = left + 0.9 * momentum + 0.1 * scheme.task.drawn[step - 1] - scheme.left
        assert torch.allclose(scheme.momentum, sent.mean(0) + by_all - scheme.left_by_all, atol=1e-4)
        had = left + 0.9 * momentum + 0.1 * scheme.task.drawn[step - 1]
        for numbers, whole in ((sent, had), (scheme.momentum, sent.mean(0, keepdim=True) + by_all)):
            for begin, size, _ in LAYERS:
                layer = whole[:, begin:begin + size]
                magnitude = layer.square().mean(1, keepdim=True).sqrt()
                assert torch.allclose(numbers[:, begin:begin + size].abs(), magnitude, atol=1e-4)
                is_clear = layer.abs() > 1e-3
                assert torch.equal(numbers[:, begin:begin + size].sign()[is_clear], layer.sign()[is_clear])
        assert torch.equal(scheme.variance, variance)
        step_of = 0.01 * (scheme.momentum / (1 - 0.9 ** step)) / ((variance / (1 - 0.99 ** 2)).sqrt() + 1e-8)
        assert torch.allclose(before - scheme.y, step_of, atol=1e-5)


@pytest.mark.parametrize("text, said", [
    ("scheme=dgc correction=0.9 optimizer=nesterov", "the optimizer must be sgd, got 'nesterov'"),
    ("scheme=onebit", "dense_steps must be at least 1"),
    ("scheme=dgc share=0", "share must lie in"),
    ("scheme=scalecom low_pass=0", "low_pass must lie in"),
    ("scheme=sparseloco left_kept=1.1", "left_kept must lie in"),
    ("scheme=sparseloco unsent=lost", "unsent must be one of outside, within, got 'lost'"),
    ("scheme=sparseloco sends=layers", "sends must be one of elements, parts, got 'layers'"),
    ("scheme=sparseloco answer=late", "answer must be one of relayed, rounded, got 'late'"),
    ("scheme=demo momentum_kept=1", "momentum_kept must lie in"),
    ("scheme=dgc ramp_steps=-1", "ramp_steps must be at least 0"),
])
def test_what_a_rival_cannot_be_is_said(text, said):
    with pytest.raises(ValueError, match=said):
        made(text)


def test_sparseloco_takes_the_last_chunk_as_long_as_it_is():
    """Of 4,096 elements and 4 more: three of each, and no zero of what is not there among them."""
    class Long(Toy):
        def __init__(self, row):
            super().__init__(row)
            generator = torch.Generator().manual_seed(1)
            self.begin, self.drawn = torch.zeros(4100), 1 + torch.rand(row.steps, row.workers, 4100, generator=generator)

        def shapes(self):
            return {"a": (4100,)}

    scheme = made("scheme=sparseloco interval=1 top=3 outer_rate=1", Long)
    scheme.step(1, 1.0)
    sent = scheme.task.drawn[0] - scheme.left / 0.95
    assert ((sent[:, :4096].abs() > 0.5).sum(1) == 3).all() and ((sent[:, 4096:].abs() > 0.5).sum(1) == 3).all()
    alone = made("scheme=sparseloco interval=1 top=1 outer_rate=1", Toy)
    alone.step(1, 1.0)
    assert torch.isfinite(alone.parameters()).all() and not torch.equal(alone.parameters(), alone.task.begin)


def test_sparseloco_sends_in_the_last_step():
    scheme = made("scheme=sparseloco interval=5 top=8")
    assert [step for step in range(1, 10) if scheme.step(step, RATE).up_bytes] == [5, 9]
