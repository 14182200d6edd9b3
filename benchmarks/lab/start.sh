# SPDX-License-Identifier: MIT
# Sourced by run, overlap, incast and converge. start SCRIPT GROUPS PROGRAM ARGUMENTS... installs the packages of those groups, builds the program
# and calls the Python script with it. --help needs no build.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
build=$root/build/release

is_help() { [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; }

needs_root() {
  if ((EUID != 0)) && ! is_help "$@"; then
    echo "An emulated cluster needs root, for network namespaces: sudo $0${*:+ ${*@Q}}" >&2
    exit 2
  fi
}

start() {
  local script=$1 groups=$2 program=$3
  shift 3
  if ! is_help "$@"; then
    # shellcheck disable=SC2086
    "$root/tools/install_packages" $groups
    mkdir -p "$build"
    if ! { cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DLAMINA_BUILD_TESTS=OFF -DLAMINA_BUILD_BENCHMARKS=ON &&
      cmake --build "$build" --parallel 2 --target "$program"; } >"$build/build.log" 2>&1; then
      tail -n 30 "$build/build.log" >&2
      exit 1
    fi
  fi
  exec python3 "$here/$script" --program "$build/benchmarks/lab/$program" "$@"
}
