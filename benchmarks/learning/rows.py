# SPDX-License-Identifier: MIT
"""What the study runs: a row is one training with one setting and one seed."""

import dataclasses

FIRST_FIELDS = 5  # every row has them in its name


@dataclasses.dataclass(frozen=True)
class Row:
    """ValueError, naming the field, for a number outside its range. Names are checked where they are looked up."""

    scheme: str = "dense"  #: of schemes.SCHEMES
    workers: int = 4
    steps: int = 2000
    seed: int = 0
    rate: float = 1e-3  #: the largest learning rate; it grows over the first 100 steps, and falls as a cosine to a tenth
    optimizer: str = "adamw"  #: of optimizers.OPTIMIZERS; demo and onebit are optimizers of their own
    payload: str = "as_is"  #: of what is sent, both ways, of payload.PAYLOADS
    error_feedback: int = 0  #: of local: 1: what a message leaves out waits outside of what the worker computes with
    fragment: int = 4096  #: elements of a fragment at most; a multiple of 4,096
    drop_ratio: float = 0.95  #: of gradients: the share of the elements that is dropped
    clipped: str = "arrived"  #: of gradients, powersgd and scalecom: "arrived", what came together; or "gradients", each before that
    correction: float = 0.0  #: of gradients and dgc: momentum of each worker in its residual, cleared with what is sent; wants sgd
    held_back: str = "zeros"  #: of gradients: to the optimizer of dropped fragments; or "nothing", so that they and its state stand still
    rank: int = 1  #: of powersgd
    dense_steps: int = 0  #: of powersgd and onebit: steps at the beginning in which everything is sent, as it is
    interval: int = 30  #: of sparseloco: the steps from one sending to the next
    averaged: str = "senders"  #: of sparseloco: the mean of an element is over those that sent it; or over all "workers"
    left_kept: float = 0.95  #: of sparseloco: of what is left after an exchange, what is there at the next
    unsent: str = "outside"  #: of sparseloco: where it waits, "outside" of what a worker computes with, or "within"
    sends: str = "elements"  #: of sparseloco: the largest elements of each 4,096; or a share of whole fragments ("fragments"), in 4 bits, those of largest value
    answer: str = "relayed"  #: of sparseloco: what each receives, what all others send "relayed"; or the mean of all, "rounded" as they are
    top: int = 64  #: of sparseloco: the elements that are sent of each 4,096; of demo: of each tile
    share: float = 0.001  #: of dgc and scalecom: of a matrix's elements those that are sent; of sparseloco: of the fragments
    ramp_steps: int = 0  #: of dgc: steps at the beginning in which a fourth, a sixteenth, ... of the elements are sent
    low_pass: float = 1.0  #: of scalecom: the share of a step that its residual takes in; 1: all of it
    momentum_kept: float = 0.999  #: of demo
    code: str = "entropy"  #: of levels, of levels.CODES
    period: float = 3.0  #: of levels in entropy and top: a third of the elements goes out in a step
    scale: float = 1.8  #: of levels in trits: over the mean magnitude of a fragment
    choice: str = "value"  #: of local, of choices.CHOICES: fragments by representative value, in turn, or all at once and then nothing for a while
    value: str = "mean_abs"  #: of choice=value, of choices.VALUES
    age_power: float = 0.0  #: of choice=value: it is multiplied by its age, the steps since it was sent, to this power
    at_least_every: int = 0  #: of choice=value: a fragment that was dropped for so many steps goes out whatever its value; 0: never
    traffic: float = 0.01  #: of local and levels: the bytes each way over those of the dense run, headers and values included, at most
    delay: int = 0  #: of local: steps between sending a fragment and its arrival
    delta_kept: float = 1.0  #: of local: of a local delta, what is left after each step; 1: all of it
    outer_rate: float = 0.7  #: of local and sparseloco, whose paper has 1
    outer_momentum: float = 0.9  #: of local
    outer_clock: str = "sends"  #: of local: what the outer momentum counts, of schemes.CLOCKS

    def __post_init__(self):
        for field, least in (("workers", 1), ("steps", 1), ("seed", 0), ("delay", 0), ("fragment", 4096),
                             ("rank", 1), ("dense_steps", 0), ("ramp_steps", 0), ("interval", 1), ("top", 1),
                             ("at_least_every", 0), ("age_power", 0)):
            if getattr(self, field) < least:
                raise ValueError(f"{field} must be at least {least}, got {getattr(self, field)}")
        if self.fragment % 4096:
            raise ValueError(f"fragment must be a multiple of 4,096, got {self.fragment}")
        for field in ("drop_ratio", "correction", "momentum_kept"):
            if not 0 <= getattr(self, field) < 1:
                raise ValueError(f"{field} must lie in [0, 1), got {getattr(self, field)}")
        for field in ("share", "low_pass", "left_kept", "delta_kept"):
            if not 0 < getattr(self, field) <= 1:
                raise ValueError(f"{field} must lie in (0, 1], got {getattr(self, field)}")
        for field in ("traffic", "scale"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} must be greater than 0, got {getattr(self, field)}")
        if not self.period >= 1:
            raise ValueError(f"period must be at least 1, got {self.period}")

    def name(self) -> str:
        """The row as text, and the name of its result: the first fields, and those that are not as by default."""
        words = []
        for place, field in enumerate(dataclasses.fields(self)):
            value = getattr(self, field.name)
            if place < FIRST_FIELDS or value != field.default:
                words.append(f"{field.name}={exact(value) if field.type is float else value}")
        return ",".join(words)


def exact(number: float) -> str:
    """The shortest text of no other number: close rates are not one result."""
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)


def parsed(text: str) -> Row:
    """The row of that name, or of FIELD=VALUE with commas or spaces between them, where fields may be left out. ValueError for anything
    else."""
    kinds = {field.name: field.type for field in dataclasses.fields(Row)}
    given = {}
    for word in text.replace(",", " ").split():
        name, equals, value = word.partition("=")
        if name not in kinds or not equals:
            raise ValueError(f"{word!r} is not FIELD=VALUE; fields are {', '.join(kinds)}")
        try:
            given[name] = kinds[name](value)
        except ValueError:
            raise ValueError(f"{name} must be of type {kinds[name].__name__}, got {value!r}") from None
    return Row(**given)


def named(table: dict, row: Row, field: str):
    """table[row.field]. ValueError, with the names there are, for another."""
    name = getattr(row, field)
    if name not in table:
        raise ValueError(f"{field} must be one of {', '.join(table)}, got {name!r}")
    return table[name]


QUICK = [parsed(f"steps=300 rate=0.002 {fields}") for fields in (
    "scheme=dense",
    "scheme=gradients",
    "scheme=local payload=int4 choice=all",
    "scheme=local payload=int4 choice=turn",
    "scheme=local payload=int4 choice=value",
)]
