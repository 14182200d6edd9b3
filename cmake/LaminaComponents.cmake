# SPDX-License-Identifier: MIT
# The components of the package: an adapter in lamina/adapt/ and the package it needs. Used by the build and, installed
# beside the package configuration, by consumers.
set(LAMINA_COMPONENTS xtensor eigen torch)
set(lamina_xtensor_package xtensor)
set(lamina_eigen_package Eigen3)
set(lamina_torch_package Torch)

# Looks for the component's package and sets `result` to what its users link, or to nothing where it is missing.
# A function, so that variables of these packages do not reach the consumer.
function(lamina_find_component component result)
  set(package ${lamina_${component}_package})
  set(libraries_xtensor xtensor)  # neither xtensor::optimize, which is -march=native, nor xtensor::use_xsimd
  set(libraries_eigen Eigen3::Eigen)
  # A consumer may have brought the target itself. Torch's libraries are known to its package alone.
  if(component STREQUAL "torch" OR NOT TARGET ${libraries_${component}})
    find_package(${package} QUIET CONFIG)
  endif()
  set(libraries_torch ${TORCH_LIBRARIES})
  set(${result} "" PARENT_SCOPE)
  if(${package}_FOUND OR TARGET "${libraries_${component}}")
    set(${result} "${libraries_${component}}" PARENT_SCOPE)
  endif()
endfunction()
