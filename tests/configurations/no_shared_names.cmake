# SPDX-License-Identifier: MIT
# Checks that no name of lamina's is defined in both object files, FIRST and SECOND: the linker would keep one of them.
cmake_minimum_required(VERSION 3.22)
foreach(object IN ITEMS FIRST SECOND)
  execute_process(COMMAND "${NM}" --defined-only --extern-only --format=posix "${${object}}"
    OUTPUT_VARIABLE output COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^ \n]*6lamina[^ \n]*" names_${object} "${output}")
  list(LENGTH names_${object} count)
  if(count LESS 50)
    message(FATAL_ERROR "${${object}} has ${count} names of lamina's, fewer than it must have")
  endif()
endforeach()

set(own ${names_FIRST})
list(REMOVE_ITEM own ${names_SECOND})
set(shared ${names_FIRST})
list(REMOVE_ITEM shared ${own})
list(LENGTH shared count)
if(count GREATER 0)
  list(SUBLIST shared 0 10 shared)
  list(JOIN shared "\n" shared)
  message(FATAL_ERROR "${count} names of lamina's are in both object files, such as\n${shared}")
endif()
