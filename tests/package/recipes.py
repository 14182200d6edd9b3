# SPDX-License-Identifier: MIT
"""Reads the recipes of vcpkg and Spack as these do, with stand-ins for them: recipes.py SOURCE_DIR VERSION. Conan reads its own: package.conan."""
import json
import pathlib
import re
import runpy
import sys
import types

root, version = pathlib.Path(sys.argv[1]), sys.argv[2]
packaging = root / "packaging"
components = {"xtensor", "eigen", "torch", "dlpack"}


def expect(condition, what):
    if not condition:
        sys.exit(f"recipes.py: {what}")


def stand_in(name, **members):
    module = types.ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module


def vcpkg():
    manifest = json.loads((packaging / "vcpkg/vcpkg.json").read_text())
    expect(manifest["name"] == "lamina" and re.fullmatch("[a-z0-9-]+", manifest["name"]), "vcpkg: name")
    expect(manifest["version"] == version, f"vcpkg.json has version {manifest['version']}, lamina is {version}")
    expect(manifest["license"] == "MIT" and manifest["description"], "vcpkg: license, description")
    names = [d if isinstance(d, str) else d["name"] for d in manifest["dependencies"]]
    hosts = {d["name"] for d in manifest["dependencies"] if isinstance(d, dict) and d.get("host")}
    expect(names == sorted(names), "vcpkg: dependencies are not in order")
    expect(hosts == {"vcpkg-cmake", "vcpkg-cmake-config"}, "vcpkg: the portfile's functions need their ports")
    expect(manifest["features"].keys() == components, "vcpkg: a feature for every component")
    for name, feature in manifest["features"].items():
        expect(feature["description"] and feature["dependencies"], f"vcpkg: feature {name}")


def spack():
    calls = []

    class CMakePackage:
        @staticmethod
        def define(name, value):
            return f"-D{name}={'ON' if value else 'OFF'}"

    def directive(name):
        return lambda *arguments, **_: calls.append((name, arguments[0]))

    stand_in("spack_repo")
    stand_in("spack_repo.builtin")
    stand_in("spack_repo.builtin.build_systems")
    stand_in("spack_repo.builtin.build_systems.cmake", CMakePackage=CMakePackage)
    stand_in("spack")
    directives = ("license", "version", "variant", "depends_on")
    stand_in("spack.package", __all__=list(directives), **{name: directive(name) for name in directives})
    package = runpy.run_path(str(packaging / "spack/package.py"))["Lamina"]
    versions = [argument for name, argument in calls if name == "version"]
    expect(versions == [version], f"package.py has versions {versions}, lamina is {version}")
    expect(("license", "MIT") in calls and package.__doc__ and package.homepage, "spack: licence, text, homepage")
    expect({argument for name, argument in calls if name == "variant"} == components, "spack: a variant each")
    options = (root / "CMakeLists.txt").read_text()
    for argument in package().cmake_args():
        option = re.fullmatch(r"-D(\w+)=OFF", argument)
        expect(option and f"option({option[1]} " in options, f"spack: {argument} is no option of lamina")


vcpkg()
spack()
