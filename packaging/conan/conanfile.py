# SPDX-License-Identifier: MIT
import os
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.files import copy, load
from conan.tools.layout import basic_layout

required_conan_version = ">=2.0"


class LaminaConan(ConanFile):
    name = "lamina"
    description = "Layer-granular gradient compression for distributed deep learning"
    license = "MIT"
    homepage = "https://doi.org/10.3390/app10248846"
    topics = ("deep-learning", "distributed-training", "gradient-compression", "header-only")
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"
    no_copy_source = True

    @property
    def _checkout(self):
        return os.path.join(self.recipe_folder, "..", "..")

    def set_version(self):
        text = load(self, os.path.join(self._checkout, "include", "lamina", "version.hpp"))
        self.version = ".".join(re.findall(r"#define LAMINA_VERSION_\w+ (\d+)", text))

    def export_sources(self):
        copy(self, "LICENSE", src=self._checkout, dst=self.export_sources_folder)
        copy(self, "include/lamina/*.hpp", src=self._checkout, dst=self.export_sources_folder)
        for pattern in ("cuda/lamina/*.hpp", "cuda/lamina/*.cuh"):
            copy(self, pattern, src=self._checkout, dst=self.export_sources_folder)

    def layout(self):
        basic_layout(self)

    def requirements(self):
        self.requires("xxhash/[>=0.8.1 <1]")

    def validate(self):
        check_min_cppstd(self, 20)

    def package_id(self):
        # One package for every compiler.
        self.info.settings.clear()

    def package(self):
        copy(self, "LICENSE", src=self.source_folder, dst=os.path.join(self.package_folder, "licenses"))
        copy(self, "include/lamina/*.hpp", src=self.source_folder, dst=self.package_folder)
        for pattern in ("lamina/*.hpp", "lamina/*.cuh"):
            copy(self, pattern, src=os.path.join(self.source_folder, "cuda"),
                 dst=os.path.join(self.package_folder, "include"))

    def package_info(self):
        self.cpp_info.set_property("cmake_file_name", "lamina")
        self.cpp_info.set_property("cmake_target_name", "lamina::lamina")
        self.cpp_info.set_property("pkg_config_name", "lamina")
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
        # Of lamina/collectives and lamina/udp.
        self.cpp_info.system_libs = ["pthread"] if self.settings.os in ("Linux", "FreeBSD") else []
