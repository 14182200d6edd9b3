# SPDX-License-Identifier: MIT
import dataclasses
import math
from typing import Any, Literal, Mapping, Optional, Sequence, TypedDict, Union

import torch

import lamina
from lamina.torch._report import logger

NonFinite = Literal["propagate", "skip", "leave_out"]
Wire = Union[Literal["float32", "bfloat16"], torch.dtype]
Backend = Literal["auto", "cpu", "torch"]
HookBackend = Literal["auto", "cpu", "torch", "cuda"]
Payload = Literal["as_is", "float16", "bfloat16", "int8", "int4", "ternary"]


class Choice(TypedDict, total=False):
    """The fields of lamina.Options, which explains them: how fragments are selected."""

    drop_ratio: float
    warm_up_steps: int
    search_every: int
    send_budget: Optional[float]
    at_least_every: int
    fragment_elements: int
    momentum: float
    value: lamina.Value


_SMALLEST_FRAGMENT, _USUAL_FRAGMENT = 4096, 65536
_COARSE = 4  # a layer of so many times the share to send is told of: it sets what a step sends, and not the ratio


def given_options(caller: str, given: Mapping[str, Any]) -> lamina.Options:
    """The options that a caller was given by name. TypeError for a name that is none, ValueError for two that exclude each other."""
    known = [field.name for field in dataclasses.fields(lamina.Options)]
    for name in given:
        if name not in known:
            raise TypeError(f"{caller} has no option {name!r}; how layers are chosen say {', '.join(known)}, and help({caller}) has the others")
    if "drop_ratio" in given and given.get("send_budget") is not None:
        raise ValueError(f"{caller}: send_budget stands in place of drop_ratio; give one of them")
    return lamina.Options(**given)


def uses_cpu(backend: str, device: torch.device) -> bool:
    """Whether the numbers are made by lamina._core."""
    if backend == "cpu":
        lamina.require_extension("backend 'cpu'")
    return backend == "cpu" or (backend == "auto" and device.type == "cpu" and lamina.HAS_EXTENSION)


def share_to_send(options: lamina.Options) -> float:
    """Of the elements, in a step."""
    return options.send_budget if options.send_budget is not None else 1 - options.drop_ratio


def warn_of_large_layers(names: Sequence[str], shapes: Sequence[Sequence[int]], options: lamina.Options) -> None:
    """Says which layer, or fragment of one, is too large for the share that is to be sent."""
    sizes = [math.prod(shape) for shape in shapes]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    elements = min(sizes[largest], options.fragment_elements or sizes[largest])
    of_all = elements / max(sum(sizes), 1)
    share = share_to_send(options)
    if elements <= _SMALLEST_FRAGMENT or of_all <= _COARSE * share * (1 + 1e-9):
        return
    fragment = _USUAL_FRAGMENT if _USUAL_FRAGMENT <= share * sum(sizes) else _SMALLEST_FRAGMENT
    logger.warning("%s '%s' has %.0f %% of the elements and goes out whole or not at all, where %.2g %% of them are to go out in a step; "
                   "fragment_elements=%d decides it in smaller fragments", "a fragment of" if elements < sizes[largest] else "layer", names[largest],
                   100 * of_all, 100 * share, fragment)
