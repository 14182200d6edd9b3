# SPDX-License-Identifier: MIT
# nvcc compiles a source once for the host and once for the device: a kernel has the same name in both, with the host
# compiler's flags in it, or the host would not find it.
include("${CMAKE_CURRENT_LIST_DIR}/flags.cmake")
set(compile "${NVCC}" -std=c++20 "-I${INCLUDE_DIR}" -Xcompiler -march=x86-64-v3 "${SOURCE_DIR}/kernel.cu")
set(expected "_Z6kernelN6lamina[0-9]+v[0-9a-z_]+_v312payload_typeE")
execute_process(COMMAND ${compile} -c -o "${OUTPUT_DIR}/kernel.o" COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${compile} -cubin -o "${OUTPUT_DIR}/kernel.cubin" COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${NM}" "${OUTPUT_DIR}/kernel.o" OUTPUT_VARIABLE names COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCH "${expected}" host "${names}")
file(STRINGS "${OUTPUT_DIR}/kernel.cubin" names)
string(REGEX MATCH "${expected}" device "${names}")
if(NOT host OR NOT host STREQUAL device)
  message(FATAL_ERROR "the kernel is '${host}' on the host and '${device}' on the device")
endif()
