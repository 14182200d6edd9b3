# SPDX-License-Identifier: MIT
# The components of the package: an adapter in lamina/adapt/, lamina/cuda/, lamina/collectives/ or lamina/udp/, and the package it needs.
# Used by the build and, installed with the package configuration, by consumers.
set(LAMINA_COMPONENTS xtensor eigen torch dlpack cuda collectives udp)
set(lamina_xtensor_package xtensor)
set(lamina_eigen_package Eigen3)
set(lamina_torch_package Torch)
set(lamina_dlpack_package dlpack)
set(lamina_cuda_package CUDAToolkit)
set(lamina_collectives_package Threads)  # MPI and torch only where the headers for them are included
set(lamina_udp_package Threads)
if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
  set(lamina_udp_package Linux)  # it uses sendmmsg, UDP_SEGMENT and epoll
endif()

# Looks for the component's package and sets `result` to what its users link, or to nothing where it is missing.
# A function, so that variables of these packages do not reach the consumer.
function(lamina_find_component component result)
  set(package ${lamina_${component}_package})
  set(libraries_xtensor xtensor)  # neither xtensor::optimize, which is -march=native, nor xtensor::use_xsimd
  set(libraries_eigen Eigen3::Eigen)
  set(libraries_dlpack dlpack::dlpack)
  set(libraries_cuda CUDA::cudart)
  set(libraries_collectives Threads::Threads)
  set(libraries_udp Threads::Threads)
  # A consumer may have brought the target itself. Torch's libraries are known to its package alone.
  if(component STREQUAL "cuda" AND NOT TARGET CUDA::cudart)
    find_package(CUDAToolkit 12 QUIET)  # comes with CMake, as the next
  elseif(package STREQUAL "Threads" AND NOT TARGET Threads::Threads)
    find_package(Threads QUIET)
  elseif(component STREQUAL "udp" AND NOT package STREQUAL "Threads")
    set(libraries_udp)
  elseif(component STREQUAL "torch" OR NOT TARGET ${libraries_${component}})
    find_package(${package} QUIET CONFIG)
  endif()
  set(libraries_torch ${TORCH_LIBRARIES})
  set(${result} "" PARENT_SCOPE)
  if(${package}_FOUND OR TARGET "${libraries_${component}}")
    set(${result} "${libraries_${component}}" PARENT_SCOPE)
  endif()
endfunction()

# What else users of a component's target need.
function(lamina_set_up_component target component)
  if(component STREQUAL "cuda")
    # The library's constexpr functions are called from kernels.
    target_compile_options(${target} INTERFACE $<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:--expt-relaxed-constexpr>)
  endif()
endfunction()
