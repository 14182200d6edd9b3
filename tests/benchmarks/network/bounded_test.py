#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The emulated cluster's classes, queues, paths, loss and TCP, and ./incast over it: bounded_test.py INCAST_PROGRAM. Ends with 77 where no
cluster can be built; a part that this machine's kernel has not is left out by name."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time

from here import NETWORK, cluster, python_with_matplotlib, require, skip_without_clusters

import links

PORT = 7100
RECEIVE = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
s.bind((sys.argv[1], int(sys.argv[2])))
print('ready', flush=True)
s.settimeout(10)
n = 0
try:
  while True:
    s.recv(2048)
    n += 1
    s.settimeout(0.4)
except TimeoutError:
  print(n)
"""
# Blocks while the machine's own queue is full, so it sends at the rate of its link.
SEND = """
import socket, sys
address, port, count, *classes = sys.argv[1:]
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for tos in classes:
  s.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, int(tos, 0))
  for _ in range(int(count)):
    s.sendto(bytes(1400), (address, int(port)))
"""
# Twenty packets that the kernel gets as one.
SEND_TOGETHER = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.IPPROTO_UDP, 103, 1400)
s.sendto(bytes(20 * 1400), (sys.argv[1], int(sys.argv[2])))
"""
TCP_RECEIVE = """
import socket, sys
s = socket.create_server((sys.argv[1], int(sys.argv[2])))
print('ready', flush=True)
c = s.accept()[0]
n = 0
while d := c.recv(65536): n += len(d)
print(n)
"""
TCP_SEND = """
import socket, subprocess, sys
c = socket.create_connection((sys.argv[1], int(sys.argv[2])))
c.sendall(bytes(int(sys.argv[3])))
print(subprocess.run(['ss', '-tinH', 'dst', sys.argv[1]], capture_output=True, text=True, check=True).stdout)
"""


@contextlib.contextmanager
def receiving(machines: cluster.Cluster, program: str, path: int = 0):
    """On machine 0; says what it printed once it has ended."""
    process = subprocess.Popen(machines.command_on(0, "python3", "-c", program, machines.address(0, path), str(PORT)),
                               stdout=subprocess.PIPE, text=True)
    require(process.stdout.readline() == "ready\n", "no receiver")
    try:
        yield lambda: int(process.communicate(timeout=60)[0])
    finally:
        process.kill()


def sender(machines: cluster.Cluster, machine: int, count: int, *classes: int, path: int = 0) -> subprocess.Popen:
    return subprocess.Popen(machines.command_on(machine, "python3", "-c", SEND, machines.address(0, path), str(PORT), str(count),
                                                *map(str, classes)))


def end_all(*processes: subprocess.Popen) -> None:
    for process in processes:
        require(process.wait(timeout=60) == 0, "a sender failed")


def classes_prioritise() -> None:
    # AF41 to AF11, AF43 to AF13, CS5, and no class at all.
    by_class = {"1:20": 0x88, "1:21": 0x68, "1:22": 0x48, "1:23": 0x28, "1:30": 0x98, "1:31": 0x78, "1:32": 0x58, "1:33": 0x38,
                "1:10": 0xa0, "1:90": 0}
    with cluster.Cluster(3, 2e7, queue_bytes=262144, tags=True) as machines:
        port = machines.port(0)
        before = links.classes(cluster.SWITCH, port)
        with receiving(machines, RECEIVE) as received:
            end_all(sender(machines, 1, 4, *by_class.values()))
            require(received() == 4 * len(by_class), "packets were dropped where no queue was full")
        seen = {number: sent - before[number][0] for number, (sent, _) in links.classes(cluster.SWITCH, port).items()}
        for number, tos in by_class.items():
            # What is in no other class, as ARP, is in the last.
            require(seen.get(number) == 4 or (number == "1:90" and seen.get(number, 0) > 4), f"TOS {tos:#04x} is not in {number}: {seen}")
        before = links.classes(cluster.SWITCH, port)
        with receiving(machines, RECEIVE) as received:
            # Twice what the port carries: half must go, and all of that from the lower class.
            end_all(sender(machines, 1, 600, by_class["1:20"]), sender(machines, 2, 600, by_class["1:33"]))
            received()
        drops = {number: dropped - before[number][1] for number, (_, dropped) in links.classes(cluster.SWITCH, port).items()}
        require(drops["1:20"] == 0 and drops["1:33"] > 300, f"the first class does not go first: {drops}")
        require(machines.dropped_packets(0) == sum(drops.values()), f"{machines.dropped_packets(0)} drops in all, {drops}")
        with receiving(machines, RECEIVE) as received:
            end_all(*(sender(machines, machine, 400, 0) for machine in (1, 2)))
            received()
        dropped = links.classes(cluster.SWITCH, port)["1:90"][1]
        require(dropped > 100, f"what no filter takes passes without a limit: {dropped} of 800 dropped")


def packets_are_those_of_a_wire() -> None:
    with cluster.Cluster(3, 1e8, queue_bytes=16384) as machines:
        before = machines.counters(0)
        with receiving(machines, RECEIVE) as received:
            subprocess.run(machines.command_on(1, "python3", "-c", SEND_TOGETHER, machines.address(0), str(PORT)), check=True, timeout=60)
            require(received() == 20, "what is sent together does not fit into a queue for eleven that are sent one by one")
        require(machines.counters(0).since(before).received_packets >= 20, "the link carries packets of 28 KB")


def queues_have_their_size() -> None:
    def buffers(machines: cluster.Cluster) -> list[dict]:
        said = [cluster.sh("tc", "-n", namespace, "-j", "qdisc", "show", "dev", device)
                for namespace, device in ((cluster.SWITCH, machines.port(0)), (cluster.PREFIX + "0", "eth0"))]
        return [next(queue["options"] for queue in json.loads(each) if queue.get("root")) for each in said]

    with cluster.Cluster(3, 2e7) as machines:
        usual = buffers(machines)
        machines.reconfigure(queue_bytes=16384)
        port, machine = buffers(machines)
        require(port.get("limit") == 16384 or port.get("lat", 0) < usual[0]["lat"], f"not a queue of 16 KiB: {port}, {usual}")
        require(machine.get("lat") == usual[1]["lat"], f"the machine's queue is another: {machine}, {usual}")
        drops = {}
        for queue in (16384, 1 << 20):
            machines.reconfigure(queue_bytes=queue)
            with receiving(machines, RECEIVE) as received:
                end_all(*(sender(machines, machine, 300, 0) for machine in (1, 2)))
                require(received() + machines.dropped_packets(0) == 600, "packets are neither there nor dropped")
            drops[queue] = machines.dropped_packets(0)
        require(drops[16384] > 50 and drops[1 << 20] == 0, f"queues of 16 KiB and 1 MiB drop {drops}")


def loss_is_what_was_asked_for() -> None:
    count, share = 3000, 0.2
    with cluster.Cluster(3, None, loss=share) as machines:
        with receiving(machines, RECEIVE) as received:
            end_all(sender(machines, 1, count, 0))
            arrived = received()
        lost = machines.lost_packets(0)
        # Five standard deviations.
        require(abs(lost - share * count) < 5 * (count * share * (1 - share)) ** 0.5, f"{lost} of {count} packets of UDP lost")
        require(arrived + lost == count, f"{arrived} arrived and {lost} were lost of {count}")
        require(machines.lost_packets(2) == 0, "a machine has lost what did not come to it")
    share, size = 0.05, 2_000_000
    with cluster.Cluster(3, None, loss=share, rto_min="5ms") as machines:
        before = machines.counters(0)
        with receiving(machines, TCP_RECEIVE) as received:
            subprocess.run(machines.command_on(1, "python3", "-c", TCP_SEND, machines.address(0), str(PORT), str(size)), check=True,
                           timeout=60, stdout=subprocess.DEVNULL)
            require(received() == size, "TCP has lost bytes")
        came = machines.counters(0).since(before).received_packets
        lost = machines.lost_packets(0)
        # A few of them are no IP, and are never lost.
        require(abs(lost - share * came) < 5 * (came * share * (1 - share)) ** 0.5 + 1, f"{lost} of {came} packets of TCP lost")


def tcp_is_tuned() -> None:
    def connection(machines: cluster.Cluster) -> str:
        with receiving(machines, TCP_RECEIVE) as received:
            said = subprocess.run(machines.command_on(1, "python3", "-c", TCP_SEND, machines.address(0), str(PORT), "100000"),
                                  check=True, timeout=60, capture_output=True, text=True).stdout
            received()
        return said

    def rto_ms(said: str) -> float:
        return float(said.split("rto:")[1].split()[0])

    with cluster.Cluster(3, 1e9) as machines:
        said = connection(machines)
        require(" cubic " in said and rto_ms(said) >= 200, f"not cubic as it comes: {said}")
        machines.reconfigure(rto_min="5ms")
        said = connection(machines)
        require(" cubic " in said and rto_ms(said) < 100, f"not cubic with a short timeout: {said}")
        try:
            machines.reconfigure(congestion="bbr")
        except cluster.Unsupported as error:
            print(f"bbr is left out: {error}")
        else:
            said = connection(machines)
            require(" bbr " in said and rto_ms(said) >= 200, f"not bbr: {said}")
        machines.reconfigure(congestion="reno")
        require(" reno " in connection(machines), "not reno")
        try:
            machines.reconfigure(congestion="pigeon")
            require(False, "a congestion control that there is not")
        except cluster.Unsupported as error:
            require("pigeon" in str(error), str(error))


def paths_are_apart() -> None:
    with cluster.Cluster(3, [2e7, 1e7], paths=2) as machines:
        for path, rate in ((0, "20Mbit"), (1, "10Mbit")):
            limit = cluster.sh("tc", "-n", cluster.SWITCH, "qdisc", "show", "dev", machines.port(2, path))
            require(f"rate {rate}" in limit, f"path {path}: {limit}")
            other = machines.counters(0, 1 - path)
            with receiving(machines, RECEIVE, path) as received:
                end_all(sender(machines, 1, 50, 0, path=path))
                require(received() == 50, f"path {path} does not lead to machine 0")
            moved = machines.counters(0, 1 - path).since(other).received_packets
            require(moved < 25, f"{moved} packets went over the other path")


def what_cannot_be_meant_is_refused() -> None:
    for options, reason in (({"loss": 1.0}, "share of packets lost"), ({"paths": 0}, "1 to 256 paths"),
                            ({"rate_bits": [1e9], "paths": 2}, "as many rates"), ({"queue_bytes": 100}, "at least, not 100"),
                            ({"rate_bits": None, "tags": True}, "has no queue"), ({"rate_bits": None, "queue_bytes": 9999}, "has no queue"),
                            ({"offload": True, "loss": 0.1}, "without offload"), ({"offload": True, "tags": True}, "without offload")):
        try:
            cluster.Cluster(**{"machines": 2, "rate_bits": 1e9, **options})
            require(False, f"{options} is taken")
        except ValueError as error:
            require(reason in str(error), str(error))


def a_kill_leaves_nothing() -> None:
    def outside() -> tuple[str, ...]:
        return tuple(sorted(line.split()[1] for line in cluster.sh("ip", "-o", "link").splitlines()))

    before = outside()
    inside = ("import sys, time; sys.path.insert(0, sys.argv[1]); import cluster\n"
              "with cluster.Cluster(3, 1e8, 65536, tags=True, paths=2, loss=0.1, rto_min='5ms') as c:\n"
              "  print('up', flush=True)\n  c.mpirun([0, 1, 2], ['sleep', '60'], 90)\n")
    process = subprocess.Popen([sys.executable, "-c", inside, str(NETWORK)], stdout=subprocess.PIPE, text=True)
    require(process.stdout.readline() == "up\n", "the cluster did not come up")
    time.sleep(1)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    require(cluster.PREFIX in cluster.sh("ip", "netns", "list"), "this test tests nothing")
    with cluster.Cluster(1, 1e9) as machines:  # which tidies up after the other
        require(machines.lost_packets(0) == 0 and "eth1" not in cluster.sh("ip", "-n", cluster.PREFIX + "0", "-o", "link"),
                "a new cluster has something of the old one")
    names = cluster.sh("ip", "netns", "list")
    require(cluster.SWITCH not in names and cluster.PREFIX not in names, f"left behind: {names}")
    require(outside() == before, f"left behind: {outside()}, before {before}")


def one_waits_for_another() -> None:
    inside = ("import os, sys, time; sys.path.insert(0, sys.argv[1]); import cluster\n"
              "mine = lambda: os.stat('/run/netns/' + cluster.SWITCH).st_ino\n"
              "with cluster.Cluster(1, 1e9):\n  before = mine()\n  print('up', flush=True)\n  time.sleep(1.5)\n"
              "  sys.exit(mine() != before)\n")
    first = subprocess.Popen([sys.executable, "-c", inside, str(NETWORK)], stdout=subprocess.PIPE, text=True)
    require(first.stdout.readline() == "up\n", "the cluster did not come up")
    with cluster.Cluster(1, 1e9):
        require(first.wait(timeout=60) == 0, "a second cluster took the first one down")


def incast_runs(program: str) -> None:
    transports = ["MPI, cubic", "MPI, cubic, rto_min 5 ms", "udp, p = 0.1"]
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run([python_with_matplotlib(), "-B", str(NETWORK / "incast.py"), "--program", program, "--output", directory,
                               "--rates", "1 Gb/s", "--rows", "4 to 1, 0.25 MB, queue 64 KiB", "--steps", "4", "--transports",
                               *transports], capture_output=True, text=True, check=False)
        require(done.returncode == 0, done.stderr)
        with open(f"{directory}/results.json") as file:
            results = json.load(file)["results"]
    ran = [result["transport"] for result in results]
    left_out = [name for name in transports if f"{name} is left out: " in done.stdout]
    require("MPI, cubic" in ran and sorted(ran + left_out) == sorted(transports), f"{ran} ran, {left_out} were left out: {done.stdout}")
    for result in results:
        require(result["steps"] == 4 and result["seconds"]["most"] > 0 and result["missing_up"] <= 0.1, f"{result}")
        # Four frames over one link: the bytes and the rate alone take 8 ms, and the bucket of a port lets through a quarter of a ms.
        require(result["up_seconds"]["median"] > 0.0075, f"frames came faster than the link: {result}")


def main() -> None:
    skip_without_clusters()
    what_cannot_be_meant_is_refused()
    for part in (classes_prioritise, packets_are_those_of_a_wire, queues_have_their_size, loss_is_what_was_asked_for, tcp_is_tuned,
                 paths_are_apart, a_kill_leaves_nothing, one_waits_for_another):
        try:
            part()
        except (cluster.Unsupported, FileNotFoundError) as error:
            print(f"{part.__name__} is left out: {error}")
    incast_runs(sys.argv[1])


main()
