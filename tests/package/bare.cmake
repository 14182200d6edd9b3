# SPDX-License-Identifier: MIT
# `cmake -B build` on a machine with a compiler alone: says what is left out, builds the quickstart, and installs.
include("${CMAKE_CURRENT_LIST_DIR}/run.cmake")
set(nothing)
foreach(package IN ITEMS Catch2 CLI11 MPI OpenMP Torch benchmark dlpack Eigen3 fmt libjpeg-turbo nlohmann_json xtensor CUDAToolkit)
  list(APPEND nothing -DCMAKE_DISABLE_FIND_PACKAGE_${package}=ON)
endforeach()
configure("${SOURCE_DIR}" "${WORK_DIR}/build" ${nothing})
foreach(line IN ITEMS "examples/resnet50_ps and its tests are left out: not found: Torch, MPI_CXX, libjpeg-turbo, CLI11"
        "examples/mpi_allreduce and examples/mpi_parameter_server are left out: not found: MPI"
        "examples/torch_training is left out: not found: Torch" "most tests are left out: not found: Catch2")
  string(FIND "${output}" "lamina: ${line}" place)
  if(place EQUAL -1)
    message(FATAL_ERROR "it does not say '${line}':\n${output}")
  endif()
endforeach()
run("${CMAKE_COMMAND}" --build "${WORK_DIR}/build" --target quickstart)
run("${WORK_DIR}/build/examples/quickstart")
run("${CMAKE_COMMAND}" --install "${WORK_DIR}/build" --prefix "${WORK_DIR}/prefix")

# Our own runs of the tests leave nothing out unnoticed.
run_refused("most tests are: not found: Catch2"
  ${configure} -S "${SOURCE_DIR}" -B "${WORK_DIR}/all" -DLAMINA_REQUIRE_ALL=ON -DLAMINA_BUILD_EXAMPLES=OFF
  -DCMAKE_DISABLE_FIND_PACKAGE_Catch2=ON)
