# SPDX-License-Identifier: MIT
from spack_repo.builtin.build_systems.cmake import CMakePackage

from spack.package import *


class Lamina(CMakePackage):
    """Layer-granular gradient compression for distributed deep learning: a header-only C++20 library."""

    homepage = "https://doi.org/10.3390/app10248846"

    license("MIT")

    # No address to fetch from: spack dev-build takes the checkout.
    version("0.1.0")

    variant("xtensor", default=False, description="What the component xtensor needs")
    variant("eigen", default=False, description="What the component eigen needs")
    variant("torch", default=False, description="What the component torch needs")
    variant("dlpack", default=False, description="What the component dlpack needs")

    depends_on("cxx", type="build")
    depends_on("cmake@3.22:", type="build")
    depends_on("xxhash@0.8.1:")
    depends_on("xtensor@0.24:", when="+xtensor")
    depends_on("eigen@3.4:", when="+eigen")
    depends_on("py-torch", when="+torch")
    depends_on("dlpack@0.6:", when="+dlpack")

    def cmake_args(self):
        return [
            self.define("LAMINA_BUILD_TESTS", False),
            self.define("LAMINA_BUILD_EXAMPLES", False),
        ]
