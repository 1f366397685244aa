#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The installed package from C, in the three ways that the documentation names:
# by `python -m baracuda --cflags --libs`, by find_package with a hint, and by find_package unaided
# inside a project that scikit-build-core builds.
#
#     scripts/check_embedding.sh PYTHON
#
# PYTHON has baracuda, scikit-build-core, cmake and ninja installed.
set -euo pipefail
python=$(realpath --no-symlinks "$(command -v "$1")")
here=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
PATH=$(dirname "$python"):$PATH
cd "$work"

echo "== C compiler with python -m baracuda --cflags --libs"
options=$("$python" -m baracuda --cflags --libs)
read -ra options <<<"$options"
"${CC:-cc}" -std=c11 -Wall -Wextra -Werror "$here/tests/embed/write_slice.c" "${options[@]}" -o write_slice
./write_slice

echo "== CMake with baracuda_DIR"
directory=$("$python" -m baracuda --cmake-dir)
cmake -S "$here/tests/embed" -B cmake -G Ninja -Dbaracuda_DIR="$directory" >cmake.log ||
  { cat cmake.log; exit 1; }
grep 'embed:' cmake.log
cmake --build cmake

echo "== scikit-build-core, baracuda as a build requirement"
"$python" -m pip wheel -v --no-build-isolation --no-deps -w wheel "$here/tests/embed" >wheel.log 2>&1 ||
  { cat wheel.log; exit 1; }
grep -E 'embed: baracuda|from C:' wheel.log
