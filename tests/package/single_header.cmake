# SPDX-License-Identifier: MIT
# The generated header compiles alone and writes the frames that the headers write, with SIMD and without.
include("${CMAKE_CURRENT_LIST_DIR}/run.cmake")
configure("${SOURCE_DIR}" "${WORK_DIR}/build"
  -DLAMINA_BUILD_TESTS=OFF -DLAMINA_BUILD_EXAMPLES=OFF -DLAMINA_INSTALL_SINGLE_HEADER=ON)
run("${CMAKE_COMMAND}" --install "${WORK_DIR}/build" --prefix "${WORK_DIR}/prefix")
file(COPY "${WORK_DIR}/prefix/include/lamina_single.hpp" DESTINATION "${WORK_DIR}/alone")
if(EXISTS "${PREFIX}/include/lamina_single.hpp")
  message(FATAL_ERROR "lamina_single.hpp is installed without LAMINA_INSTALL_SINGLE_HEADER")
endif()

set(compile "${CXX_COMPILER}" -std=c++20 -Wall -Wextra -Wpedantic -Werror
  "${CMAKE_CURRENT_LIST_DIR}/single_header/frames.cpp")
run(${compile} "-I${SOURCE_DIR}/include" -o "${WORK_DIR}/many")
run("${WORK_DIR}/many")
set(many "${output}")
expect_match("the frame" "${many}" "^[0-9a-f]+\n$")
foreach(optional IN ITEMS -DSINGLE_HEADER -DLAMINA_NO_SIMD)
  run(${compile} ${optional} -DSINGLE_HEADER "-I${WORK_DIR}/alone" -o "${WORK_DIR}/single")
  run("${WORK_DIR}/single")
  expect_equal("the frame" "${output}" "${many}")
endforeach()

# The example for it, as docs/cpp.md has it.
file(COPY "${SOURCE_DIR}/examples/single_header/main.cpp" DESTINATION "${WORK_DIR}/alone")
run("${CXX_COMPILER}" -std=c++20 -Wall -Wextra -Wpedantic -Werror "${WORK_DIR}/alone/main.cpp" -o "${WORK_DIR}/example")
run("${WORK_DIR}/example")
expect_match("what the example prints" "${output}"
  "step 1: [0-9]+ bytes instead of 274944; embedding dropped hidden [a-z]+ head sent\n")

# An include under a condition cannot be inlined, and the generator says so.
file(COPY "${SOURCE_DIR}/include/lamina" DESTINATION "${WORK_DIR}/conditional")
file(APPEND "${WORK_DIR}/conditional/lamina/version.hpp" "#if 0\n#include \"lamina/other.hpp\"\n#endif\n")
run_refused("lamina/version.hpp includes lamina/other.hpp under a condition"
  "${CMAKE_COMMAND}" "-DINCLUDE_DIR=${WORK_DIR}/conditional" "-DOUTPUT=${WORK_DIR}/none.hpp"
  -P "${SOURCE_DIR}/cmake/single_header.cmake")
