# SPDX-License-Identifier: MIT
"""The scale of Lee et al. (MLHPC 2018) by arithmetic: what their published speedups say of a node and of many, and what a model of sums
beside the computation says for up to 256 nodes. Nothing of it is a measurement."""

import argparse
import dataclasses
import itertools
import pathlib

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

from plots import finish  # noqa: E402

CORES, NODES = 8192, 256  # Cori Phase I: 32 cores a node
CORES_A_NODE = CORES // NODES
NODE_FLOPS = 2.36e12  # 2 processors of 16 cores, 2.3 GHz, 32 operations of float a cycle
FORWARD_SHARE = 1 / 3


@dataclasses.dataclass(frozen=True)
class Network:
    name: str
    published_speedup: float  # over one core, with 8,192
    bytes: float
    layers: int  # tensors, each a collective of its own
    flops: float  # an image and step
    connected: tuple[tuple[int, int], ...]  # inputs and outputs of its fully connected layers

    @property
    def node_share(self) -> float:
        """sigma·eta: the speedup of 32 threads in a node, times the efficiency over nodes."""
        return self.published_speedup / NODES

    @property
    def least_efficiency(self) -> float:
        """eta, were a node 32 times as quick as a core."""
        return self.node_share / CORES_A_NODE


NETWORKS = (
    Network("ResNet-50", 2734.25, 102.2e6, 161, 24.6e9, ((2048, 1000),)),
    Network("VGG-16", 2516.36, 553.4e6, 32, 93e9, ((25088, 4096), (4096, 4096), (4096, 1000))),
)


@dataclasses.dataclass(frozen=True)
class Constants:
    """Of a cluster of such nodes, as published for them."""

    bandwidth: float  # bytes a second and node
    alpha: float  # seconds a message
    node_share: float  # of NODE_FLOPS that training reaches


MIDDLE = Constants(5e9, 3e-6, 0.4)
RANGES = [Constants(*each) for each in itertools.product((3e9, 10e9), (1.5e-6, 5e-6), (0.2, 0.7))]
SCHEMES = {"all-reduce, no overlap": "#909498", "all-reduce beside backward": "#56B4E9", "owners, beside both passes": "#0072B2",
           "owners, FC layers by activations": "#D55E00"}


def compute_seconds(network: Network, nodes: int, batch: int, of: Constants) -> float:
    return batch * network.flops / (of.node_share * NODE_FLOPS) / nodes


def communication_seconds(network: Network, nodes: int, batch: int, of: Constants, by_activations: bool) -> float:
    """2 (P-1)/P S/B + 2 L (P-1) alpha. By activations, of b images a node, no gradient of an FC layer moves: each node gets its columns of
    all inputs, (P-1)/P b inputs, and all errors, (P-1) b outputs; parameters go round as before."""
    others = (nodes - 1) / nodes
    moved = 2 * others * network.bytes
    if by_activations:
        for inputs, outputs in network.connected:
            moved += 4 * others * (batch / nodes * (inputs + nodes * outputs) - inputs * outputs)
    return moved / of.bandwidth + 2 * network.layers * (nodes - 1) * of.alpha


def step_seconds(scheme: str, network: Network, nodes: int, batch: int, of: Constants = MIDDLE) -> float:
    computing = compute_seconds(network, nodes, batch, of)
    moving = communication_seconds(network, nodes, batch, of, scheme.endswith("activations"))
    if scheme.endswith("no overlap"):
        return computing + moving
    if scheme.endswith("beside backward"):
        return max(computing, FORWARD_SHARE * computing + moving)
    return max(computing, moving)


def efficiency(scheme: str, network: Network, nodes: int, batch: int, of: Constants = MIDDLE) -> float:
    """Of `nodes` over one, the batch of all of them staying the same."""
    return compute_seconds(network, 1, batch, of) / (nodes * step_seconds(scheme, network, nodes, batch, of))


def batch_reaching(target: float, scheme: str, network: Network, constants: list[Constants], best: bool) -> int:
    """The smallest batch of all 256 nodes, a power of two, for which the efficiency reaches the target with the best constants, or with
    all of them."""
    pick = max if best else min
    for power in range(8, 21):
        if pick(efficiency(scheme, network, NODES, 2 ** power, of) for of in constants) >= target:
            return 2 ** power
    raise ValueError(f"no batch of {network.name} reaches {target}")


OWNERS = "owners, beside both passes"


def table() -> str:
    head = ("", "σ·η", "of linear in cores", "σ at least", "η at least", "some constants reach that from a batch of", "all constants from",
            "owners hide everything (middle constants) from")
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for network in NETWORKS:
        some, every = (batch_reaching(network.least_efficiency, OWNERS, network, RANGES, best) for best in (True, False))
        hidden = batch_reaching(1.0, OWNERS, network, [MIDDLE], True)
        lines.append(f"| {network.name} | {network.node_share:.2f} | {100 * network.published_speedup / CORES:.1f} % | "
                     f"{network.node_share:.2f} | {network.least_efficiency:.3f} | {some:,} | {every:,} | {hidden:,} |")
    return "\n".join(lines) + "\n"


def draw(batch: int) -> plt.Figure:
    """The efficiency over nodes, a panel a network; grey is where the published one may lie, pale blue the model of owners for all
    constants, and pale green where they hide all of it by the middle ones."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    nodes = [2 ** power for power in range(9)]
    lines = {}
    for axes, network in zip(panels, NETWORKS):
        reached = {pick: [pick(efficiency(OWNERS, network, p, batch, of) for of in RANGES) for p in nodes] for pick in (min, max)}
        axes.fill_between(nodes, reached[min], reached[max], color="#0072B2", alpha=0.12, linewidth=0)
        for scheme, colour in SCHEMES.items():
            dashes = ":" if scheme.endswith("activations") else "-"
            lines[scheme], = axes.plot(nodes, [efficiency(scheme, network, p, batch) for p in nodes], dashes, color=colour, linewidth=1.6)
        axes.vlines(NODES, network.least_efficiency, 1, color="#909498", linewidth=6, alpha=0.5)
        hidden = max(p for p in nodes if efficiency(OWNERS, network, p, batch) > 1 - 1e-9)
        axes.axvspan(1, hidden, color="#009E73", alpha=0.07, linewidth=0)
        axes.text(1.15, 0.04, f"owners: all hidden up to {hidden} nodes", fontsize=7, color="#00694D")
        axes.set_xscale("log", base=2)
        axes.set_xticks(nodes, [str(p) for p in nodes])
        axes.set_ylim(0, 1.05)
        axes.set_title(f"{network.name}, {batch:,} images a step: arithmetic, nothing measured", fontsize=8, loc="left")
        finish(axes, "nodes", "efficiency over one node" if axes is panels[0] else "")
    published = plt.Line2D([], [], color="#909498", linewidth=6, alpha=0.5)
    figure.legend([*lines.values(), published], [*lines, "published, whatever a node makes of 32 cores"], fontsize=7, frameon=False,
                  loc="upper center", ncols=3, bbox_to_anchor=(0.5, 0))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(prog="./benchmarks/network/overlap --paper", description=__doc__)
    parser.add_argument("--batch", type=int, default=1024, help="images of all nodes in a step")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("build/overlap"))
    parser.add_argument("--program", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    draw(given.batch).savefig(given.output / "paper.svg", bbox_inches="tight", metadata={"Date": None})
    print(table())
    print(f"Written to {given.output}/paper.svg")
