# SPDX-License-Identifier: MIT
"""The system's xxhash.h as the package that lamina's recipe requires, so that its test needs no network."""
import os

from conan import ConanFile
from conan.tools.files import copy


class SystemXxhash(ConanFile):
    name = "xxhash"
    version = "0.8.1"

    def package(self):
        copy(self, "xxhash.h", src=os.environ["LAMINA_XXHASH_INCLUDE_DIR"], dst=os.path.join(self.package_folder, "include"))

    def package_info(self):
        self.cpp_info.libs = []
