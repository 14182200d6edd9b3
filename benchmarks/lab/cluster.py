# SPDX-License-Identifier: MIT
"""A cluster of machines on one: a network namespace a machine, linked by a bridge, with limited rates both ways."""

import contextlib
import fcntl
import io
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import links
from links import Unsupported, sh  # noqa: F401: also for those who build clusters

SUBNET = "10.77"
MASK_BITS = 24
PREFIX = "lamina-m"
SWITCH = "lamina-switch"
MOST_PATHS = 256
LOCK = pathlib.Path("/run/lamina-cluster.lock")


class Cluster:
    """`with Cluster(machines, rate_bits)` builds it and takes it down again, whatever happens. There is one at a time on a machine: who
    comes second waits.

    rate_bits    of every link, each way; None: no limit; a sequence: of each path
    queue_bytes  of the switch's ports; machines keep theirs of 50 ms, which is the default of both. Where it is given, the buckets of
                 both ends are small: else a port lets through 256 KiB, and a machine sends as much at once, without a queue
    tags         the switch's ports have a queue for each class of bounded loss, docs/bounded-loss-protocol.md
    paths        of each machine: interfaces eth0, eth1, ..., each with a switch and a network of its own; MPI goes over the first
    loss         share of the packets, TCP and UDP alike, that a machine loses of what comes to it
    congestion   of TCP, by the route; None: the kernel's own
    rto_min      TCP's least retransmission timeout, by the route, as "5ms"; None: the kernel's own
    offload      TCP hands segments of up to 64 KiB to the links, which count them as the packets that a network card makes of them; else it
                 hands over packets, and the processors of this machine are at their limit at about 4 Gb/s of all links together

    Once it is built, `keeps_order` says whether at the end of every link a connection's packets stay in order, by links.keep_order.

    Throws ValueError for what cannot be meant, Unsupported, by name, for what this machine lacks.
    """

    def __init__(self, machines: int, rate_bits: float | Sequence[float] | None, queue_bytes: int | None = None, tags: bool = False,
                 paths: int = 1, loss: float = 0.0, congestion: str | None = "cubic", rto_min: str | None = None,
                 offload: bool = False):
        if os.geteuid() != 0:
            raise PermissionError("an emulated cluster needs root, for network namespaces")
        for tool in ("ip", "tc", "ethtool", "unshare", *(("nft",) if loss > 0 else ())):
            if shutil.which(tool) is None:
                raise FileNotFoundError(f"an emulated cluster needs the program {tool}")
        if not 1 <= paths <= MOST_PATHS:
            raise ValueError(f"a machine has 1 to {MOST_PATHS} paths, not {paths}")
        if offload and (loss > 0 or tags):
            raise ValueError("loss and tags go by packets: they need links without offload")
        if not 0 <= loss < 1:
            raise ValueError(f"the share of packets lost is at least 0 and below 1, not {loss}")
        self.machines = machines
        self.rates = list(rate_bits) if isinstance(rate_bits, Sequence) else [rate_bits] * paths
        if len(self.rates) != paths:
            raise ValueError(f"{paths} paths have as many rates, not {len(self.rates)}")
        self.paths = paths
        self.loss = loss
        self.offload = offload
        self.keeps_order = True  # as far as links are built
        self._set(queue_bytes, tags, congestion, rto_min)

    def __enter__(self) -> "Cluster":
        self._lock = only_one()
        try:
            remove_leftovers()
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        try:
            remove_leftovers()
        finally:
            self._lock.close()

    def reconfigure(self, queue_bytes: int | None = None, tags: bool = False, congestion: str | None = "cubic",
                    rto_min: str | None = None) -> None:
        """Other queues and another TCP for what is started from now on. Counts of drops begin anew."""
        self._set(queue_bytes, tags, congestion, rto_min)
        for machine in range(self.machines):
            for path in range(self.paths):
                self._configure(machine, path)

    def _set(self, queue_bytes: int | None, tags: bool, congestion: str | None, rto_min: str | None) -> None:
        if (tags or queue_bytes is not None) and None in self.rates:
            raise ValueError("a link without a rate has no queue, and no classes in one")
        if queue_bytes is not None and queue_bytes < links.PACKET_BYTES:
            raise ValueError(f"a queue holds a packet of {links.PACKET_BYTES} bytes at least, not {queue_bytes}")
        self.queue_bytes, self.tags, self.congestion, self.rto_min = queue_bytes, tags, congestion, rto_min

    def _build(self) -> None:
        sh("ip", "netns", "add", SWITCH)
        for path in range(self.paths):
            sh("ip", "-n", SWITCH, "link", "add", f"bridge{path}", "type", "bridge")
            sh("ip", "-n", SWITCH, "link", "set", f"bridge{path}", "up")
        for machine in range(self.machines):
            name = PREFIX + str(machine)
            sh("ip", "netns", "add", name)
            sh("ip", "-n", name, "link", "set", "lo", "up")
            for path in range(self.paths):
                self._link(machine, path)
                self._configure(machine, path)
            if self.loss > 0:
                links.lose(name, self.loss)

    def _link(self, machine: int, path: int) -> None:
        name, device, port = PREFIX + str(machine), f"eth{path}", self.port(machine, path)
        sh("ip", "-n", SWITCH, "link", "add", port, "type", "veth", "peer", "name", device, "netns", name)
        sh("ip", "-n", SWITCH, "link", "set", port, "master", f"bridge{path}", "up")
        sh("ip", "-n", name, "addr", "add", f"{self.address(machine, path)}/{MASK_BITS}", "dev", device)
        sh("ip", "-n", name, "link", "set", device, "up")
        for namespace, end in ((name, device), (SWITCH, port)):
            links.cut_segments(namespace, end, by_card=self.offload)
            self.keeps_order &= links.keep_order(namespace, end)

    def _configure(self, machine: int, path: int) -> None:
        name, device, port, rate = PREFIX + str(machine), f"eth{path}", self.port(machine, path), self.rates[path]
        links.tune(name, device, self.network(path), self.address(machine, path), self.congestion, self.rto_min)
        if rate is None:
            return
        is_short = self.tags or self.queue_bytes is not None
        links.limit(name, device, rate, None, is_short)
        if self.tags:
            queue = self.queue_bytes if self.queue_bytes is not None else int(rate / 8 * links.QUEUE_MS / 1000)
            links.classify(SWITCH, port, rate, queue)
        else:
            links.limit(SWITCH, port, rate, self.queue_bytes, is_short)

    @staticmethod
    def network(path: int = 0) -> str:
        return f"{SUBNET}.{path}.0/{MASK_BITS}"

    @staticmethod
    def address(machine: int, path: int = 0) -> str:
        return f"{SUBNET}.{path}.{machine + 1}"

    @staticmethod
    def port(machine: int, path: int = 0) -> str:
        """The switch's end of the link."""
        return f"port{machine}-{path}"

    def dropped_packets(self, machine: int) -> int:
        """By the queues of the switch's ports towards the machine, since they were configured."""
        return sum(links.dropped_packets(SWITCH, self.port(machine, path)) for path in range(self.paths))

    def lost_packets(self, machine: int) -> int:
        """Of what came to the machine, lost there: `loss` of it."""
        return links.lost_packets(PREFIX + str(machine)) if self.loss > 0 else 0

    def command_on(self, machine: int, *command: str) -> list[str]:
        return ["ip", "netns", "exec", PREFIX + str(machine), "unshare", "--uts", "sh", "-c",
                f'hostname {PREFIX}{machine} && exec "$@"', "sh", *command]

    def mpirun(self, ranks_on: list[int], program: list[str], seconds: float) -> subprocess.CompletedProcess:
        """Runs the program with rank r on machine ranks_on[r]; RuntimeError if it fails.

        Between machines over TCP, within one over shared memory, as on a real one: each has a daemon and a host name of
        its own, so Open MPI takes no two machines for one. The counters of the interfaces show that it does not.
        """
        with tempfile.TemporaryDirectory() as directory:
            at = pathlib.Path(directory)
            agent = at / "agent"
            agent.write_text("#!/bin/sh\n# Called with an address and a command: enters the machine that has it.\n"
                             f'machine=$((${{1##*.}} - 1)); shift\n'
                             f'exec ip netns exec {PREFIX}$machine unshare --uts sh -c '
                             f'"hostname {PREFIX}$machine && $*"\n')
            agent.chmod(0o755)
            rankfile = at / "ranks"
            rankfile.write_text("".join(f"rank {rank}={self.address(machine)} slot=0-{os.cpu_count() - 1}\n"
                                        for rank, machine in enumerate(ranks_on)))
            hosts = ",".join(f"{self.address(m)}:{max(1, ranks_on.count(m))}" for m in sorted(set(ranks_on)))
            network = self.network()
            command = self.command_on(
                ranks_on[0], "mpirun", "--allow-run-as-root", "--quiet", "--oversubscribe",
                "--host", hosts, "--rankfile", str(rankfile), "--bind-to", "none",
                "--mca", "plm_rsh_agent", str(agent), "--mca", "btl", "tcp,vader,self", "--mca", "pml", "ob1",
                "--mca", "btl_tcp_if_include", network, "--mca", "oob_tcp_if_include", network, *program)
            return run_in_group(command, seconds)


def run_in_group(command: list[str], seconds: float) -> subprocess.CompletedProcess:
    """As subprocess.run, but nothing that it started outlives it."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
    try:
        output, errors = process.communicate(timeout=seconds)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=5)
            os.killpg(process.pid, signal.SIGKILL)
        raise
    if process.returncode != 0:
        raise RuntimeError(f"the run ended with status {process.returncode}: {errors.strip() or output.strip()}")
    return subprocess.CompletedProcess(command, 0, output, errors)


def only_one() -> io.TextIOWrapper:
    """Returns when no other process has a cluster: what a living one has is no leftover. The kernel frees it with the process."""
    lock = LOCK.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("waiting for another emulated cluster on this machine to go", file=sys.stderr, flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def remove_leftovers() -> None:
    """Whatever an earlier cluster, also one that was killed, has left behind: processes and namespaces."""
    names = [line.split()[0] for line in sh("ip", "netns", "list").splitlines() if line.strip()]
    for name in names:
        if name != SWITCH and not name.startswith(PREFIX):
            continue
        for pid in sh("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        sh("ip", "netns", "del", name)
