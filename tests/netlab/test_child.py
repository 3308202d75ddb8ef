"""The mDNS child by itself, started as an agent would: whatever happens to Avahi's daemon, and whenever, it ends when
its socket is closed, at once and without a complaint."""

import os
import select
import signal
import socket
import struct
import subprocess
import unittest

import net
from net import Net, needs_root, wait_for

STARTED, SIGHTING, TROUBLE = 3, 4, 7
ENDS_WITHIN_S = 20
CLIENT_LIBRARY = "libavahi-client.so.3"


def publish(instance):
    """discovery/mdns_wire.h: a service at port 26840 with TXT version 1, a name and no tags."""
    body = bytes([1, len(instance)]) + instance.encode() + struct.pack("<HH", 26840, 1) + b"\1x\0\0"
    return struct.pack("<H", len(body)) + body


class Child:
    def __init__(self, test, host, **env):
        self.socket, theirs = socket.socketpair()
        self.errors = open(os.path.join(host.net.folder, "child.log"), "w+b")
        self.process = host.popen(os.environ["COVEY_BINARY"], "mdns-child", env=dict(os.environ, **host.daemon_env, **env),
                                  stderr=self.errors, close_fds=False, preexec_fn=lambda: os.dup2(theirs.fileno(), 3))
        theirs.close()
        self.test, self.bytes, self.seen = test, b"", []
        test.addCleanup(self.errors.close)
        self.socket.sendall(publish("covey-00000001"))

    def wait(self, kind, count=1):
        """Messages of this kind, so many."""
        def there():
            while select.select([self.socket], [], [], 0.02)[0]:
                piece = self.socket.recv(65536)
                self.test.assertTrue(piece, "the child has ended")
                self.bytes += piece
                while len(self.bytes) >= 2 and len(self.bytes) >= 2 + (n := struct.unpack("<H", self.bytes[:2])[0]):
                    self.seen.append(self.bytes[2])
                    self.bytes = self.bytes[2 + n:]
            return self.seen.count(kind) >= count
        wait_for(there, 20, lambda: f"{count} messages {kind}: {self.seen}")

    def ends(self):
        self.socket.close()
        code = self.process.wait(ENDS_WITHIN_S)
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace")
        self.test.assertEqual((code, said), (0, ""))


class Ends(unittest.TestCase):
    def setUp(self):
        self.net = Net()
        self.addCleanup(self.net.close)
        self.bridge = self.net.bridge()
        self.host = self.net.host("a", self.bridge)

    def other(self):
        return self.net.agent(self.net.host("b", self.bridge))

    def test_with_something_left_to_read_on_both_sides(self):
        child = Child(self, self.host)
        wait_for(lambda: select.select([child.socket], [], [], 0)[0], 20, "something that is not read")
        child.process.send_signal(signal.SIGSTOP)
        child.socket.sendall(publish("covey-00000002"))
        child.socket.close()
        child.process.send_signal(signal.SIGCONT)
        child.ends()

    def test_beside_the_other_library(self):
        child = Child(self, self.host, LD_PRELOAD=CLIENT_LIBRARY)
        child.wait(STARTED)
        self.other()
        child.wait(SIGHTING)
        child.ends()

    @needs_root
    def test_whenever_the_daemon_dies(self):
        self.other()
        for dies in ("avahi-daemon", "dbus-daemon"):
            for when in ("at once", "started", "sighting", "trouble", "replaced"):
                with self.subTest(dies=dies, when=when):
                    self.one_death(self.net.host(f"d{len(self.net.hosts)}", self.bridge), dies, when)

    def one_death(self, host, dies, when):
        host.avahi()
        child = Child(self, host)
        if when == "started":
            child.wait(STARTED)
        elif when != "at once":
            child.wait(SIGHTING)
        os.kill(below(host.processes[0].pid, dies), signal.SIGKILL)
        if when in ("trouble", "replaced"):
            child.wait(TROUBLE)
        if when == "replaced":  # by the stack of its own
            child.wait(STARTED, 2)
            child.wait(SIGHTING, child.seen.count(SIGHTING) + 1)
        child.ends()


def below(pid, name):
    """The process of this name among a process and its descendants."""
    with open(f"/proc/{pid}/comm") as f:
        if name == f.read().strip():
            return pid
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        return next((p for p in (below(int(c), name) for c in f.read().split()) if p), None)


if __name__ == "__main__":
    net.main()
