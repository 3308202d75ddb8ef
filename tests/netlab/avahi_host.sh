#!/bin/sh
# avahi_host.sh HOST: a system bus and Avahi's daemon of its own, in the foreground until killed. Run inside the host
# with new mount and UTS namespaces, as root; DIR is an empty folder for the bus's socket and the configuration.
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir -p /run/dbus /run/avahi-daemon
hostname "$1"
cat > "$DIR/bus.conf" <<X
<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN" "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>system</type>
  <listen>unix:path=$DIR/bus</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/><allow own="*"/><allow send_destination="*" eavesdrop="true"/><allow receive_sender="*"/>
  </policy>
</busconfig>
X
cat > "$DIR/avahi.conf" <<X
[server]
host-name=$1
use-ipv4=yes
use-ipv6=yes
deny-interfaces=lo
enable-dbus=yes
[wide-area]
enable-wide-area=no
[publish]
publish-hinfo=no
publish-workstation=no
X
dbus-daemon --config-file="$DIR/bus.conf" --nofork --nopidfile &
bus=$!
export DBUS_SYSTEM_BUS_ADDRESS="unix:path=$DIR/bus"
tries=0
while [ ! -S "$DIR/bus" ] && [ $tries -lt 500 ]; do
    tries=$((tries + 1))
    sleep 0.02
done
avahi-daemon -f "$DIR/avahi.conf" --no-drop-root --no-chroot --no-rlimits &
daemon=$!
trap 'kill $daemon $bus 2>/dev/null; wait; exit 0' TERM INT
wait $daemon || true # killed by a test: the bus must not outlive it
kill $bus 2>/dev/null || true
