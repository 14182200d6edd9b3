# SPDX-License-Identifier: MIT
"""The model, the rows, what is written and what is made of it."""

import pathlib

import pytest
import torch

import report
import schemes
import study
import training
from char_gpt import CharGpt
from gpt import Gpt
from rows import QUICK, Row, parsed
from toy import Toy

SMALL = {"depth": 1, "heads": 2, "width": 16, "context": 16}
ROOT = pathlib.Path(__file__).resolve().parents[3]
TEXT = (ROOT / "LICENSE").read_bytes()


def task(row=Row()):
    return CharGpt(TEXT, row.seed, row.workers, **SMALL)


def test_the_model_is_nanogpts():
    shapes = Gpt().shapes()
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 804_096  # 0.80 M, as it prints
    model = Gpt(vocabulary=5, **SMALL)
    parameters = model.initial(torch.Generator().manual_seed(1))[None]
    text = torch.randint(5, (1, 1, 16), generator=torch.Generator().manual_seed(2))
    other = text.clone()
    other[0, 0, 9:] = (other[0, 0, 9:] + 1) % 5
    of, of_other = model.logits(parameters, text)[0], model.logits(parameters, other)[0]
    assert torch.equal(of[:9], of_other[:9])  # a token is foretold from those before it
    assert not torch.isclose(of[9:], of_other[9:], atol=1e-6).all(1).any()
    assert model.losses(parameters, text).item() == pytest.approx(torch.tensor(5.0).log().item(), abs=0.1)


def test_replicas_at_once_are_replicas_one_by_one():
    of = task()
    begin = of.initial()
    parameters = torch.stack([begin, begin * 1.5, begin * 0.5, begin + 0.01])
    losses, gradients = of.gradients(parameters, 7)
    texts = of.texts(7)
    for replica in range(4):
        leaf = parameters[replica:replica + 1].clone().requires_grad_()
        loss = of.model.losses(leaf, texts[replica:replica + 1])
        assert torch.allclose(loss, losses[replica], atol=1e-6)
        assert torch.allclose(torch.autograd.grad(loss.sum(), leaf)[0], gradients[replica], atol=1e-6)
    # The dense run's gradient is the mean of the workers'.
    together, apart = of.gradients(begin[None], 7)[1], of.gradients(begin.expand(4, -1), 7)[1]
    assert torch.allclose(together[0], apart.mean(0), atol=1e-6)
    assert not torch.allclose(apart[0], apart[1], atol=1e-4)


def test_texts_depend_on_seed_step_and_worker():
    assert torch.equal(task().texts(3), task().texts(3))
    for other in (task().texts(4), task(Row(seed=1)).texts(3), task().texts(3).flip(0)):
        assert not torch.equal(task().texts(3), other)


def test_validation_is_the_end_of_the_text():
    of = task()
    assert bytes(sorted(set(TEXT))[token] for token in of.validation) == TEXT[-int(len(TEXT) * 0.1):]
    assert len(of.training) + len(of.validation) == len(TEXT)
    with pytest.raises(ValueError, match="a text of 640 bytes is too short: it has at least 650"):
        CharGpt(TEXT[:640], 0, 4)


def test_the_rate_grows_and_falls():
    rates = [training.rate_at(step, 1000, 1.0, 100) for step in range(1, 1001)]
    assert rates[0] == pytest.approx(1 / 101)
    assert max(rates) == pytest.approx(1, abs=1e-3) and rates.index(max(rates)) in (100, 101)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[99:] == sorted(rates[99:], reverse=True) or rates[100:] == sorted(rates[100:], reverse=True)


@pytest.mark.parametrize("scheme", ["gradients", "local payload=int4 delay=2 traffic=0.5"])
def test_a_killed_row_goes_on_to_the_same_result(tmp_path, monkeypatch, scheme):
    row = parsed(f"steps=12 workers=2 scheme={scheme}")

    def trained(snapshot):
        of = task(row)
        return training.train(of, study.scheme_of(of, row), row, snapshot)

    def same(result):
        return {key: value for key, value in result.items() if key != "seconds"}

    expected = same(trained(tmp_path / "none"))
    monkeypatch.setattr(training, "SNAPSHOT_SECONDS", -1)
    save, saved = training.save, []

    def save_and_die(path, what):
        save(path, what)
        saved.append(path)
        if len(saved) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "save", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "killed")
    assert same(trained(tmp_path / "killed")) == expected
    assert expected["validation_loss"] < expected["curve"][0]["validation_loss"]


def test_a_run_that_diverges_says_where(tmp_path):
    row = parsed("steps=40 optimizer=sgd")
    of = Toy(row)
    of.gradients = lambda parameters, step: (torch.tensor([float("nan") if step == 7 else 1.0]), torch.zeros(1, 330))
    result = training.train(of, study.scheme_of(of, row), row, tmp_path / "none")
    assert (result["diverged_at"], result["validation_loss"]) == (7, None)
    training.write(tmp_path, row, result)
    assert "diverged" in "\n".join(report.table(report.read(tmp_path)))


def test_rows_are_their_names():
    for row in [*QUICK, Row(), Row(rate=2.5e-3, delay=3, value="l2_norm", traffic=0.003)]:
        assert parsed(row.name()) == row
    close = [Row(rate=2e-3), Row(rate=2.0000001e-3), Row(rate=0.1 + 0.2), Row(rate=0.3)]
    assert len({row.name() for row in close}) == 4 and [parsed(row.name()) for row in close] == close
    assert Row(rate=1.0).name().endswith("rate=1")


def test_the_period_is_that_of_the_last_steps(tmp_path):
    """The mean of what a worker would evaluate in these, and the mean of what all have at the end."""
    row = parsed("workers=4 steps=20 scheme=local choice=all optimizer=sgd traffic=0.28 payload=as_is")
    of = Toy(row)
    scheme = study.scheme_of(of, row)
    seen, last = [], []
    losses = of.validation_loss

    def validation_loss(parameters, every=1):
        if every != 1:
            seen.append(losses(parameters))
        last.append(parameters.clone())
        return losses(parameters)

    of.validation_loss = validation_loss
    trained = training.train(of, scheme, row, tmp_path / "none")
    # Evaluated in steps 2, 4, ..., 20 and in 8, 11, 14, 17, 20; the workers' mean comes last.
    at = dict(zip(sorted({*range(2, 21, 2), 8, 11, 14, 17, 20}), seen))
    assert trained["period_loss"] == pytest.approx(sum(at[step] for step in (8, 11, 14, 17, 20)) / 5, abs=1e-5)
    assert len({at[step] for step in (8, 11, 14, 17, 20)}) > 2
    assert torch.equal(last[-1], scheme.replicas.y.mean(0)) and trained["workers_mean_loss"] == pytest.approx(seen[-1], abs=1e-5)
    assert (trained["came_least"], trained["came_most"], trained["waited_longest"]) == (5, 5, 4)


def test_a_complete_row_is_that_of_its_text(tmp_path):
    row, of, of_another = Row(steps=6), CharGpt.data_of(TEXT), CharGpt.data_of(TEXT[1:])
    training.write(tmp_path, row, {"data": task().data, "validation_loss": 1.5})
    assert study.is_complete(tmp_path, row, of) and not study.is_complete(tmp_path, row, of_another)
    assert not study.is_complete(tmp_path, Row(steps=7), of) and not study.is_complete(tmp_path / "other", row, of)


def test_muon_is_compared_with_its_own_dense_run_and_the_others_with_the_best():
    losses = {"optimizer=sgd": 3.0, "optimizer=nesterov": 2.0, "optimizer=muon": 1.0, "scheme=local optimizer=sgd": 2.5, "scheme=local optimizer=muon": 1.5}
    groups = report.outcomes([report.Result(parsed(row), {}, loss, 1.0, 1.0, (), 1) for row, loss in losses.items()])
    behind = {of.best.row: of.behind(report.dense_of(groups, 4, 2000, of.best.row.optimizer)) for of in groups[4, 2000]}
    assert [behind[parsed(row)] for row in losses] == [[1.0], [0.0], [0.0], [0.5], [0.5]]


@pytest.mark.parametrize("of_task", study.TASKS)
def test_what_is_recorded_was_planned_and_planned_rows_are_rows(of_task):
    """No scheme is given what it does not read; the table is that of the records."""
    listed = [parsed(line) for line in (ROOT / f"benchmarks/learning/{of_task}.txt").read_text().splitlines() if line and line[0] != "#"]
    recorded = ROOT / "benchmarks/results/learning" / of_task
    results = report.read(recorded)
    assert results and {each.row for each in results} <= set(listed) and (recorded / "table.md").read_text() == study.page(results)
    for row in listed:
        schemes.check_fields(row)
