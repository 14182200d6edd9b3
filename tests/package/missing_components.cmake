# SPDX-License-Identifier: MIT
# What find_package says to components that cannot be had; nothing is looked for that nobody asked for.
include("${CMAKE_CURRENT_LIST_DIR}/run.cmake")
set(consumer ${configure} -S "${CMAKE_CURRENT_LIST_DIR}/components" "-DCMAKE_PREFIX_PATH=${PREFIX}")

run_refused("lamina has no component tensorflow, only xtensor, eigen, torch, dlpack, cuda, collectives, udp"
  ${consumer} -B "${WORK_DIR}/unknown" -DCOMPONENTS=tensorflow)
foreach(pair IN ITEMS xtensor=xtensor eigen=Eigen3 torch=Torch dlpack=dlpack cuda=CUDAToolkit collectives=Threads udp=Threads)
  string(REPLACE "=" ";" pair "${pair}")
  list(GET pair 0 component)
  list(GET pair 1 package)
  run_refused("The component ${component} needs the package ${package}, which was not found"
    ${consumer} -B "${WORK_DIR}/missing" -DCOMPONENTS=${component} -DCMAKE_DISABLE_FIND_PACKAGE_${package}=ON)
  string(TOUPPER ${component} upper)
  run_refused("LAMINA_WITH_${upper} is ON, but ${package} was not found"
    ${consumer} -B "${WORK_DIR}/subdirectory_${component}" -DCOMPONENTS=${component} "-DLAMINA_SOURCE_DIR=${SOURCE_DIR}"
    -DCMAKE_DISABLE_FIND_PACKAGE_${package}=ON)
endforeach()
run(${consumer} -B "${WORK_DIR}/optional" -DOPTIONAL_COMPONENTS=eigen -DCMAKE_DISABLE_FIND_PACKAGE_Eigen3=ON)

# find_package leaves a cache variable for each package that it looks for.
run(${consumer} -B "${WORK_DIR}/none")
file(STRINGS "${WORK_DIR}/none/CMakeCache.txt" looked_for REGEX "^(xtensor|xtl|Eigen3|Torch|Caffe2|dlpack)_DIR")
expect_equal("what was looked for without components" "${looked_for}" "")
