# SPDX-License-Identifier: MIT
# Compiles a program with what pkg-config says about lamina, after its prefix has been moved.
include("${CMAKE_CURRENT_LIST_DIR}/run.cmake")
file(COPY "${PREFIX}/" DESTINATION "${WORK_DIR}/moved")
set(ENV{PKG_CONFIG_PATH} "${WORK_DIR}/moved/share/pkgconfig")
run("${PKG_CONFIG}" --modversion lamina)
expect_equal("the version in lamina.pc" "${output}" "${VERSION}\n")
run("${PKG_CONFIG}" --libs lamina)
string(STRIP "${output}" output)
expect_equal("what there is to link" "${output}" "")

# Its sibling asks for threads, and for lamina.
run("${PKG_CONFIG}" --modversion lamina-collectives)
expect_equal("the version in lamina-collectives.pc" "${output}" "${VERSION}\n")
run("${PKG_CONFIG}" --cflags --libs lamina-collectives)
separate_arguments(flags UNIX_COMMAND "${output}")
run("${CXX_COMPILER}" -std=c++20 "${CMAKE_CURRENT_LIST_DIR}/components/collectives.cpp" ${flags} -o "${WORK_DIR}/collectives")
run("${WORK_DIR}/collectives")
expect_equal("what the program with lamina-collectives prints" "${output}" "1280\n")

run("${PKG_CONFIG}" --cflags lamina)
string(STRIP "${output}" flags)
string(REGEX REPLACE "^-I" "" include_dir "${flags}")
get_filename_component(include_dir "${include_dir}" REALPATH)
expect_equal("the include directory" "${include_dir}" "${WORK_DIR}/moved/include")
run("${CXX_COMPILER}" -std=c++20 ${flags} "${SOURCE_DIR}/examples/find_package/main.cpp" -o "${WORK_DIR}/consumer")
run("${WORK_DIR}/consumer")
expect_equal("what the consumer prints" "${output}" "lamina ${VERSION}: threshold 0.3\n")
