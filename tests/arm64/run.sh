#!/bin/sh
# Builds the kernels and their tests for arm64 with the cross compiler, runs them under qemu with and
# without the dot-product instructions, and compares the digest with this machine's.
# run.sh SOURCE_DIR WORK_DIR NATIVE_TEST -- kernel sources...
set -eu
source=$1 work=$2 native=$(realpath "$3")
shift 4
cc=aarch64-linux-gnu-gcc qemu=qemu-aarch64-static
for tool in $cc $qemu; do
    if ! command -v $tool >/dev/null; then
        echo "SKIPPED: $tool is not installed (Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static)"
        [ -z "${CI:-}" ] || exit 1
        exit 77
    fi
done
mkdir -p "$work"
cd "$work"
flags="-std=c17 -D_GNU_SOURCE -O3 -Wall -Wextra -Wconversion -Wshadow -Wno-missing-field-initializers -Werror -ffp-contract=off -fno-math-errno"
flags="$flags -I$source/tests/arm64 -I$source"
neon_products=
objects=
for file in "$@" "$source/base/rng.c" "$source/base/clock_linux.c" "$source/base/err.c"; do
    object=$(basename "$file" .c).o
    $cc $flags -c "$file" -o "$object"
    objects="$objects $object"
    case $file in */neon_products.c) neon_products=$file ;; esac
done
$cc $flags -march=armv8.2-a+dotprod -c "$neon_products" -o dotprod.o
digest=$("$native" | sed -n 's/^# digest //p')
[ -n "$digest" ]
for test in kernels kernels_variants; do
    # shellcheck disable=SC2086
    $cc $flags -static "$source/tests/unit/test_$test.c" $objects dotprod.o -lm -lpthread -o $test
    for cpu in cortex-a57 max; do
        echo "== $test on $cpu"
        $qemu -cpu $cpu ./$test | tee out.txt
        [ $test = kernels_variants ] || continue
        case $cpu in
        max) grep -q '^# variants:.* neon_dotprod/' out.txt ;;
        *) grep -q '^# variants:.* neon/' out.txt && ! grep -q neon_dotprod/ out.txt ;;
        esac
        grep -qx "# digest $digest" out.txt || {
            echo "the digest differs from this machine's: $digest"
            exit 1
        }
    done
done
echo "all equal: $digest"
