"""Strangers on the network who send mDNS packets: floods of names, rubbish, stolen names. The agent goes on, and
its memory stays within bounds."""

import os
import re
import subprocess
import sys
import time
import unittest

import net
from net import Net, wait_for, wait_found
from test_discovery import children, command

FLOOD = 10000


def resident_kib(pid):
    with open(f"/proc/{pid}/status") as f:
        return int(re.search(r"VmRSS:\s+(\d+)", f.read()).group(1))


class Hostile(unittest.TestCase):
    def setUp(self):
        self.net = Net()
        self.addCleanup(self.net.close)
        self.bridge = self.net.bridge()
        self.agent = self.net.agent(self.net.host("a", self.bridge), options=["--log-level", "info"])
        stranger = self.net.host("e", self.bridge)
        self.evil = stranger.popen(sys.executable, os.path.join(net.HERE, "flood.py"), "10.77.0.2",
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.addCleanup(self.evil.stdout.close)
        self.addCleanup(self.evil.stdin.close)

    def do(self, what):
        self.evil.stdin.write(what + "\n")
        self.evil.stdin.flush()
        self.assertEqual(self.evil.stdout.readline(), "done\n")

    def child(self):
        mine = [p for p in children(self.agent.pid) if "mdns-child" in command(p)]
        return mine[0] if mine else None

    def n_found(self):
        return len(self.agent.found())

    def test_ten_thousand_names(self):
        wait_for(lambda: "mDNS runs through" in self.agent.log() and "calibrated" in self.agent.log(), 20, "it is up")
        before = self.agent.resident_kib(), resident_kib(self.child()), self.agent.n_descriptors()
        self.do(f"flood {FLOOD}")
        wait_for(lambda: self.n_found() > 0, 20, "some of the flood are seen")
        self.do("rubbish 2000")
        self.do(f"flood {FLOOD}")
        self.assertLessEqual(self.n_found(), 256)
        child = wait_for(self.child, 40, "the child lives")
        print(f"agent {before[0]} -> {self.agent.resident_kib()} KiB, child {before[1]} -> {resident_kib(child)} KiB, "
              f"{self.n_found()} names known", flush=True)
        self.assertLess(resident_kib(child), 128 << 10)
        self.assertEqual(self.agent.call("status").code, 0)

        begin = time.monotonic()
        b = self.net.agent(self.net.host("b", self.bridge))
        wait_for(lambda: self.agent.knows("b"), 30, "who comes after the flood is found")
        print(f"a newcomer was found after {time.monotonic() - begin:.1f} s", flush=True)
        wait_for(lambda: self.n_found() == 1, 60, "the names of the flood are forgotten")
        net.join(self.agent, b)
        net.wait_members((self.agent, b), 10)
        # Again, with a member there: it stays one, and is asked all the while.
        self.do(f"flood {FLOOD}")
        net.wait_members((self.agent, b), 1)
        c = self.net.agent(self.net.host("c", self.bridge))
        wait_for(lambda: self.agent.knows("c"), 30, "and the one who comes after the second")
        net.wait_members((self.agent, b), 1)

        self.assertLess(self.agent.resident_kib() - before[0], 8 << 10, "the agent's memory")
        self.assertLessEqual(self.agent.n_descriptors(), before[2] + 4)

    def test_a_stolen_name_is_given_up(self):
        b = self.net.agent(self.net.host("b", self.bridge))
        wait_found((self.agent, b), 10)
        old = re.search(r"mDNS: (covey-[0-9a-f]{8}) \(a\)", b.log()).group(1)

        def moved():
            self.do(f"steal {old}")
            return "taking a new name" in self.agent.log()
        wait_for(moved, 20, "the agent takes another name")
        new = wait_for(lambda: [n for n in re.findall(r"mDNS: (covey-[0-9a-f]{8}) \(a\) seen", b.log()) if n != old],
                       20, "the other node sees the new name")
        self.assertNotEqual(new[0], old)
        net.join(self.agent, b)
        net.wait_members((self.agent, b), 10)


if __name__ == "__main__":
    net.main()
