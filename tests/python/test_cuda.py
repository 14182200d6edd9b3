# SPDX-License-Identifier: MIT
"""lamina._cuda where nvcc is: it compiles, and says by name that there is no device. The hook's step by its kernels, in an emulator of CUDA
where there is one, is bitwise that of the CPU. On a GPU none of it has run."""

import contextlib
import ctypes
import functools
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import types
from unittest import mock

import pytest
import torch
from torch import nn

import lamina
import models
import pretended
import ranks
from lamina.torch import _cuda
from lamina.torch._state import LayerDropping

ROOT = pathlib.Path(__file__).parents[2]
BUILD = ROOT / "build/python/cuda"


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@functools.lru_cache(maxsize=None)
def imported(path):
    specification = importlib.util.spec_from_file_location("_cuda", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built():
    nanobind = pytest.importorskip("nanobind")
    path = os.environ["PATH"] + ":/usr/local/cuda/bin"
    if not shutil.which("nvcc", path=path):
        pytest.skip("there is no nvcc")
    launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache", "-DCMAKE_CUDA_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    environment = {**os.environ, "PATH": path}
    run("cmake", "-S", ROOT / "python", "-B", BUILD, "-DCMAKE_BUILD_TYPE=Release", "-DLAMINA_PYTHON_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=90-virtual",
        "-DCMAKE_CUDA_FLAGS=--no-compress", f"-Dnanobind_DIR={nanobind.cmake_dir()}", f"-DPython_EXECUTABLE={sys.executable}", *launcher,
        env=environment)
    run("cmake", "--build", BUILD, "--target", "_cuda", env=environment)


@pytest.fixture(scope="module")
def cuda(built):
    return imported(next(BUILD.glob("_cuda*.so")))


@pytest.fixture(scope="module")
def emulated(built):
    """The module's object, linked with an emulator in place of CUDA's runtime, which PyTorch may have loaded for all."""
    given = os.environ.get("LAMINA_CUDA_EMULATOR", "")
    emulator = pathlib.Path(given) if given else ROOT.parent / "shared/cuda-emulator"
    if not (emulator / "machine.hpp").exists():
        pytest.skip("LAMINA_CUDA_EMULATOR names no emulator of CUDA")
    to = ROOT / "build/cuda-emulator"  # that of tests/cuda/emulated/run
    to.mkdir(exist_ok=True)
    run("flock", to / "lock", emulator / "build", to)
    run("g++", "-shared", "-Wl,-Bsymbolic", BUILD / "CMakeFiles/_cuda.dir/src/cuda.cu.o", next(BUILD.glob("libnanobind-static*.a")),
        *to.glob("*.o"), "-o", BUILD / "emulated.so")


def test_it_says_by_name_that_there_is_no_device(cuda):
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("there may be a device")
    with pytest.raises(RuntimeError, match="cudaError(NoDevice|InsufficientDriver): .*stream.cuh:"):
        cuda.Worker({"weight": (3, 4)}, drop_ratio=0.9)


def test_what_it_is_given_is_checked_before(cuda):
    shapes = {"weight": (3, 4)}
    ranks.refused((ValueError, "payload must be one of .* got 'int2'", lambda: cuda.Worker(shapes, payload="int2")),
                  (ValueError, "search_every must be at least 1", lambda: cuda.Worker(shapes, search_every=0)),
                  (TypeError, "names and shapes", lambda: cuda.Worker({"weight": "12"})),
                  (TypeError, None, lambda: cuda.Worker(shapes, decide="ahead")))


class Worker:
    """That of the module in the emulator, whose kernels see no memory but the emulator's: what an address has is copied there before a
    call, and back after it."""

    def __init__(self, shapes, **options):
        self._runtime = ctypes.CDLL(str(BUILD / "emulated.so"))
        self._real = imported(BUILD / "emulated.so").Worker(shapes, **options)

    def __getattr__(self, name):  # of calls that take no address
        return getattr(self._real, name)

    def _copied(self, address, count):
        memory = ctypes.c_void_p()
        if address:
            assert self._runtime.cudaMallocManaged(ctypes.byref(memory), ctypes.c_size_t(max(count, 1)), 1) == 0
            ctypes.memmove(memory.value, address, count)
        return memory.value or 0

    def _copy_back(self, address, memory, count):
        assert self._runtime.cudaStreamSynchronize(None) == 0
        ctypes.memmove(address, memory, count)

    def bind(self, stream, rows):
        widths = {"float32": 4, "float16": 2, "bfloat16": 2}
        self._rows = [(address, self._copied(address, size * widths[kind]), size * widths[kind]) for address, size, kind in rows]
        self._real.bind(stream, [(memory, size, kind) for (_, memory, _), (_, size, kind) in zip(self._rows, rows)])

    def accumulate(self, stream, **numbers):
        for address, memory, count in self._rows:
            ctypes.memmove(memory, address, count)
        self._real.accumulate(stream, **{name: self._copied(address, 4) for name, address in numbers.items()})

    def copy_values(self, stream, to):
        memory, count = self._copied(to, 8 * len(self.fragment_sizes)), 8 * len(self.fragment_sizes)
        self._real.copy_values(stream, memory)
        self._copy_back(to, memory, count)

    def select(self, stream, agreed=0, held=0):
        self._real.select(stream, self._copied(agreed, 8 * len(self.fragment_sizes)), self._copied(held, len(self.fragment_sizes)))

    def encode(self, stream, to, count):
        memory = self._copied(to, count)
        self._real.encode(stream, memory, count)
        self._copy_back(to, memory, count)

    def restore(self, stream, payload):
        self._real.restore(stream, self._copied(payload, self.last_step(stream)["payload_bytes"]))
        for address, memory, count in self._rows:
            self._copy_back(address, memory, count)


SHAPES = [(40, 130), (40,), (7, 3, 3), (9000,), (0, 4), (10, 64), (10,)]


def bound(on_gpu, dtype=torch.float32, options=None, **given):
    model = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES)
    state = LayerDropping(lamina.Options(drop_ratio=0.7, **(options or {})), **given).bind(model)
    if on_gpu:
        layout = lamina.Layout(dict(zip(state.names, state.shapes)))
        state.backend = _cuda.CudaBackend(layout, state.options, state.wire, torch.device("cpu"))
    return state


def gradients(step, rank, dtype):
    generator = torch.Generator().manual_seed(10 * step + rank)
    made = [(torch.randn(shape, generator=generator) * 0.01 * (1 + (layer + step) % 5)).to(dtype) for layer, shape in enumerate(SHAPES)]
    for unused in made[:4] if step == 5 else made[2:3]:  # on all ranks
        unused.zero_()
    return made


def equal(first, second):
    return all(each.numpy().tobytes() == other.numpy().tobytes() for each, other in zip(first, second))


def residuals(state):
    return [state.residual(name) for name in state.names]


VARIANTS = {"": {}, "momentum, fragments": {"options": {"momentum": 0.9, "fragment_elements": 4096, "search_every": 2}},
            "scaled, clipped": {"scaler": models.Scaler(1024.0), "max_norm": 0.5}, "leave_out": {"nonfinite": "leave_out"},
            "float16": {"dtype": torch.float16}, "bfloat16 on the wire": {"wire": "bfloat16"}}


@pytest.mark.parametrize("variant", VARIANTS)
@ranks.on(2, sends_bfloat16=lambda variant, **_: variant == "bfloat16 on the wire")
def test_its_step_is_bitwise_that_of_the_cpu(emulated, variant):
    rank, dtype = torch.distributed.get_rank(), VARIANTS[variant].get("dtype", torch.float32)
    with pretended.cuda(Worker):
        states = [bound(on_gpu, **VARIANTS[variant]) for on_gpu in (False, True)]
        for step in range(1, 7):
            given = gradients(step, rank, dtype)
            if step == 3 and rank == 1:
                given[3][17] = torch.nan  # a batch that is given up, or an element that is left out
            results = [[each.clone() for each in given] for _ in states]
            with torch.no_grad():
                reports = [state.reduce(each) for state, each in zip(states, results)]
            assert equal(*results) and all(each.isfinite().all() for each in results[0]) == (step != 3 or variant == "leave_out")
            for field in ("step", "skipped", "threshold", "sent_fragments", "sent_elements", "left_out_elements"):
                assert len({getattr(each, field) for each in reports}) == 1, field
            assert equal(*map(residuals, states))
            if step == 4:  # as another run, each from what the other has saved
                saved = [state.state_dict() for state in states]
                by_torch = bound(False, **{**VARIANTS[variant], "backend": "torch"})
                by_torch.load_state_dict(saved[1])
                assert by_torch.step == states[1].step
                assert equal(residuals(by_torch), residuals(states[1]))
                states = [bound(on_gpu, **VARIANTS[variant]) for on_gpu in (False, True)]
                for state, other in zip(states, saved[::-1]):
                    state.load_state_dict(other)


@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize("fails_at", [1, 2, 3])
@ranks.on(1)
def test_a_step_that_was_given_up_loses_nothing(emulated, fails_at, is_saved):
    """In the all-reduce of what says that a gradient is bad, of the values, and of what is sent: as on the CPU, whatever is done before the
    next step."""
    with pretended.cuda(Worker), torch.no_grad():
        for momentum in (0.0, 0.9):
            states = [bound(on_gpu, options={"momentum": momentum}) for on_gpu in (False, True)]
            for step in range(1, 4):
                results = [gradients(step, 0, torch.float32) for _ in states]
                for state, each in zip(states, results):
                    calls = [*[None] * (fails_at - 1), RuntimeError("a rank has died")]
                    all_reduce = mock.Mock(side_effect=calls if step == 2 else None)
                    with pytest.raises(RuntimeError, match="died") if step == 2 else contextlib.nullcontext():
                        state.reduce(each, all_reduce=all_reduce)
                    if step == 2 and is_saved:
                        state.state_dict()
                assert states[0].step == states[1].step == (step if step < 2 else step - 1)
                assert step == 2 or equal(*results)
                if is_saved or step != 2:
                    assert equal(*map(residuals, states))


@ranks.on(1)
def test_where_it_cannot_be_is_said_by_name():
    def with_cuda(**options):
        with mock.patch.object(lamina, "HAS_CUDA", True):
            return LayerDropping(backend="cuda", **options)
    ranks.refused((ImportError, "needs the extension lamina._cuda", lambda: LayerDropping(backend="cuda")),
                  (ValueError, "got overlap=True", lambda: with_cuda(overlap=True)),
                  (ValueError, "got value='max_abs'", lambda: with_cuda(options=lamina.Options(value="max_abs"))),
                  (TypeError, "backend 'cuda' cannot read gradients on cpu", lambda: with_cuda().bind(nn.Linear(3, 2))))


@pytest.mark.parametrize("options, has_it, chosen", [({}, True, "cuda"), ({}, False, "torch"), ({"overlap": True}, True, "torch"),
                                                     ({"options": lamina.Options(value="max_abs")}, True, "torch")])
def test_it_is_chosen_where_it_can_be(options, has_it, chosen):
    state = LayerDropping(**options)
    state._parameters = [types.SimpleNamespace(device=torch.device("cuda"))]
    with mock.patch.object(lamina, "HAS_CUDA", has_it):
        assert state._chosen_backend() == chosen
