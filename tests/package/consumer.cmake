# SPDX-License-Identifier: MIT
# Takes lamina as WAY says into consumer/, a C++23 project, which looks at what else came with it.
include("${CMAKE_CURRENT_LIST_DIR}/run.cmake")
set(build "${WORK_DIR}/build")
configure("${CMAKE_CURRENT_LIST_DIR}/consumer" "${build}" "-DWAY=${WAY}"
  "-DCMAKE_PREFIX_PATH=${PREFIX}" "-DLAMINA_SOURCE_DIR=${SOURCE_DIR}"
  "-DFETCHCONTENT_SOURCE_DIR_LAMINA=${SOURCE_DIR}" -DFETCHCONTENT_FULLY_DISCONNECTED=ON)

# The compiler sees include directories and the consumer's own standard, no other option.
file(READ "${build}/compile_commands.json" commands)
string(JSON count LENGTH "${commands}")
expect_equal("the number of sources compiled" ${count} 1)
string(JSON command GET "${commands}" 0 command)
string(REGEX MATCHALL " -[^ ]+" flags "${command}")
list(FILTER flags EXCLUDE REGEX "^ -(I.*|isystem|o|c)$")
expect_match("the consumer's flags in ${command}" "${flags}" "^ -std=(gnu|c)\\+\\+2[3b]$")

if(NOT WAY STREQUAL "add_subdirectory")  # whose sources are those of FetchContent
  run("${CMAKE_COMMAND}" --build "${build}")
  run("${build}/consumer")
  expect_equal("what the consumer prints" "${output}" "lamina ${VERSION}: threshold 0.3\n")
endif()

# It has nothing to install and no tests, so what there is would be lamina's.
run("${CMAKE_COMMAND}" --install "${build}" --prefix "${WORK_DIR}/prefix")
file(GLOB_RECURSE installed "${WORK_DIR}/prefix/*")
expect_equal("what the consumer installs" "${installed}" "")
run("${CMAKE_CTEST_COMMAND}" --test-dir "${build}" --show-only)
expect_match("the list of the consumer's tests" "${output}" "Total Tests: 0|No tests were found")
