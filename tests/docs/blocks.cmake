# SPDX-License-Identifier: MIT
# Finds the C++ blocks of a page.

set(LAMINA_LANGUAGES "bash|c\\+\\+|cmake|console|cpp|diff|ini|json|make|python|sh|text|toml|yaml")

# lamina_cpp_blocks(PAGE NAME PREFIX): reads PAGE, which messages call NAME. Sets PREFIX_count; for each block I from 1 on
# PREFIX_I_text and PREFIX_I_reason: why it is not compiled, empty where it is. A block that is no whole program
# and has no marker <!-- not compiled: REASON --> in the line before ends the configure step. So does whatever could hide one: a fence that
# is not ``` at the beginning of its line, opens a block of a language that is not listed, or of none around what looks like C++.
function(lamina_cpp_blocks page name prefix)
  file(READ "${page}" text)
  # What CMake's lists would take for their own.
  string(REPLACE "\\" "<backslash>" text "${text}")
  string(REPLACE ";" "<semicolon>" text "${text}")
  string(REPLACE "[" "<opening>" text "${text}")
  string(REPLACE "]" "<closing>" text "${text}")
  string(REPLACE "\n" ";" lines "${text}")

  set(count 0)
  set(number 0)
  set(is_open OFF)
  set(before "")
  foreach(line IN LISTS lines)
    math(EXPR number "${number} + 1")
    if(NOT line MATCHES "```|~~~")
      string(APPEND block "${line}\n")
    elseif(is_open AND line STREQUAL "```")
      if(language MATCHES "^(cpp|c\\+\\+)$")
        math(EXPR count "${count} + 1")
        string(REPLACE "<closing>" "]" block "${block}")
        string(REPLACE "<opening>" "[" block "${block}")
        string(REPLACE "<semicolon>" ";" block "${block}")
        string(REPLACE "<backslash>" "\\" block "${block}")
        if(reason STREQUAL "" AND NOT block MATCHES "[\n ]main\\(")
          message(FATAL_ERROR "${name}:${opened}: this C++ block is no whole program. Make it one, or say in the line before why "
            "it is not compiled: <!-- not compiled: REASON -->")
        endif()
        set(${prefix}_${count}_text "${block}" PARENT_SCOPE)
        set(${prefix}_${count}_reason "${reason}" PARENT_SCOPE)
      elseif(language STREQUAL "" AND block MATCHES "#include|[\n ]main\\(")
        message(FATAL_ERROR "${name}:${opened}: this block looks like C++ and does not say so: ```cpp")
      endif()
      set(is_open OFF)
    elseif(NOT is_open AND line MATCHES "^```(${LAMINA_LANGUAGES})?$")
      set(language "${CMAKE_MATCH_1}")
      set(is_open ON)
      set(opened "${number}")
      set(block "")
      set(reason "")
      if(before MATCHES "^<!-- not compiled: (.*[^ ]) *-->$")
        set(reason "${CMAKE_MATCH_1}")
      endif()
    else()
      message(FATAL_ERROR "${name}:${number}: a block opens at the beginning of a line with ``` and a language that tests/docs/blocks.cmake "
        "lists, and ends with ```")
    endif()
    set(before "${line}")
  endforeach()
  if(is_open)
    message(FATAL_ERROR "${name}:${opened}: this block is never closed")
  endif()
  set(${prefix}_count ${count} PARENT_SCOPE)
endfunction()
