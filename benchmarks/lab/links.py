# SPDX-License-Identifier: MIT
"""What a link of the emulated cluster is made of: rate and queue, classes of service, loss, and the route that tunes TCP."""

import contextlib
import json
import os
import re
import subprocess

# A queue of 50 ms is what a switch might have; a burst must hold what arrives between two ticks of the kernel's clock.
QUEUE_MS = 50
BURST_SECONDS = 0.002
BURST_BYTES_AT_LEAST = 256 * 1024
# Where the queue is said in bytes: what a full bucket lets through without a queue must be small compared with it.
SHORT_BURST_SECONDS = 0.00025
SHORT_BURST_BYTES_AT_LEAST = 32 * 1024
PACKET_BYTES = 1514

CONTROL_TOS = 0xa0
CONTROL_QUEUE_BYTES = 64 * 1024
# Of positions 0 to 3: AF41 to AF11, and AF43 to AF13.
PROTECTED_TOS = (0x88, 0x68, 0x48, 0x28)
DROPPABLE_TOS = (0x98, 0x78, 0x58, 0x38)
LOSS_PARTS = 1_000_000  # in which the share lost is counted


class Unsupported(RuntimeError):
    """The kernel or the programs of this machine lack something that was asked for."""


def sh(*command: str, **more) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **more)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@contextlib.contextmanager
def needing(what: str):
    """A command that fails within it fails for lack of `what`."""
    try:
        yield
    except (RuntimeError, FileNotFoundError) as error:
        raise Unsupported(f"this machine has no {what}: {error}") from error


def _in(namespace: str, *command: str) -> str:
    return sh("ip", "netns", "exec", namespace, *command)


def cut_segments(namespace: str, device: str, by_card: bool) -> None:
    """Who makes packets of TCP's segments: the kernel before the link, or a card behind it. The queues count the packets' headers also in the
    second case; what is queued, and dropped, is then up to 64 KiB."""
    segments = "on" if by_card else "off"
    _in(namespace, "ethtool", "-K", device, "tso", segments, "gso", segments, "gro", "off", "tx-udp-segmentation", "off")


def keep_order(namespace: str, device: str) -> bool:
    """Each connection's packets go through one processor, as through a wire. Else two processors overtake each other: what arrives out of
    order counts as lost, and is sent again. Whether the kernel can; where it cannot, nothing changes."""
    everyone = f"{(1 << (os.cpu_count() or 1)) - 1:x}"
    # Masks are written in groups of 32 processors.
    groups = ",".join(re.findall(".{1,8}", everyone.zfill(-(-len(everyone) // 8) * 8)))
    try:
        _in(namespace, "sh", "-c", f"echo {groups} > /sys/class/net/{device}/queues/rx-0/rps_cpus")
    except RuntimeError:
        return False
    return True


def burst_bytes(rate_bits: float, is_short: bool) -> int:
    if is_short:
        return max(SHORT_BURST_BYTES_AT_LEAST, int(rate_bits / 8 * SHORT_BURST_SECONDS))
    return max(BURST_BYTES_AT_LEAST, int(rate_bits / 8 * BURST_SECONDS))


def limit(namespace: str, device: str, rate_bits: float, queue_bytes: int | None, is_short: bool) -> None:
    """A rate, with one queue, of QUEUE_MS if None. Takes the place of what the device had."""
    queue = ("latency", f"{QUEUE_MS}ms") if queue_bytes is None else ("limit", str(queue_bytes))
    _replace_root(namespace, device, "tbf", "rate", f"{rate_bits:.0f}", "burst", str(burst_bytes(rate_bits, is_short)), *queue)


def classify(namespace: str, device: str, rate_bits: float, queue_bytes: int) -> None:
    """The same rate, with a queue a class: control before the positions 0 to 3, and these before all else; droppable chunks of a
    position apart from its protected ones, in a queue that is a quarter of theirs."""
    burst = str(burst_bytes(rate_bits, is_short=True))
    shape = ("burst", burst, "cburst", burst, "quantum", str(PACKET_BYTES))

    def add(number: str, queue: int, priority: int, tos: int | None) -> None:
        sh("tc", "-n", namespace, "class", "add", "dev", device, "parent", "1:1", "classid", f"1:{number}", "htb",
           "rate", f"{rate_bits / 100:.0f}", "ceil", f"{rate_bits:.0f}", "prio", str(priority), *shape)
        sh("tc", "-n", namespace, "qdisc", "add", "dev", device, "parent", f"1:{number}", "bfifo", "limit", str(queue))
        if tos is not None:
            sh("tc", "-n", namespace, "filter", "add", "dev", device, "parent", "1:", "protocol", "ip", "prio", "1", "u32",
               "match", "ip", "tos", f"{tos:#04x}", "0xfc", "flowid", f"1:{number}")

    with needing("tc htb with u32 and bfifo, for tags"):
        # What no filter takes goes into 1:90; were that not there, it would pass without a limit.
        _replace_root(namespace, device, "htb", "default", "90")
        sh("tc", "-n", namespace, "class", "add", "dev", device, "parent", "1:", "classid", "1:1", "htb",
           "rate", f"{rate_bits:.0f}", "ceil", f"{rate_bits:.0f}", *shape)
        add("90", queue_bytes, 5, None)
        add("10", CONTROL_QUEUE_BYTES, 0, CONTROL_TOS)
        for position in range(4):
            add(f"2{position}", max(PACKET_BYTES, queue_bytes // 2), position + 1, PROTECTED_TOS[position])
            add(f"3{position}", max(PACKET_BYTES, queue_bytes // 8), position + 1, DROPPABLE_TOS[position])


def _replace_root(namespace: str, device: str, kind: str, *options: str) -> None:
    with contextlib.suppress(RuntimeError):  # there may be none
        sh("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
    sh("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "handle", "1:", kind, *options)


def dropped_packets(namespace: str, device: str) -> int:
    """By the device's queues, since they were made."""
    queues = json.loads(sh("tc", "-n", namespace, "-s", "-j", "qdisc", "show", "dev", device))
    return sum(queue["drops"] for queue in queues if queue.get("root"))  # which counts those below it, too


def lose(namespace: str, share: float) -> None:
    """Loses that share of the packets that come in from outside, TCP and UDP alike, at random."""
    with needing("nftables with numgen (packages nftables; kernel: NF_TABLES, NFT_NUMGEN), for loss"):
        _in(namespace, "nft", "add table ip loss; add chain ip loss in { type filter hook input priority 0; }; "
            f'add rule ip loss in iifname != "lo" numgen random mod {LOSS_PARTS} < {round(share * LOSS_PARTS)} counter drop')


def lost_packets(namespace: str) -> int:
    """By lose(), so far."""
    said = json.loads(_in(namespace, "nft", "-j", "list", "chain", "ip", "loss", "in"))["nftables"]
    return sum(part["counter"]["packets"] for each in said for part in each.get("rule", {}).get("expr", ())
               if "counter" in part)


def tune(namespace: str, device: str, network: str, address: str, congestion: str | None, rto_min: str | None) -> None:
    """TCP's congestion control and least timeout on the way to a network, as `ip route` writes them; None: the kernel's own. What
    TCP remembers of peers is forgotten."""
    options = [*(("congctl", congestion) if congestion else ()), *(("rto_min", rto_min) if rto_min else ())]
    with needing(f"TCP with {' '.join(options)}" if options else "routes to tune"):
        sh("ip", "-n", namespace, "route", "replace", network, "dev", device, "proto", "kernel", "scope", "link", "src", address,
           *options)
    sh("ip", "-n", namespace, "tcp_metrics", "flush", "all")
