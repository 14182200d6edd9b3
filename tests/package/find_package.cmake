# SPDX-License-Identifier: MIT
# Builds examples/find_package against the installed lamina, outside this tree.
include("${CMAKE_CURRENT_LIST_DIR}/run.cmake")
file(COPY "${SOURCE_DIR}/examples/find_package/" DESTINATION "${WORK_DIR}/consumer")
configure("${WORK_DIR}/consumer" "${WORK_DIR}/build" "-DCMAKE_PREFIX_PATH=${PREFIX}")
run("${CMAKE_COMMAND}" --build "${WORK_DIR}/build")
run("${WORK_DIR}/build/consumer")
expect_equal("what the consumer prints" "${output}" "lamina ${VERSION}: threshold 0.3\n")
