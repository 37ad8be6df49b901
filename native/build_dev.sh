#!/bin/sh
# Build the native kernels for development, without installing the package, and link them into the source tree.
#   [JOBS=n] native/build_dev.sh [python]        (default: .venv/bin/python, one job)
set -eu
cd "$(dirname "$0")/.."
python=$(realpath -s "${1:-.venv/bin/python}")
mkdir -p build/dev
exec 9>build/dev/lock && flock 9
cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE="$python" >build/dev/configure.log 2>&1 ||
  { cat build/dev/configure.log; exit 1; }
cmake --build build/dev --parallel "${JOBS:-1}"
ln -sfr build/dev/native/_native*.so src/ropeway/devices/cpu/
