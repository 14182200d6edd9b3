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

# One block, in each of the spellings of C++.
foreach(opening IN ITEMS "```cpp" "```c++" "```C++" "``` cpp" "~~~cc" "````cxx" "```cpp title=\"x\"" "```{.cpp}" "  ```hpp")
  string(REGEX MATCH "[`~]+" closing "${opening}")
  file(WRITE "${page}" "# Page\n\n\n${opening}\n${program}${closing}\n")
  lamina_cpp_blocks("${page}" "page.md" found)
  if(NOT found_count EQUAL 1 OR NOT found_1_text STREQUAL program OR NOT found_1_line EQUAL 4 OR NOT found_1_reason STREQUAL "")
    message(FATAL_ERROR "${opening}: found ${found_count} blocks, of line ${found_1_line}:\n${found_1_text}")
  endif()
endforeach()

# Two blocks, of which one is marked; a block of another language; C++ within a block of text.
file(WRITE "${page}" "```sh\nls\n```\n<!-- not compiled: needs CUDA -->\n```c++\nx;\n```\n````text\n```cpp\nx;\n```\n````\n```cpp\n${program}```\n")
lamina_cpp_blocks("${page}" "page.md" found)
if(NOT found_count EQUAL 2 OR NOT found_1_reason STREQUAL "needs CUDA" OR NOT found_2_reason STREQUAL "")
  message(FATAL_ERROR "found ${found_count} blocks; the reasons are '${found_1_reason}' and '${found_2_reason}'")
endif()

# Three backticks within a line of a list open no block, nor do those within a block.
file(WRITE "${page}" "- ```ls``` lists\n```text\n> ```cpp\n- ```cpp\n```\n- a list\n  ```cpp\n${program}  ```\n")
lamina_cpp_blocks("${page}" "page.md" found)
if(NOT found_count EQUAL 1 OR NOT found_1_line EQUAL 7)
  message(FATAL_ERROR "found ${found_count} blocks, of line ${found_1_line}")
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
expect_refusal("\n```ccp\n${program}```\n" 2 "blocks of 'ccp' are not known")
expect_refusal("```\n${program}```\n" 1 "looks like C++ and does not say so")
expect_refusal("text\n```cpp\n${program}" 2 "is never closed")
foreach(marker IN ITEMS "> " ">" "- " "* " "1. " "> - " "  > ")
  expect_refusal("text\n${marker}```cpp\n${marker}x;\n${marker}```\n" 2 "Open it on a line of its own")
endforeach()
expect_refusal("\n\n- ~~~cpp\n  x;\n  ~~~\n" 3 "Open it on a line of its own")
