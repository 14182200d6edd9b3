#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The emulated cluster of benchmarks/lab: cluster_test.py. Ends with 77 where it cannot be built."""

import json
import subprocess

from here import cluster, require, skip_without_clusters


def ranks_stand_on_their_machines() -> None:
    with cluster.Cluster(3, 1e8) as machines:
        said = machines.mpirun([0, 1, 1, 2], ["sh", "-c", "echo $OMPI_COMM_WORLD_RANK $(hostname)"], 60).stdout
        require(sorted(said.split("\n"))[-4:] == ["0 lamina-m0", "1 lamina-m1", "2 lamina-m1", "3 lamina-m2"], said)
        for machine in range(3):
            for namespace, device in ((f"{cluster.PREFIX}{machine}", "eth0"), (cluster.SWITCH, machines.port(machine))):
                limit = cluster.sh("tc", "-n", namespace, "qdisc", "show", "dev", device)
                require("tbf" in limit and "rate 100Mbit" in limit, f"no limit both ways: {limit}")
    namespaces = cluster.sh("ip", "netns", "list")
    require(cluster.SWITCH not in namespaces and cluster.PREFIX not in namespaces, "a cluster was left behind")


def received(machine: int) -> dict:
    """What the machine's interface has received, headers included."""
    return json.loads(cluster.sh("ip", "-n", f"{cluster.PREFIX}{machine}", "-s", "-j", "link", "show", "dev", "eth0"))[0]["stats64"]["rx"]


def send_over(machines: "cluster.Cluster", count: int) -> tuple[int, int]:
    """Machine 0 sends so many bytes by TCP to machine 1; the bytes and packets that one has counted meanwhile."""
    receive = ("import socket; s = socket.create_server(('10.77.0.2', 7000)); c = s.accept()[0]; n = 0\n"
               "while d := c.recv(65536): n += len(d)\nprint(n)")
    send = ("import socket, time\nfor _ in range(100):\n  try: c = socket.create_connection(('10.77.0.2', 7000)); break\n"
            f"  except OSError: time.sleep(0.1)\nc.sendall(bytes({count}))")
    before = received(1)
    receiver = subprocess.Popen(machines.command_on(1, "python3", "-c", receive), stdout=subprocess.PIPE, text=True)
    subprocess.run(machines.command_on(0, "python3", "-c", send), check=True, timeout=60)
    said, _ = receiver.communicate(timeout=60)
    require(int(said) == count, f"{said} bytes arrived")
    after = received(1)
    return after["bytes"] - before["bytes"], after["packets"] - before["packets"]


def links_count_headers_of_packets_that_a_card_makes() -> None:
    count, packet_payload, packet = 20_000_000, 1448, 1514
    for offload in (False, True):
        with cluster.Cluster(2, 1e9, offload=offload) as machines:
            counted, packets = send_over(machines, count)
            queue = json.loads(cluster.sh("tc", "-n", f"{cluster.PREFIX}0", "-s", "-j", "qdisc", "show", "dev", "eth0"))[0]
        wire = count / packet_payload * packet
        require(abs(queue["bytes"] / wire - 1) < 0.02, f"offload {offload}: {queue['bytes']} bytes limited of {wire:.0f}")
        mean = counted / packets
        require((mean > 2 * packet) == offload, f"offload {offload}: {mean:.0f} bytes at once")


skip_without_clusters()
ranks_stand_on_their_machines()
links_count_headers_of_packets_that_a_card_makes()
