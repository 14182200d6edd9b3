# SPDX-License-Identifier: MIT
# PAGE shows PROGRAM, but for its licence.
file(READ "${PROGRAM}" program)
file(READ "${PAGE}" page)
string(REPLACE "// SPDX-License-Identifier: MIT\n" "" program "${program}")
string(FIND "${page}" "${program}" found)
if(found EQUAL -1)
  message(FATAL_ERROR "${PAGE} shows another program than ${PROGRAM}")
endif()
