# SPDX-License-Identifier: MIT
from typing import Any, Protocol, Union

from typing_extensions import Buffer

class SupportsDLPack(Protocol):
    def __dlpack__(self, *arguments: Any, **options: Any) -> Any: ...

# What the extension takes: arrays of numpy, jax and torch, array.array, memoryview, bytes.
Array = Union[SupportsDLPack, Buffer]

# What it gives; whoever needs the type of the elements asks for its format.
Numbers = memoryview[float]
