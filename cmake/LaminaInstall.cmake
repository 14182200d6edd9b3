# SPDX-License-Identifier: MIT
# What cmake --install puts where: headers, the CMake package, lamina.pc and its siblings, none of them bound to an architecture.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_dir "${CMAKE_INSTALL_DATADIR}/cmake/lamina")
set(pkgconfig_dir "${CMAKE_INSTALL_DATADIR}/pkgconfig")

target_include_directories(lamina INTERFACE "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/lamina" "${PROJECT_SOURCE_DIR}/cuda/lamina" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(TARGETS lamina EXPORT laminaTargets)
install(EXPORT laminaTargets NAMESPACE lamina:: DESTINATION "${package_dir}")

configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/laminaConfig.cmake.in"
  "${PROJECT_BINARY_DIR}/laminaConfig.cmake" INSTALL_DESTINATION "${package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/laminaConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES
  "${PROJECT_BINARY_DIR}/laminaConfig.cmake"
  "${PROJECT_BINARY_DIR}/laminaConfigVersion.cmake"
  "${CMAKE_CURRENT_LIST_DIR}/LaminaComponents.cmake"
  "${CMAKE_CURRENT_LIST_DIR}/LaminaDependencies.cmake"
  DESTINATION "${package_dir}")

# Relative to lamina.pc, so that the prefix can be moved.
file(RELATIVE_PATH include_from_pc
  "${CMAKE_INSTALL_PREFIX}/${pkgconfig_dir}" "${CMAKE_INSTALL_FULL_INCLUDEDIR}")
foreach(name IN ITEMS lamina lamina-collectives lamina-udp)
  configure_file("${CMAKE_CURRENT_LIST_DIR}/${name}.pc.in" "${PROJECT_BINARY_DIR}/${name}.pc" @ONLY)
  install(FILES "${PROJECT_BINARY_DIR}/${name}.pc" DESTINATION "${pkgconfig_dir}")
endforeach()

if(LAMINA_INSTALL_SINGLE_HEADER)
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/include/lamina/*.hpp")
  set_property(DIRECTORY "${PROJECT_SOURCE_DIR}" APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${headers})
  execute_process(COMMAND "${CMAKE_COMMAND}"
    "-DINCLUDE_DIR=${PROJECT_SOURCE_DIR}/include" "-DOUTPUT=${PROJECT_BINARY_DIR}/lamina_single.hpp"
    -P "${CMAKE_CURRENT_LIST_DIR}/single_header.cmake" COMMAND_ERROR_IS_FATAL ANY)
  install(FILES "${PROJECT_BINARY_DIR}/lamina_single.hpp" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
endif()
