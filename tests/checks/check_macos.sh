#!/bin/sh
# The files for macOS compile for arm64 with zig, those that need no library from outside the system.
# usage: check_macos.sh PYTHON WORK_FOLDER      PYTHON has the package ziglang
cd "$(dirname "$0")/../.." || exit 1
python=$1 work=$2
"$python" -c 'import ziglang' 2>/dev/null || { echo "the Python package ziglang is not installed"; exit 77; }
mkdir -p "$work"
export ZIG_LOCAL_CACHE_DIR="$work" ZIG_GLOBAL_CACHE_DIR="$work"
failed=0 n=0 left=0
compile() # FLAGS... FILE
{
    "$python" -m ziglang cc -target aarch64-macos -std=c17 -I. -Wall -Wextra -Wconversion -Wshadow -Werror \
        -Wno-missing-field-initializers -Wno-gnu-zero-variadic-macro-arguments -Wno-enum-float-conversion \
        -D_DARWIN_C_SOURCE -D_GNU_SOURCE -o "$work/out.o" -c "$@" 2>"$work/out.txt"
}
# Once for each set of instructions, as runtime/kernels/meson.build does (zig spells -march differently),
# and each object has to define the function of its own variant.
for flags in "_neon_products" "_neon_products_dotprod -mcpu=generic+v8_2a+dotprod -DNEON_DOTPROD" \
    "_neon_products_i8mm -mcpu=generic+v8_2a+dotprod+i8mm -DNEON_DOTPROD -DNEON_I8MM"; do
    symbol=${flags%% *} flags=${flags#"${flags%% *}"}
    # shellcheck disable=SC2086
    if ! compile $flags runtime/kernels/neon_products.c || ! tr '\0' '\n' <"$work/out.o" | grep -aqx "$symbol"; then
        cat "$work/out.txt"
        echo "neon_products.c does not compile to $symbol for macOS"
        failed=1
    fi
done
for file in $(git ls-files '*_macos.c' 'base/*.c' 'planner/*.c' 'runtime/kernels/neon*.c' | grep -vE '_linux\.c$'); do
    if compile "$file"; then
        n=$((n + 1))
    elif grep -qE "fatal error: '(uv\.h|sodium|curl/|jansson|microhttpd|nanomsg/|pcre2|utf8proc|ini\.h|avahi-|protobuf-c/|.*pb-c\.h).*file not found" \
        "$work/out.txt"; then
        left=$((left + 1)) # needs a library that has to be cross-built first: left to the cross-build
    else
        cat "$work/out.txt"
        echo "$file does not compile for macOS"
        failed=1
    fi
done
echo "$n files compiled for macOS; $left need libraries that are not cross-built here"
[ $n -gt 20 ] && [ $failed = 0 ]
