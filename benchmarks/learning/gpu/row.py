# SPDX-License-Identifier: MIT
"""A row is one training with one setting and one seed. A record has its fields under the same names."""

import dataclasses


def option(default, meaning: str, choices=None):
    return dataclasses.field(default=default, metadata={"help": meaning, "choices": choices})


@dataclasses.dataclass(frozen=True)
class Row:
    """ValueError, naming the field, for a number outside its range."""

    task: str = option("text", "a byte-level GPT, or ResNet-9 on CIFAR-10", ("text", "images"))
    scheme: str = option("dense", "how workers communicate", ("dense", "mean", "levels", "sparseloco", "int4", "diloco4", "trits"))
    W: int = option(4, "the number of workers")
    steps: int = option(2000, "the steps of the optimizer")
    rate: float = option(1e-3, "the largest learning rate")
    seed: int = option(0, "of the first parameters and of the batches")
    opt: str = option("adamw", "the optimizer of each worker", ("adamw", "of_mean", "muon", "sgd"))
    H: float = option(3.0, "levels and trits: a step exchanges 1/H of the fragments; sparseloco and diloco4: all are every H steps")
    pct: float = option(0.99, "levels and int4: bytes each way, in per cent of the dense run's")
    k: int = option(256, "sparseloco: the elements that are sent of each 4,096")
    keep: float = option(0.95, "sparseloco: what is kept of the residual from one exchange to the next")
    scale: float = option(1.8, "trits: the scale of a fragment over its mean magnitude")

    def __post_init__(self):
        for name, least in (("W", 1), ("steps", 1), ("seed", 0), ("H", 1), ("k", 1)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("rate", "pct", "scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0, got {getattr(self, name)}")
        if not 0 <= self.keep <= 1:
            raise ValueError(f"keep must lie in [0, 1], got {self.keep}")


COMMON = ("task", "scheme", "W", "steps", "rate", "seed", "opt")
READS = {"dense": (), "mean": (), "levels": ("H", "pct"), "sparseloco": ("H", "k", "keep"), "int4": ("pct",), "diloco4": ("H",),
         "trits": ("H", "scale")}


def fields_read(row: Row) -> dict:
    """The fields that say which training it was, for its record."""
    return {name: getattr(row, name) for name in COMMON + READS[row.scheme]}
