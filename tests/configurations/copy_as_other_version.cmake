# SPDX-License-Identifier: MIT
# Copies the headers FROM one directory TO another as another version of lamina, which says another sentence.
file(REMOVE_RECURSE "${TO}")
file(COPY "${FROM}/" DESTINATION "${TO}")

function(change header from to)
  file(READ "${TO}/lamina/${header}" text)
  string(REPLACE "${from}" "${to}" changed "${text}")
  if(changed STREQUAL text)
    message(FATAL_ERROR "lamina/${header} has no '${from}'")
  endif()
  file(WRITE "${TO}/lamina/${header}" "${changed}")
endfunction()
change(version.hpp "LAMINA_VERSION_MINOR " "LAMINA_VERSION_MINOR 9")
change(error.hpp "bytes are missing" "bytes are missing, says the other version")
file(TOUCH "${TO}.copied")
