#!/bin/sh
# Builds the test program of the kernels and runs it.
#   [JOBS=n] native/tests/run.sh plain|address|thread|valgrind|neon [arguments of the program: -tc='linear*', --help]
#
# What Debian packages it needs, and does not find, it says, and leaves the test out; with STRICT=1 that is a failure.
set -eu
cd "$(dirname "$0")/../.."
how=$1
shift

missing=""
need() { # command or file, package
  command -v "$1" >/dev/null || [ -e "$1" ] || missing="$missing $2"
}

doctest=${DOCTEST_INCLUDE:-/usr/include}
need "$doctest/doctest/doctest.h" doctest-dev
need cmake cmake
need ninja ninja-build
options="-DDOCTEST_INCLUDE=$doctest"
case $how in
  plain) ;;
  address) options="$options -DSANITIZE=address,undefined,float-cast-overflow -DROPEWAY_OPTIMIZE=-O1" ;;
  thread) options="$options -DSANITIZE=thread -DROPEWAY_OPTIMIZE=-O1 -DROPEWAY_PORTABLE_ONLY=ON" ;;
  valgrind) need valgrind valgrind ;;
  neon)
    need aarch64-linux-gnu-g++ g++-aarch64-linux-gnu
    need qemu-aarch64 qemu-user
    options="$options -DCMAKE_TOOLCHAIN_FILE=$PWD/native/tests/aarch64.cmake"
    ;;
  *)
    echo "native/tests/run.sh: \"$how\" is none of plain, address, thread, valgrind, neon" >&2
    exit 2
    ;;
esac
if [ -n "$missing" ]; then
  echo "SKIPPED: the kernels' tests ($how) need what these Debian packages hold:$missing"
  exit "${STRICT:-0}"
fi

build=build/native-tests-$how
[ "$how" = valgrind ] && build=build/native-tests-plain
mkdir -p "$build"
# shellcheck disable=SC2086  # options are words
cmake -S native/tests -B "$build" -G Ninja $options >"$build/configure.log" 2>&1 ||
  { cat "$build/configure.log"; exit 1; }
cmake --build "$build" --parallel "${JOBS:-$(nproc)}"

run() { echo "$*" && "$@"; }
case $how in
  plain | address) run "$build/native_tests" --abort-after=20 "$@" ;;
  # The order of threads is what is checked, so kernels that share no data but through the pool may be few.
  thread) TSAN_OPTIONS=halt_on_error=1 run setarch -R "$build/native_tests" "$@" ;;
  valgrind)
    ROPEWAY_TEST_HEAP=1 ROPEWAY_TEST_ISAS=portable ROPEWAY_TEST_SHARE=${ROPEWAY_TEST_SHARE:-0.1} \
      run valgrind --quiet --error-exitcode=1 --leak-check=full "$build/native_tests" "$@"
    ;;
  neon) # with the dot product of bytes and without
    export QEMU_LD_PREFIX=/usr/aarch64-linux-gnu
    export ROPEWAY_TEST_SHARE="${ROPEWAY_TEST_SHARE:-0.2}"
    for processor in cortex-a76 cortex-a72; do
      run qemu-aarch64 -cpu "$processor" "$build/native_tests" --abort-after=20 "$@"
    done
    ;;
esac
