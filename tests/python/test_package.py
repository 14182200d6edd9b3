# SPDX-License-Identifier: MIT
"""The sdist and the wheel that tests/python/run has made."""

import os
import pathlib
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest

import lamina

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
    assert top == {"include", "python", "pyproject.toml", "README.md", "LICENSE", "PKG-INFO"}
    assert not [name for name in names if name.suffix in (".so", ".pyc", ".log")]
    assert pathlib.PurePosixPath("python/src/module.cpp") in names


def test_the_wheel_has_types_and_works_without_torch(dist, tmp_path):
    wheel = next(dist.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"lamina/py.typed", "lamina/_core.pyi", "lamina/__init__.py", "lamina/torch/__init__.py"} <= names
    venv.create(tmp_path / "empty", with_pip=False)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    python = str(tmp_path / "empty/bin/python")

    def ran(code):
        return subprocess.run([python, "-c", code], env={"PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True)

    done = ran("import array, lamina; w = lamina.Compressor(lamina.Layout({'a': (3,)})); "
               "print(w.accumulate(0, memoryview(array.array('f', [1, 2, 6]))), lamina.__version__)")
    assert done.stdout.split() == ["3.0", lamina.__version__], done.stderr
    done = ran("import lamina.torch")
    assert "ImportError: lamina.torch needs PyTorch: pip install torch" in done.stderr


def test_the_version_is_the_librarys():
    text = (ROOT / "include/lamina/version.hpp").read_text()
    numbers = [line.split()[-1] for line in text.splitlines() if line.startswith("#define LAMINA_VERSION_")]
    assert lamina.__version__ == ".".join(numbers[:3])


def test_mypy_knows_the_types(tmp_path):
    pytest.importorskip("mypy")
    user = tmp_path / "user.py"
    user.write_text("import lamina\nworker = lamina.Compressor(lamina.Layout({'a': (3,)}))\n"
                    "step: int = worker.step\nwrong: str = worker.step\nlamina.Compressor(3)\n")
    done = subprocess.run([sys.executable, "-m", "mypy", "--ignore-missing-imports", "--no-incremental", str(user)],
                          capture_output=True, text=True, cwd=tmp_path)
    lines = [line for line in done.stdout.splitlines() if "error" in line]
    assert len(lines) == 3 and "user.py:4" in lines[0] and "user.py:5" in lines[1], done.stdout  # two, and their count
