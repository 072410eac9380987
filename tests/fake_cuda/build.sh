#!/bin/sh
# Builds the fake driver into a directory: DIR/libcuda.so.1; with `incomplete` behind it, one that lacks a function.
set -eu
cd "$(dirname "$0")"
mkdir -p "$1"
flags=""
[ "${2:-}" = incomplete ] && flags="-DINCOMPLETE"
# Written beside it and moved: others may be loading it.
made="$1/.libcuda.so.1.$$"
${CC:-cc} -std=gnu11 -O2 -g -fPIC -shared -fvisibility=hidden -Wall -Wextra -Werror -Wno-unused-label $flags -Wl,-soname,libcuda.so.1 -o "$made" libcuda.c -lpthread
mv "$made" "$1/libcuda.so.1"
