# SPDX-License-Identifier: MIT
"""lamina._cuda where nvcc is: it compiles, is imported, and says by name that there is no device. On a GPU it has not run."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cuda():
    nanobind = pytest.importorskip("nanobind")
    path = os.environ["PATH"] + ":/usr/local/cuda/bin"
    if not shutil.which("nvcc", path=path):
        pytest.skip("there is no nvcc")
    build = ROOT / "build/python/cuda"
    launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache", "-DCMAKE_CUDA_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    environment = {**os.environ, "PATH": path}
    for command in (["cmake", "-S", str(ROOT / "python"), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release", "-DLAMINA_PYTHON_CUDA=ON",
                     "-DCMAKE_CUDA_ARCHITECTURES=80", f"-Dnanobind_DIR={nanobind.cmake_dir()}",
                     f"-DPython_EXECUTABLE={sys.executable}", *launcher],
                    ["cmake", "--build", str(build), "--target", "_cuda"]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    specification = importlib.util.spec_from_file_location("_cuda", next(build.glob("_cuda*.so")))
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_it_says_by_name_that_there_is_no_device(cuda):
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("there may be a device")
    with pytest.raises(RuntimeError, match="cudaError(NoDevice|InsufficientDriver): .*stream.cuh:"):
        cuda.Worker({"weight": (3, 4)}, drop_ratio=0.9)


def test_what_it_is_given_is_checked_before(cuda):
    with pytest.raises(ValueError, match="payload must be one of .* got 'int2'"):
        cuda.Worker({"weight": (3, 4)}, payload="int2")
    with pytest.raises(ValueError, match="search_every must be at least 1"):
        cuda.Worker({"weight": (3, 4)}, search_every=0)
    with pytest.raises(TypeError, match="names and shapes"):
        cuda.Worker({"weight": "12"})
    with pytest.raises(TypeError):
        cuda.Worker({"weight": (3, 4)}, decide="ahead")


def test_it_has_the_calls_of_a_step(cuda):
    calls = {"bind", "accumulate", "values", "select", "encode", "commit", "restore", "last_step", "save", "load"}
    assert calls <= set(dir(cuda.Worker))
