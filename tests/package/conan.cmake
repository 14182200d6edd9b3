# SPDX-License-Identifier: MIT
# conan create, which also builds and runs the recipe's test_package. Without the packages that it would fetch.
include("${CMAKE_CURRENT_LIST_DIR}/run.cmake")
set(ENV{CONAN_HOME} "${WORK_DIR}/home")
set(ENV{CXX} "${CXX_COMPILER}")
run("${CONAN}" profile detect)
set(ENV{LAMINA_XXHASH_INCLUDE_DIR} "${XXHASH_INCLUDE_DIR}")
run("${CONAN}" create "${CMAKE_CURRENT_LIST_DIR}/conan_xxhash" --no-remote)
run("${CONAN}" create "${SOURCE_DIR}/packaging/conan" --no-remote -s compiler.cppstd=20 -c tools.build:jobs=1
  -c "tools.cmake.cmake_layout:test_folder=${WORK_DIR}/test_package")
expect_match("what conan create prints" "${output}" "lamina ${VERSION}: a frame of 192 bytes")
file(GLOB_RECURSE headers "${SOURCE_DIR}/include/lamina/*.hpp" "${SOURCE_DIR}/cuda/lamina/*.hpp" "${SOURCE_DIR}/cuda/lamina/*.cuh")
file(GLOB_RECURSE packaged "${WORK_DIR}/home/p/b/lamin*/p/include/lamina/*.hpp" "${WORK_DIR}/home/p/b/lamin*/p/include/lamina/*.cuh")
list(LENGTH headers expected)
list(LENGTH packaged count)
expect_equal("the number of headers in the package" ${count} ${expected})
