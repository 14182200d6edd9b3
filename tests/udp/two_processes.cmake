# SPDX-License-Identifier: MIT
# Runs both ranks of PROGRAM at the same time, at ports of loopback addresses that no other run has.
string(RANDOM LENGTH 3 ALPHABET 123456789 low)
string(RANDOM LENGTH 2 ALPHABET 123456789 middle)
string(RANDOM LENGTH 2 ALPHABET 123456789 high)
set(address "127.${high}.${middle}.1")
execute_process(
  COMMAND sh -c "\"$0\" 1 $1 $2 42 & other=$!; \"$0\" 0 $1 $2 42; first=$?; wait $other && exit $first"
    "${PROGRAM}" ${address}:2${low} ${address}:3${low}
  OUTPUT_VARIABLE output ERROR_VARIABLE error RESULT_VARIABLE status TIMEOUT 60)
message("${output}${error}status ${status}")
