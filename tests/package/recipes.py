# SPDX-License-Identifier: MIT
"""Reads the recipes as their package managers do, with stand-ins for those: recipes.py SOURCE_DIR VERSION."""
import json
import pathlib
import re
import runpy
import shutil
import sys
import tempfile
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


def conan():
    class ConanFile:
        pass

    def copy(_, pattern, src, dst):
        for path in pathlib.Path(src).glob(pattern.replace("/*", "/**/*")):  # Conan's * also matches a /
            target = pathlib.Path(dst) / path.relative_to(src)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)

    stand_in("conan", ConanFile=ConanFile)
    stand_in("conan.tools")
    stand_in("conan.tools.build", check_min_cppstd=None, can_run=None)
    stand_in("conan.tools.cmake", CMake=None, CMakeToolchain=None, cmake_layout=None)
    stand_in("conan.tools.files", copy=copy, load=lambda _, path: pathlib.Path(path).read_text())
    stand_in("conan.tools.layout", basic_layout=None)
    expect("LaminaTestConan" in runpy.run_path(str(packaging / "conan/test_package/conanfile.py")), "conan: test_package")
    recipe = runpy.run_path(str(packaging / "conan/conanfile.py"))["LaminaConan"]()
    recipe.recipe_folder = str(packaging / "conan")
    recipe.set_version()
    expect(recipe.name == "lamina" and recipe.license == "MIT", "conan: name, license")
    expect(recipe.version == version, f"conanfile.py gives version {recipe.version}, lamina is {version}")

    with tempfile.TemporaryDirectory() as directory:
        recipe.export_sources_folder = recipe.source_folder = directory + "/sources"
        recipe.package_folder = directory + "/package"
        recipe.export_sources()
        recipe.package()
        package = pathlib.Path(recipe.package_folder)
        expect((package / "licenses/LICENSE").is_file(), "conan: the package has no licence")
        packaged = {path.relative_to(package / "include") for path in package.rglob("*.[hc][pu][ph]")}
        headers = {path.relative_to(root / directory) for directory in ("include", "cuda")
                   for path in (root / directory / "lamina").rglob("*.[hc][pu][ph]")}
        expect(packaged == headers, f"conan: headers {packaged ^ headers}")

    requires = []
    recipe.requires = requires.append
    recipe.settings = types.SimpleNamespace(os="Linux")
    recipe.cpp_info = types.SimpleNamespace(set_property=lambda *_: None, defines=[])
    recipe.requirements()
    recipe.package_info()
    expect(requires == ["xxhash/[>=0.8.1 <1]"], "conan: requirements")
    expect(not recipe.cpp_info.defines, "conan: definitions")
    expect(recipe.cpp_info.system_libs == ["pthread"], "conan: threads")


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
conan()
spack()
