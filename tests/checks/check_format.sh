#!/bin/sh
# Every C file is formatted as .clang-format says. Prints the files that are not. Version 14, Debian 12's, is the measure.
cd "$(dirname "$0")/../.." || exit 1
command -v clang-format >/dev/null || { echo "clang-format is not installed"; exit 77; }
mkdir -p build
git ls-files '*.c' '*.h' | xargs clang-format --dry-run -Werror 2>&1 | grep -E ': error:' | cut -d: -f1 | sort | uniq -c >build/format.txt
cat build/format.txt
[ ! -s build/format.txt ]
