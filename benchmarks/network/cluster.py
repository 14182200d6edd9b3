# SPDX-License-Identifier: MIT
"""A cluster of machines on one: a network namespace a machine, linked by a bridge, with limited rates both ways."""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile

SUBNET = "10.77.0"
MASK_BITS = 24
PREFIX = "lamina-m"
SWITCH = "lamina-switch"
# A queue of 50 ms is what a switch might have; a burst must hold what arrives between two ticks of the kernel's clock.
QUEUE_MS = 50
BURST_SECONDS = 0.002
BURST_BYTES_AT_LEAST = 256 * 1024


def sh(*command: str, **more) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **more)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@dataclasses.dataclass(frozen=True)
class Counters:
    """What the machine's interface has sent and received, headers included."""

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int

    def since(self, before: "Counters") -> "Counters":
        return Counters(*(now - then for now, then in zip(dataclasses.astuple(self), dataclasses.astuple(before))))


class Cluster:
    """`with Cluster(machines, rate_bits)` builds it and takes it down again, whatever happens. rate_bits None: no limit."""

    def __init__(self, machines: int, rate_bits: float | None):
        if os.geteuid() != 0:
            raise PermissionError("an emulated cluster needs root, for network namespaces")
        for tool in ("ip", "tc", "ethtool", "unshare"):
            if shutil.which(tool) is None:
                raise FileNotFoundError(f"an emulated cluster needs the program {tool}")
        self.machines = machines
        self.rate_bits = rate_bits

    def __enter__(self) -> "Cluster":
        remove_leftovers()
        try:
            self._build()
        except BaseException:
            remove_leftovers()
            raise
        return self

    def __exit__(self, *_) -> None:
        remove_leftovers()

    def _build(self) -> None:
        sh("ip", "netns", "add", SWITCH)
        sh("ip", "-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        sh("ip", "-n", SWITCH, "link", "set", "bridge", "up")
        for m in range(self.machines):
            name, port = PREFIX + str(m), f"port{m}"
            sh("ip", "netns", "add", name)
            sh("ip", "-n", SWITCH, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            sh("ip", "-n", SWITCH, "link", "set", port, "master", "bridge", "up")
            sh("ip", "-n", name, "addr", "add", f"{self.address(m)}/{MASK_BITS}", "dev", "eth0")
            sh("ip", "-n", name, "link", "set", "eth0", "up")
            sh("ip", "-n", name, "link", "set", "lo", "up")
            for namespace, device in ((name, "eth0"), (SWITCH, port)):
                self._prepare(namespace, device)

    def _prepare(self, namespace: str, device: str) -> None:
        # Packets as on a wire: else the kernel counts, and limits, segments of 64 KiB that no wire carries.
        sh("ip", "netns", "exec", namespace, "ethtool", "-K", device, "tso", "off", "gso", "off", "gro", "off")
        if self.rate_bits is not None:
            burst = max(BURST_BYTES_AT_LEAST, int(self.rate_bits / 8 * BURST_SECONDS))
            sh("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{self.rate_bits:.0f}",
               "burst", str(burst), "latency", f"{QUEUE_MS}ms")

    @staticmethod
    def address(machine: int) -> str:
        return f"{SUBNET}.{machine + 1}"

    @staticmethod
    def counters(machine: int) -> Counters:
        link = json.loads(sh("ip", "-n", PREFIX + str(machine), "-s", "-j", "link", "show", "dev", "eth0"))[0]
        sent, received = link["stats64"]["tx"], link["stats64"]["rx"]
        return Counters(sent["bytes"], received["bytes"], sent["packets"], received["packets"])

    @staticmethod
    def repeated_segments(machine: int) -> tuple[int, int]:
        """Segments since the cluster was built that TCP received again, and that it sent again: a link on which several
        send at once loses some, and TCP repeats more than those."""
        counted = json.loads(sh("ip", "netns", "exec", PREFIX + str(machine), "nstat", "-asj"))["kernel"]
        return counted.get("TcpExtTCPDSACKOldSent", 0), counted.get("TcpRetransSegs", 0)

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
            network = f"{SUBNET}.0/{MASK_BITS}"
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
