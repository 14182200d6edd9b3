# SPDX-License-Identifier: MIT
import contextlib
import dataclasses
import importlib
from typing import Any, Iterator, List, Optional, Sequence, Tuple, Union

import torch

import lamina
from lamina.torch._cpu import Place
from lamina.torch._device import Agree, DeviceBackend
from lamina.torch._foreach import zero_all

Row = Tuple[int, int, str]  # of a layer's gradient: its address, its elements, and their type


class CudaBackend(DeviceBackend):
    """The step's numbers by the kernels of lamina._cuda, a launch each for all layers: adding and measuring, selecting, writing what is
    sent in one piece, committing. What the host has to know of a selection it selects once more, by the same values; both are bitwise
    identical. It waits as TorchBackend does, and then reads the count of what was left out.
    Gradients that are not finite are refused on the device, without a wait.

    Memory: the residual, the velocity with momentum, and what one step may send, from the last bucket to the end of the step only."""

    def __init__(self, layout: lamina.Layout, options: lamina.Options, wire: str, device: torch.device) -> None:
        super().__init__(layout, options, wire, device)
        self._layout, self._options = layout, dataclasses.asdict(options)
        self._options.pop("value")
        self._rows: List[Row] = []  # where the worker has the gradients
        self._is_encoded = True  # or no step has begun
        with torch.cuda.device(device):
            self._worker: Any = importlib.import_module("lamina._cuda").Worker(
                dict(zip(layout.names, layout.shapes)), payload="as_is" if wire == "float32" else wire, **self._options)

    @contextlib.contextmanager
    def _stream(self) -> Iterator[int]:
        with torch.cuda.device(self._device):
            yield torch.cuda.current_stream(self._device).cuda_stream

    def take(self, buffers: Sequence[torch.Tensor], places: Sequence[Place]) -> None:
        super().take(buffers, places)
        begins, types = [each.data_ptr() for each in buffers], [str(each.dtype)[len("torch."):] for each in buffers]
        widths = [each.element_size() for each in buffers]
        rows = [(begins[bucket] + begin * widths[bucket], size, types[bucket]) for (bucket, begin), size in zip(places, self._sizes)]
        if rows != self._rows:
            with self._stream() as stream:
                self._worker.bind(stream, rows)
            self._rows = rows

    def add_all(self, scale: Union[float, torch.Tensor], agree: Optional[Agree] = None) -> int:
        """Begins a step with the gradients that were taken, unless `agree` is there and has summed up that one of them, on any rank, is
        not finite. Returns the bytes that it summed up."""
        self.step += 1
        self._is_open = True
        self._gradients = self._layers.norms(self._buffers, 1)
        self._largest = self._limits[0]  # of what must be finite
        self._guards = {}
        if agree is not None:
            self._largest = self._gradients.max()
            self._guards["found_inf"] = (~(self._largest < torch.inf)).float().reshape(1)  # NaN is the largest of all
            agree(self._guards["found_inf"])
        if isinstance(scale, torch.Tensor) or scale != 1:
            self._guards["inverse_scale"] = torch.as_tensor(scale, dtype=torch.float32, device=self._device).reshape(1)
        with self._stream() as stream:
            if not self._is_encoded:  # a step that was given up: or these would be its next micro-batch
                self._worker.select(stream)
            self._is_encoded = False
            self._worker.accumulate(stream, **{name: each.data_ptr() for name, each in self._guards.items()})
        return 4 if agree is not None else 0

    def leave_out(self) -> None:
        """It was, by add_all()."""

    def observe(self, world_size: int, scale: Union[float, torch.Tensor]) -> torch.Tensor:
        values = torch.empty(len(self.fragments), dtype=torch.float64, device=self._device)
        with self._stream() as stream:
            self._worker.copy_values(stream, values.data_ptr())
        largest = (values * self._divisors).max()  # of the norms, and no element is larger
        has_float16 = any(buffer.dtype is torch.float16 for buffer in self._buffers)
        return self._observed(values, self._gradients, [
            self._largest, largest, largest * world_size, largest * scale if has_float16 else self._limits[3]])

    def fetch(self, sums: torch.Tensor, own: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Both on the host, which waits for them."""
        host = torch.cat([sums, own]).cpu()
        with self._stream() as stream:
            self.left_out_elements = self._worker.last_step(stream)["left_out_elements"]
        return host[:len(sums)], host[len(sums):]

    def select(self, agreed: torch.Tensor, held: bytes) -> List[int]:
        # What the host has divided: a device does not round every quotient as it does.
        values, flags = agreed.to(self._device), torch.frombuffer(bytearray(held), dtype=torch.uint8).to(self._device)
        with self._stream() as stream:
            self._worker.select(stream, values.data_ptr(), flags.data_ptr())
        return super().select(agreed, held)

    def _encoded(self) -> torch.Tensor:
        frame = torch.empty(self._worker.largest_frame_bytes, dtype=torch.uint8, device=self._device)
        with self._stream() as stream:
            self._worker.encode(stream, frame.data_ptr(), frame.numel())
        self._is_encoded = True
        return frame

    def pack(self, world_size: int) -> torch.Tensor:
        begin = self._worker.prefix_bytes
        width = 4 if self._wire is torch.float32 else 2
        packed = self._encoded()[begin:begin + self.sent_elements * width].view(self._wire)
        return packed.mul_(1 / world_size) if self._wire is torch.float32 else packed

    def commit(self) -> None:
        with self._stream() as stream:
            self._worker.commit(stream)
        self._selector.commit(self.step)
        self._is_open = False

    def unpack(self, mean: torch.Tensor) -> None:
        if not mean.numel():
            zero_all(self._buffers)
        elif self._wire is torch.float32 and all(buffer.dtype is torch.float32 for buffer in self._buffers):
            with self._stream() as stream:
                self._worker.restore(stream, mean.data_ptr())
        else:
            super().unpack(mean)

    def refuse(self) -> None:
        """The step has not begun."""
        self.abandon()

    def abandon(self) -> None:
        """The step ends here; what was added stays in the residual, and the next step has the same number."""
        if self._is_open:
            self.step -= 1
            self._is_open = False
        self.release()

    # --- checkpoints ---

    def save(self) -> bytes:
        if not self._is_encoded:  # a step that was given up: as a frame that was lost
            with self._stream() as stream:
                self._worker.select(stream)
            self._encoded()
        with self._stream() as stream:
            return bytes(self._worker.save(stream))

    def load(self, memory: memoryview) -> None:
        with self._stream() as stream:
            self._worker.load(stream, bytes(memory))
        self.step, self._is_encoded = self._selector.load(memory)[0], True

    def residual(self, layer: int) -> torch.Tensor:
        own = lamina.Selector(self._layout, **self._options).load(self.save())[1]
        numbers = torch.split(torch.frombuffer(own, dtype=torch.float32), self._sizes)[layer]
        return numbers.to(self._device)
