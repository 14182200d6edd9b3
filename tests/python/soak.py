#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A parameter server and its workers as processes, killed at random and resumed from checkpoints, for as many rounds as wanted.
Options of the library come from the seed; every setting runs twice, once without kills. Checked, all of it exactly: what the server
received and the residuals are the sum of the gradients, at every checkpoint and resume; every replica is the server's model, after every
reply; the final model is that of the run without kills; the memory of no process grows."""

import argparse
import collections
import dataclasses
import multiprocessing
import os
import pathlib
import pickle
import random
import resource
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from zlib import crc32

import numpy as np

import lamina

SIZES = (9000, 0, 1, 64, 4097, 333, 4096, 12, 63, 700)  # empty, tiny, around a block, and a few blocks
LAYOUT = lamina.Layout({f"layer {l}": (n,) for l, n in enumerate(SIZES)})
EVERY = 16  # rounds from one checkpoint to the next
RATE = 0.0625
SECONDS = 60  # no wait is longer: a round takes milliseconds, the rest is for a machine that does much else
LOST_A_PEER = 3  # the status of a process whose peer is gone
FAULTS = ("left-out", "skip-save", "one-reply")


@dataclasses.dataclass
class Setting:
    """What one run does: the command line, and what its seed chose."""

    seed: int
    asynchronous: bool
    rounds: int
    workers: int
    fault: str = ""

    def __post_init__(self):
        draw = random.Random(2 * self.seed + self.asynchronous)
        self.sends_fail = draw.random() < 0.5
        self.options = {
            "fragment_elements": draw.choice([0, 4096]), "drop_ratio": draw.choice([0.0, 0.5, 0.9, 0.95, 0.99, 1.0]),
            "warm_up_steps": draw.choice([0, 0, 50]), "search_every": draw.choice([1, 1, 7]), "at_least_every": draw.choice([0, 0, 3, 40]),
            "by_score": draw.random() < 0.25, "payload": draw.choice(["as_is", "float16", "bfloat16", "int8", "int4", "ternary"]),
            "non_finite": draw.choice(["refuse", "skip"])}
        if draw.random() < 1 / 3:
            self.options["send_budget"] = draw.choice([0.02, 0.1, 0.4])
        if draw.random() < 1 / 3:  # each step without a send adds a binary digit to the velocity: at an age of 8 a float still holds it
            self.options.update(momentum=0.5, at_least_every=8)

    def chance(self, what: str, worker: int, round_: int) -> bool:
        """Whether it happens to this worker in this round: one time in sixteen."""
        return random.Random(f"{self.seed} {what} {worker} {round_}").random() < 1 / 16

    def gradients(self, worker: int, round_: int) -> list[np.ndarray]:
        """Integers, which all sums hold exactly; layers of different magnitude that take turns in being quiet."""
        draw = np.random.default_rng((self.seed, worker, round_))
        most = [(1, 2, 8, 31)[(layer + round_ // 32) % 4] * int(draw.random() > 0.125) for layer in range(len(SIZES))]
        return [draw.integers(-m, m, n, endpoint=True).astype(np.float32) for m, n in zip(most, SIZES)]

    def bad_element(self, worker: int, round_: int) -> tuple[int, int] | None:
        """Now and then one element of a gradient is NaN: its layer, and its place there."""
        if not self.chance("bad", worker, round_):
            return None
        layer = (worker + round_) % len(SIZES)
        return (layer, round_ % SIZES[layer]) if SIZES[layer] else None

    def loses(self, worker: int, round_: int) -> bool:
        return self.sends_fail and self.chance("send", worker, round_)

    def checkpoint_after(self, round_: int) -> int:
        return min(self.rounds, (round_ // EVERY + 1) * EVERY)


def layers_of(flat: np.ndarray) -> list[np.ndarray]:
    return np.split(flat, np.cumsum(SIZES)[:-1])


class Checkpoints:
    """Those of one run. The server writes its file last: a checkpoint is complete once that is there. Each process keeps its two newest
    files, so that one is whole while the other is written; they are renamed, so that a kill leaves a whole file or none."""

    def __init__(self, directory: pathlib.Path):
        self.directory = directory

    def save(self, process: str, round_: int, state: object) -> None:
        temporary = self.directory / f"{process}.tmp"
        temporary.write_bytes(pickle.dumps(state))
        temporary.rename(self.directory / f"{process}.{round_}")
        for old in sorted(self.directory.glob(f"{process}.[0-9]*"), key=lambda path: int(path.suffix[1:]))[:-2]:
            old.unlink()

    def load(self, process: str, round_: int) -> object:
        return pickle.loads((self.directory / f"{process}.{round_}").read_bytes())

    def newest(self) -> int:
        """The round of the newest that is complete; 0: none is."""
        return max((int(path.suffix[1:]) for path in self.directory.glob("server.[0-9]*")), default=0)


class Memory:
    """Sees to it that this process does not grow: looked at once a checkpoint, where all buffers are as they were at the one before."""

    WARM_UP = 8  # looks; by then the largest frame has mostly been seen
    TOLERATED = 3 << 20  # bytes; a leak of one frame in a hundred rounds is more in 2,000

    def __init__(self):
        self.looks = self.first = self.growth = 0

    def look(self) -> int:
        now = int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        self.looks += 1
        self.first = max(self.first, now) if self.looks <= self.WARM_UP else self.first
        self.growth = max(self.growth, now - self.first)
        assert self.growth <= self.TOLERATED, f"memory grew by {self.growth} bytes, to {now}"
        return self.growth


def receive(peer: Connection) -> tuple:
    assert peer.poll(SECONDS), "nothing from a peer within the deadline"
    return peer.recv()


class Books:
    """What should be where, kept apart from the library in float64, where all sums of a run are exact."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self.received = np.zeros(sum(SIZES))
        self.outstanding = np.zeros((setting.workers, sum(SIZES)))  # what each worker has computed, and the server has not received
        self.velocity = np.zeros_like(self.outstanding)

    def add_gradient(self, worker: int, round_: int) -> None:
        velocity = self.setting.options.get("momentum", 0.0) * self.velocity[worker] + np.concatenate(self.setting.gradients(worker, round_))
        good = np.ones(len(velocity), bool)
        bad = self.setting.bad_element(worker, round_)
        if bad and self.setting.options["non_finite"] == "skip":
            good[sum(SIZES[:bad[0]]) + bad[1]] = False
        self.velocity[worker][good] = velocity[good]
        self.outstanding[worker][good] += velocity[good]

    def take(self, worker: int, frame: lamina.Frame, fragments: lamina.Layout) -> None:
        offsets = np.cumsum([0, *fragments.sizes])
        for fragment in frame.sent:
            sent = np.empty(fragments.sizes[fragment], np.float32)
            frame.restore(fragment, sent)
            there = slice(offsets[fragment], offsets[fragment + 1])
            self.received[there] += sent
            self.outstanding[worker][there] -= sent
            self.velocity[worker][there] = 0

    def check(self, worker: int, residual: np.ndarray) -> None:
        lost = np.count_nonzero(residual != self.outstanding[worker])
        assert lost == 0, f"worker {worker}: lost elements: {lost}"

    def check_parameters(self, parameters: np.ndarray) -> None:
        wrong = np.count_nonzero(parameters != first_parameters() - RATE / self.setting.workers * self.received)
        assert wrong == 0, f"{wrong} parameters are not what was received"


def first_parameters() -> np.ndarray:
    return (np.arange(sum(SIZES)) % 17 - 8).astype(np.float32)


class Server:
    """The parameter server of a run, from the newest checkpoint to the last round, and its books."""

    def __init__(self, setting: Setting, workers: list[Connection], checkpoints: Checkpoints, progress: Connection):
        self.setting, self.workers, self.checkpoints, self.progress = setting, workers, checkpoints, progress
        self.round = checkpoints.newest()
        self.server = lamina.Server(LAYOUT, setting.workers, asynchronous=setting.asynchronous, first_step=self.round + 1,
                                    fragment_elements=setting.options["fragment_elements"])
        self.parameters, self.books = first_parameters(), Books(setting)
        if self.round > 0:
            self.parameters, self.books = checkpoints.load("server", self.round)
        self.mean = np.zeros(sum(SIZES), np.float32)
        self.replied = [0] * setting.workers
        self.memory, self.counts = Memory(), collections.Counter()

    def run(self) -> None:
        self.audit(self.round > 0)
        for worker in range(self.setting.workers):
            self.reply(worker, self.round)
        while self.round < self.setting.rounds:
            last = self.setting.checkpoint_after(self.round)
            self.serve(last)
            self.checkpoint(last)

    def serve(self, last: int) -> None:
        """Each worker goes through the rounds up to `last`: asynchronous ones at their own pace, nobody waits for anybody."""
        at, everybody = [self.round] * self.setting.workers, list(range(self.setting.workers))
        while self.round < last:
            groups = [everybody]
            if self.setting.asynchronous:
                groups = [[self.workers.index(peer)] for peer in wait([self.workers[w] for w in everybody if at[w] < last], SECONDS)]
            for together in groups:
                for worker in together:
                    at[worker] += 1
                    self.take(worker, at[worker])
                self.update()
                for worker in together:
                    self.reply(worker, at[worker])
            if min(at) > self.round:
                self.round = min(at)
                self.progress.send((self.round, self.counts))

    def take(self, worker: int, round_: int) -> None:
        """The frame of a worker in a round, booked."""
        self.books.add_gradient(worker, round_)
        replica, data = receive(self.workers[worker])
        assert replica == self.replied[worker], f"the replica of worker {worker} differs"
        frame = lamina.decode(data, self.server.fragments)
        assert frame.sender == worker, f"the frame of another sender from worker {worker}"
        self.books.take(worker, frame, self.server.fragments)
        self.server.add(data)
        self.counts.update(frames=1, frame_bytes=len(data))

    def update(self) -> None:
        for layer in self.server.update(layers_of(self.mean)):
            layers_of(self.parameters)[layer][...] -= np.float32(RATE) * layers_of(self.mean)[layer]

    def reply(self, worker: int, round_: int) -> None:
        """What this worker has not seen."""
        of = 0 if self.setting.fault == "one-reply" and round_ > 0 else worker
        if self.setting.loses(worker + self.setting.workers, round_):
            self.server.reply(of, layers_of(self.parameters))  # one that does not arrive
        reply = self.server.reply(of, layers_of(self.parameters))
        self.workers[worker].send((round_, reply.bytes))
        self.server.commit(of, reply.clock)
        self.replied[worker] = crc32(self.parameters)
        self.counts.update(frames=1, frame_bytes=len(reply.bytes))

    def checkpoint(self, round_: int) -> None:
        """All workers are at the same round: each gets what it has not seen, saves, and shows what it has."""
        for worker in range(self.setting.workers):
            self.reply(worker, round_)
        self.audit(True)
        self.books.check_parameters(self.parameters)
        self.checkpoints.save("server", round_, (self.parameters, self.books))
        self.counts.update(checkpoints=1)
        self.counts["grown_bytes"] = max(self.counts["grown_bytes"], self.memory.look())
        for peer in self.workers:
            peer.send(None)

    def audit(self, has_replicas: bool) -> None:
        for worker, peer in enumerate(self.workers):
            replica, residual, growth = receive(peer)
            assert not has_replicas or replica == crc32(self.parameters), f"the replica of worker {worker} differs"
            self.books.check(worker, residual)
            self.counts["grown_bytes"] = max(self.counts["grown_bytes"], growth)


class Worker:
    """The worker's side of a run, from the newest checkpoint to the last round."""

    def __init__(self, setting: Setting, index: int, server: Connection, checkpoints: Checkpoints):
        self.setting, self.index, self.server, self.checkpoints = setting, index, server, checkpoints
        self.worker = lamina.Worker(LAYOUT, sender=index, **setting.options)
        self.replica = np.zeros(sum(SIZES), np.float32)
        self.round, self.memory = checkpoints.newest(), Memory()
        if self.round > 0:
            state, self.replica = checkpoints.load(f"worker{index}", self.round)
            self.worker.load(state)

    def run(self) -> None:
        self.audit()
        self.take_parameters()
        while self.round < self.setting.rounds:
            last = self.setting.checkpoint_after(self.round)
            while self.round < last:
                self.round += 1
                self.send()
                self.take_parameters()
            self.take_parameters()
            if self.setting.fault != "skip-save" or self.index != 1:
                self.checkpoints.save(f"worker{self.index}", self.round, (self.worker.save(), self.replica))
            self.memory.look()
            self.audit()
            receive(self.server)

    def step(self) -> lamina.Step:
        """This round's, all of its gradients at once or each by itself; if it is to refuse a gradient, one was refused before."""
        gradients = self.setting.gradients(self.index, self.round)
        if bad := self.setting.bad_element(self.index, self.round):
            layer, place = bad
            good, gradients[layer][place] = gradients[layer][place], np.nan
            if self.setting.options["non_finite"] == "refuse":
                refused = self.worker.add(gradients)
                assert not refused and refused.refused_layer == layer, "a gradient with NaN was accepted"
                del refused
                gradients[layer][place] = good
        if self.round % 2 == 0:
            return self.worker.add(gradients)
        step = self.worker.begin()
        for layer in reversed(range(len(SIZES))):
            if self.setting.fault == "left-out" and layer == 0:
                step.skip(layer)
            else:
                step.add(layer, gradients[layer])
        return step

    def send(self) -> None:
        step = self.step()
        if self.setting.loses(self.index, self.round):
            step.frame()  # one that does not arrive: the step is given up, and goes out again without another gradient
            del step
            step = self.worker.add([None] * len(SIZES))
        self.server.send((crc32(self.replica), step.frame()))
        step.commit()

    def take_parameters(self) -> None:
        round_, data = receive(self.server)
        assert round_ == self.round, f"a reply of round {round_}"
        frame, fragments = lamina.decode(data, self.worker.fragments), self.worker.fragments
        assert frame.kind == "parameters"
        for fragment, part in enumerate(np.split(self.replica, np.cumsum(fragments.sizes)[:-1])):
            frame.apply_to(fragment, part)

    def audit(self) -> None:
        residual = np.concatenate([self.worker.residual(layer) for layer in range(len(SIZES))])
        self.server.send((crc32(self.replica), residual, self.memory.growth))


def process(name: str, begin) -> None:
    """What a child does: its status is 0 for done, LOST_A_PEER, or 1 after its name, its round and what broke."""
    status, of = 0, None
    try:
        of = begin()
        of.run()
    except (EOFError, ConnectionError):
        status = LOST_A_PEER
    except Exception as error:
        print(f"soak: {name}, round {of.round if of else 0}: {error}", file=sys.stderr, flush=True)
        status = 1
    os._exit(status)


def one_run(setting: Setting, directory: pathlib.Path, kill_every: int) -> collections.Counter:
    """Server and workers to the last round, killed every so many rounds in the mean (0: never) and resumed from the newest checkpoint.
    RuntimeError if a process fails other than by a kill, or if nothing happens until the deadline."""
    directory.mkdir()
    checkpoints, draw, sums = Checkpoints(directory), random.Random(setting.seed), collections.Counter(runs=1, rounds=setting.rounds)
    context = multiprocessing.get_context("fork")
    while True:
        pipes = [context.Pipe() for _ in range(setting.workers)]
        progress, to_progress = context.Pipe(duplex=False)

        def start(name, begin, keeps):
            def child():
                for connection in [progress, to_progress, *(end for pipe in pipes for end in pipe)]:
                    if connection not in keeps:
                        connection.close()  # or nobody would see the end of another
                process(name, begin)
            started = context.Process(target=child, name=name, daemon=True)
            started.start()
            return started

        ends = [pipe[0] for pipe in pipes]
        processes = [start("the server", lambda: Server(setting, ends, checkpoints, to_progress), [*ends, to_progress])]
        for w, pipe in enumerate(pipes):
            processes.append(start(f"worker {w}", lambda w=w, pipe=pipe: Worker(setting, w, pipe[1], checkpoints), [pipe[1]]))
        for connection in [to_progress, *(end for pipe in pipes for end in pipe)]:
            connection.close()
        try:
            due = checkpoints.newest() + draw.randrange(2 * kill_every) if kill_every else setting.rounds + 1
            at, counts = wait_for(progress, due)
            killed = []
            if at >= due:
                time.sleep(draw.random() * 0.004)  # in the middle of whatever they do
                killed = draw.sample(processes, 2 if draw.random() < 0.25 else 1)
                for victim in killed:
                    victim.kill()
            _, more = wait_for(progress, setting.rounds + 1)
            add(sums, more or counts)
            if ended(processes, killed):
                return sums
        finally:
            for each in processes:
                each.kill()
                each.join()
            progress.close()
        sums.update(kills=len(killed), server_kills=processes[0] in killed, resumes=1)


def add(sums: collections.Counter, more: dict) -> None:
    growth = max(sums["grown_bytes"], more.get("grown_bytes", 0))
    sums.update(more)
    sums["grown_bytes"] = growth


def wait_for(progress: Connection, due: int) -> tuple[int, dict]:
    """The round that the server has come to, `due` or the last before its end, and what it has counted."""
    at, counts = 0, {}
    while at < due:
        if not progress.poll(2 * SECONDS):
            raise RuntimeError(f"no progress since round {at}")
        try:
            at, counts = progress.recv()
        except EOFError:
            break
    return at, counts


def ended(processes: list, killed: list) -> bool:
    """Whether all have done their work. Those that lost a peer must end by themselves, and only after a kill."""
    failures = []
    for each in processes:
        each.join(2 * SECONDS)
        if each.exitcode is None:
            raise RuntimeError(f"{each.name} does not end")
        was_killed = each in killed and each.exitcode == -signal.SIGKILL
        if each.exitcode != 0 and not was_killed and not (killed and each.exitcode == LOST_A_PEER):
            failures.append((each.exitcode == LOST_A_PEER, f"{each.name} ended with {each.exitcode}"))
    if failures:
        raise RuntimeError(min(failures)[1])  # who lost a peer is not who broke
    return all(each.exitcode == 0 for each in processes)


def soak(setting: Setting, kill_every: int) -> collections.Counter:
    with tempfile.TemporaryDirectory(prefix="lamina_soak.") as directory:
        sums, models = collections.Counter(), []
        for name, every in (("without", 0), ("with", kill_every)):
            path = pathlib.Path(directory) / name
            add(sums, one_run(setting, path, every))
            models.append(Checkpoints(path).load("server", setting.rounds)[0])
        if models[0].tobytes() != models[1].tobytes():
            raise RuntimeError("the final model is not that of the run without kills")
        return sums


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000, help="of a run")
    parser.add_argument("--workers", type=int, choices=(1, 2, 4, 8, 16), default=8, help="a power of two, so that their mean is exact")
    parser.add_argument("--seed", type=int, default=1, help="of the first two runs, one synchronous, one asynchronous")
    parser.add_argument("--minutes", type=float, default=0, help="go on with the next seeds for so long")
    parser.add_argument("--kill-every", type=int, default=64, help="rounds between kills, in the mean")
    parser.add_argument("--fault", choices=FAULTS, default="", help="break it, to see it noticed")
    given = parser.parse_args()
    if given.rounds < 1 or given.kill_every < EVERY:
        parser.error(f"--rounds begins at 1, --kill-every at {EVERY}: runs that are killed sooner never come to a checkpoint")
    end, sums, seed = time.monotonic() + 60 * given.minutes, collections.Counter(), given.seed
    while seed == given.seed or time.monotonic() < end:
        for asynchronous in (False, True):
            setting = Setting(seed, asynchronous, given.rounds, given.workers, given.fault)
            try:
                add(sums, soak(setting, given.kill_every))
            except RuntimeError as error:
                print(f"soak: seed {seed}, asynchronous {asynchronous}: {error}", file=sys.stderr)
                return 1
            print(f"seed {seed}, {'asynchronous' if asynchronous else 'synchronous'}: {sums['rounds']} rounds so far", flush=True)
        seed += 1
    for name, value in sorted(sums.items()):
        print(f"{name:<12} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
