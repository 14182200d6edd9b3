# SPDX-License-Identifier: MIT
"""The sdist and the wheel that tests/python/run has made."""

import dataclasses
import email
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest
import torch

import lamina
import ranks

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def dist():
    if "LAMINA_DIST" not in os.environ:
        pytest.skip("LAMINA_DIST is not set: tests/python/run makes sdist and wheel")
    return pathlib.Path(os.environ["LAMINA_DIST"])


def test_the_sdist_has_what_is_needed_and_nothing_else(dist):
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {pathlib.PurePosixPath(name).relative_to(f"lamina-{lamina.__version__}") for name in archive.getnames()}
    top = {name.parts[0] for name in names if name.parts}
    assert top == {"include", "python", "pyproject.toml", "LICENSE", "PKG-INFO"}
    assert not [name for name in names if name.suffix in (".so", ".pyc", ".log")]
    assert pathlib.PurePosixPath("python/src/module.cpp") in names


def test_the_wheel_has_types_and_works_without_torch(dist, tmp_path):
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as archive:
        names = set(archive.namelist())
        needs = archive.read(f"lamina-{lamina.__version__}.dist-info/METADATA").decode().splitlines()
        archive.extractall(tmp_path / "site")
    assert {"lamina/py.typed", "lamina/_core.pyi", "lamina/_arrays.pyi", "lamina/__init__.py", "lamina/torch/__init__.py"} <= names
    # An empty environment has no numpy, without which torch.distributed gathers no objects.
    assert {'Requires-Dist: torch>=1.13; extra == "torch"', 'Requires-Dist: numpy; extra == "torch"'} <= set(needs)
    venv.create(tmp_path / "empty", with_pip=False)

    def ran(code):
        return subprocess.run([tmp_path / "empty/bin/python", "-c", code], env={"PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True)

    done = ran("import array, lamina; w = lamina.Worker(lamina.Layout({'a': (3,)})); "
               "print(w.add([memoryview(array.array('f', [1, 2, 6]))]).values()[0], lamina.__version__)")
    assert done.stdout.split() == ["3.0", lamina.__version__], done.stderr
    done = ran("import lamina.torch")
    assert "ImportError: lamina.torch needs PyTorch: pip install torch" in done.stderr


def test_the_metadata_can_be_read_where_there_is_no_repository(dist):
    for wheel in (next(dist.glob("*.whl")), next(dist.glob("pure/*.whl"))):
        with zipfile.ZipFile(wheel) as archive:
            metadata = email.message_from_bytes(archive.read(f"lamina-{lamina.__version__}.dist-info/METADATA"))
            assert f"lamina-{lamina.__version__}.dist-info/licenses/LICENSE" in archive.namelist()
        assert (metadata["Name"], metadata["License-Expression"], metadata["Requires-Python"]) == ("lamina", "MIT", ">=3.10")
        assert "DiLoCo" in metadata["Keywords"].split(",") and len(metadata["Summary"]) < 120
        assert {"Typing :: Typed", "Programming Language :: C++", "Operating System :: POSIX :: Linux"} <= set(metadata.get_all("Classifier"))
        page = metadata.get_payload()
        links = re.findall(r"""\]\(([^)]*)|(?:src|href)=["']([^"']*)""", page)
        assert page.startswith("# lamina") and not [link for link in links if not "".join(link).startswith("https://")]


def test_a_process_ends_without_a_word(tmp_path):
    """Also one that never releases an object, as PyTorch never does its hooks. DDP and the process group go before the end, as docs/pytorch/hook.md
    asks for: a thread of gloo that still drops tensors while Python ends aborts the process, with lamina and without."""
    program = tmp_path / "ends.py"
    program.write_text(f"""
import ctypes
import gc
import torch
import torch.distributed as dist
import lamina.torch
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
state = lamina.torch.register(ddp, drop_ratio=0)
ddp(torch.ones(2, 8)).sum().backward()
del ddp
gc.collect()
dist.destroy_process_group()
ctypes.pythonapi.Py_IncRef(ctypes.py_object(lamina.Worker(lamina.Layout({{"a": (3,)}}))))
""")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=4 * ranks.SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_version_is_the_librarys():
    text = (ROOT / "include/lamina/version.hpp").read_text()
    numbers = [line.split()[-1] for line in text.splitlines() if line.startswith("#define LAMINA_VERSION_")]
    assert lamina.__version__ == ".".join(numbers[:3])


# Lines 8 to 11 are wrong.
OPTIONS = """import torch
from torch.nn.parallel import DistributedDataParallel
import lamina.torch


def given(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    lamina.torch.register(ddp, drop_ratio=0.9, wire=torch.bfloat16)
    lamina.torch.register(ddp, drop_ration=0.95)
    lamina.torch.register(ddp, wire="fp8")
    lamina.torch.LocalUpdates(optimizer, payload="fp8")
    lamina.torch.LocalUpdates(optimizer, send_budget="high")
"""


# Behind it lines 22 to 24 are.
ARRAYS = """

import array
import numpy as np
worker = lamina.Worker(lamina.Layout({'a': (3,)}))
step = worker.begin()
step.add(0, array.array('f', [1, 2, 3]))
step.add(0, np.zeros(3, np.float32))
value: float = step.values()[0]
lamina.decode(step.frame(), worker.fragments)
wrong: str = worker.steps
lamina.Worker(3)
step.add(0, [1.0, 2.0, 3.0])
"""


def test_the_package_keeps_its_types_and_a_user_knows_them(tmp_path):
    pytest.importorskip("mypy")
    has_types = torch.__version__ >= "2"  # of PyTorch's own; before they are in parts, and what comes from it may be anything
    # The compiler's parts of it, which mypy takes most of its time for, are not looked at.
    skipped = [f"torch.{name}.*" for name in ("_decomp", "_dynamo", "_export", "_functorch", "_higher_order_ops", "_inductor", "_prims", "_refs",
                                              "ao", "export", "fx", "jit", "onnx", "testing", "utils.data")] if has_types else ["torch.*"]
    (tmp_path / "settings").write_text("[mypy]\nstrict = True\nignore_missing_imports = True\n"
                                       f"[mypy-{','.join(skipped)}]\nfollow_imports = skip\n")
    shutil.copytree(pathlib.Path(lamina.__file__).parent, tmp_path / "lamina", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "user.py").write_text((OPTIONS if has_types else "import lamina" + 11 * "\n") + ARRAYS)

    def errors(*what):
        done = subprocess.run([sys.executable, "-m", "mypy", "--config-file", "settings", "--cache-dir", "cache", *what],
                              capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode in (0, 1), done.stdout + done.stderr
        return [line for line in done.stdout.splitlines() if "error: " in line]
    assert [line.split(": error")[0] for line in errors("lamina", "user.py")] == [
        f"user.py:{line}" for line in (*((8, 9, 10, 11) if has_types else ()), 22, 23, 24)]
    copy = tmp_path / "lamina/torch/_cpu.py"
    copy.write_text(copy.read_text().replace("def save(self) -> bytes", "def save(self) -> int"))
    assert ["_cpu.py" in line and '"bytes"' in line for line in errors("lamina")] == [True]


def test_pyright_refuses_a_wrong_option(tmp_path):
    pytest.importorskip("basedpyright", reason="basedpyright is not installed")  # pyright with a node of the Python registry
    (tmp_path / "options.py").write_text(OPTIONS)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    done = subprocess.run([sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "options.py"],
                          capture_output=True, text=True, cwd=tmp_path)
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert [(each["range"]["start"]["line"] + 1, each["rule"]) for each in found if each["severity"] == "error"] == [
        (8, "reportCallIssue"), (9, "reportArgumentType"), (10, "reportArgumentType"), (11, "reportArgumentType")], done.stdout + done.stderr


def test_the_options_that_types_know_are_all_there_are():
    from lamina.torch._options import Choice
    assert list(Choice.__annotations__) == [field.name for field in dataclasses.fields(lamina.Options)]
