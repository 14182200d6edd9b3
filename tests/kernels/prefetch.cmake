# SPDX-License-Identifier: MIT
# cmake -D OBJDUMP=PROGRAM -D OBJECT=FILE -P: whether the passes of an object ask for memory ahead.
execute_process(COMMAND "${OBJDUMP}" -d "${OBJECT}" OUTPUT_VARIABLE code COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "prefetch|prfm" found "${code}")
list(LENGTH found count)
# A row of 64 floats of one stream takes four; g++ 12 has 85 in all. Where it drops the calls it keeps five at most.
if(count LESS 16)
  message(FATAL_ERROR "the passes hold ${count} prefetching instructions; at least 16 belong there")
endif()
message(STATUS "${count} prefetching instructions")
