# SPDX-License-Identifier: MIT
# Sourced by run, converge, scale, overlap and incast. start SCRIPT GROUP... -- ARGUMENTS... installs the packages of those groups, builds
# `programs`, the first of which the Python script is run with: the training harness with what experiments add, unless it is set before.
# --help alone needs no build.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
build=$root/build/release
programs=(lab_network)

start() {
  local script=$1 groups=()
  shift
  while [[ $1 != -- ]]; do
    groups+=("$1")
    shift
  done
  shift
  if [[ " $* " != *" --help "* && " $* " != *" -h "* ]]; then
    "$root/tools/install_packages" benchmarks "${groups[@]}"
    mkdir -p "$build"
    if ! { cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DLAMINA_BUILD_TESTS=OFF -DLAMINA_BUILD_BENCHMARKS=ON &&
      cmake --build "$build" --parallel 2 --target "${programs[@]}"; } >"$build/build.log" 2>&1; then
      tail -n 30 "$build/build.log" >&2
      exit 1
    fi
  fi
  local python
  python=$("$root/tools/python_for_plots")
  exec "$python" "$here/$script" --program "$build/benchmarks/network/${programs[0]}" "$@"
}
