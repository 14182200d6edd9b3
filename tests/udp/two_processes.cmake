# SPDX-License-Identifier: MIT
# Runs both ranks of PROGRAM at the same time, at ports of loopback addresses that no other run has; rank 1 with SECRET.
string(RANDOM LENGTH 3 ALPHABET 123456789 low)
string(RANDOM LENGTH 2 ALPHABET 123456789 middle)
string(RANDOM LENGTH 2 ALPHABET 123456789 high)
set(address "127.${high}.${middle}.1")
set(ranks 0 1)
set(secrets 42 ${SECRET})
set(places ${address}:2${low} ${address}:3${low})
execute_process(
  COMMAND sh -c "\"$0\" 1 $1 $2 $3 & other=$!; \"$0\" 0 $1 $2 42; first=$?; wait $other && exit $first"
    "${PROGRAM}" ${places} ${SECRET}
  OUTPUT_VARIABLE output ERROR_VARIABLE error RESULT_VARIABLE status TIMEOUT 60)
message("${output}${error}status ${status}")
