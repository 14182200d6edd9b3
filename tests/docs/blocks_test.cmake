# SPDX-License-Identifier: MIT
# What blocks.cmake finds in pages, and which it refuses by name: cmake -DOUTPUT_DIR=DIR -P blocks_test.cmake.
cmake_minimum_required(VERSION 3.22)
include("${CMAKE_CURRENT_LIST_DIR}/blocks.cmake")

if(PAGE)  # this script calls itself for a page that is to be refused
  lamina_cpp_blocks("${PAGE}" "page.md" block)
  return()
endif()

set(page "${OUTPUT_DIR}/page.md")
set(program "#include <array>\nint main() { std::array<int, 2> a{}; return a[0]; /* \\n ; [ */ }\n")

# A block of another language, one that is marked, and one that is compiled.
file(WRITE "${page}" "# Page\n```sh\nls\n```\n<!-- not compiled: needs CUDA -->\n```c++\nx;\n```\n\n```cpp\n${program}```\n")
lamina_cpp_blocks("${page}" "page.md" found)
if(NOT found_count EQUAL 2 OR NOT found_1_reason STREQUAL "needs CUDA" OR NOT found_2_reason STREQUAL ""
   OR NOT found_2_text STREQUAL program)
  message(FATAL_ERROR "found ${found_count} blocks, '${found_1_reason}', '${found_2_reason}':\n${found_2_text}")
endif()

# expect_refusal(TEXT LINE WORDS): the configure step ends, and its message has the page, the line and the words.
function(expect_refusal text line words)
  file(WRITE "${page}" "${text}")
  execute_process(COMMAND "${CMAKE_COMMAND}" "-DPAGE=${page}" -P "${CMAKE_CURRENT_LIST_FILE}"
    RESULT_VARIABLE status ERROR_VARIABLE error)
  string(REGEX REPLACE "[ \n]+" " " error "${error}")
  string(FIND "${error}" "page.md:${line}: " place)
  string(FIND "${error}" "${words}" said)
  if(status EQUAL 0 OR place EQUAL -1 OR said EQUAL -1)
    message(FATAL_ERROR "expected '${words}' of line ${line}, but the status is ${status}:\n${error}")
  endif()
endfunction()

expect_refusal("```cpp\nx;\n```\n" 1 "is no whole program")
expect_refusal("<!-- not compiled: -->\n```cpp\nx;\n```\n" 2 "is no whole program")
expect_refusal("<!-- not compiled: needs CUDA -->\n\n```cpp\nx;\n```\n" 3 "is no whole program")
expect_refusal("text\n```cpp\n${program}" 2 "is never closed")
expect_refusal("text\n```\n${program}```\n" 2 "looks like C++ and does not say so")
foreach(opening IN ITEMS "```ccp" "  ```cpp" "~~~cpp" "> ```cpp" "- ```cpp" "```cpp title=\"x\"")
  expect_refusal("text\n${opening}\n${program}```\n" 2 "a block opens at the beginning of a line")
endforeach()
