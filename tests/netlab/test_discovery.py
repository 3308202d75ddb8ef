"""Nodes that have never met find each other and are paired in time, on every kind of network; then both give the
answer of one node, to the byte."""

import os
import time
import unittest

import net
from net import Net, answer, join, load, needs_root, wait_found, wait_measured, wait_members


class Discovery(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.expected = net.single_answer()

    def setUp(self):
        self.net = Net()
        self.addCleanup(self.net.close)
        self.failed_before = len(self._outcome.result.failures) + len(self._outcome.result.errors)

    def tearDown(self):
        result = self._outcome.result
        if len(result.failures) + len(result.errors) > self.failed_before or any(
                e for _, e in getattr(self._outcome, "errors", []) if e):
            self.net.report(__import__("sys").stderr)

    def meet(self, *agents, join_options=()):
        """Started already: found and paired within the time."""
        begin = time.monotonic()
        if not join_options:
            wait_found(agents, net.PAIRED_WITHIN_S)
        found = time.monotonic()
        join(*agents, options=join_options)
        wait_members(agents, net.PAIRED_WITHIN_S)
        end = time.monotonic()
        print(f"found {found - begin:.2f} s after both were up, paired {end - found:.2f} s later", flush=True)
        self.assertLess(end - begin, net.PAIRED_WITHIN_S)

    def same_answers(self, *agents):
        wait_measured(agents)
        load(agents[0], agents)
        for a in agents:
            self.assertEqual(sorted(a.stage_names()), sorted(b.name for b in agents), "the model must be split")
        for a in agents:
            self.assertEqual(answer(a), self.expected)

    def pair_of_hosts(self, n_bridges=1, v4=True, daemons=(), options=()):
        bridges = [self.net.bridge() for _ in range(n_bridges)]
        hosts = [self.net.host(name, *bridges, v4=v4) for name in ("a", "b")]
        for h in hosts:
            if h.name in daemons:
                h.avahi()
        agents = [self.net.agent(h, options=options, start=False) for h in hosts]
        for a in agents:
            a.start()
        return agents

    def backend(self, agent):
        return [line.rsplit(" ", 1)[1] for line in agent.log().splitlines() if "mDNS runs through" in line][-1:]

    def test_no_daemon(self):
        a, b = self.pair_of_hosts()
        self.meet(a, b)
        self.assertEqual((self.backend(a), self.backend(b)), (["avahi-core"], ["avahi-core"]))
        self.same_answers(a, b)

    @needs_root
    def test_daemon_in_one(self):
        a, b = self.pair_of_hosts(daemons=("a",))
        self.meet(a, b)
        self.assertEqual((self.backend(a), self.backend(b)), (["avahi-daemon"], ["avahi-core"]))
        self.same_answers(a, b)

    @needs_root
    def test_daemons_in_both(self):
        a, b = self.pair_of_hosts(daemons=("a", "b"))
        self.meet(a, b)
        self.assertEqual((self.backend(a), self.backend(b)), (["avahi-daemon"], ["avahi-daemon"]))
        self.same_answers(a, b)

    def test_ipv6_only(self):
        a, b = self.pair_of_hosts(v4=False)
        self.meet(a, b)
        peer, = [n for n in a.nodes() if not n["self"]]
        self.assertTrue(peer["paths"])
        for p in peer["paths"]:
            self.assertRegex(p["address"], r"^\[fe80::[0-9a-f:]+%eth0\]:\d+$")
        self.same_answers(a, b)

    def test_two_cables(self):
        a, b = self.pair_of_hosts(n_bridges=2)
        self.meet(a, b)
        for x in (a, b):
            net.wait_for(lambda x=x: {p["interface"] for n in x.nodes() if not n["self"] for p in n["paths"]
                                      if p["up"]} >= {"eth0", "eth1"}, 20,
                         lambda x=x: f"{x.name} reaches the other by both cables: {x.nodes()}")
        self.same_answers(a, b)

    def test_multicast_blocked_and_peer(self):
        bridge = self.net.bridge()
        bridge.block_multicast()
        hosts = [self.net.host(name, bridge) for name in ("a", "b")]
        a, b = [self.net.agent(h) for h in hosts]
        self.meet(a, b, join_options=("--peer", f"10.77.0.1:{a.control_port}"))
        self.assertFalse(any("mDNS: covey-" in x.log() for x in (a, b)), "multicast is blocked")
        self.same_answers(a, b)

    def test_one_computer_with_nothing_but_loopback(self):
        host = self.net.host("h")
        a, b = [self.net.agent(host, name) for name in ("a", "b")]
        self.meet(a, b)
        self.same_answers(a, b)

    def test_one_computer_with_a_network(self):
        host = self.net.host("h", self.net.bridge())
        a, b = [self.net.agent(host, name) for name in ("a", "b")]
        self.meet(a, b)
        self.same_answers(a, b)

    def test_interfaces_come_and_go(self):
        bridge = self.net.bridge()
        a_host = self.net.host("a")  # nothing but loopback
        a, b = self.net.agent(a_host), self.net.agent(self.net.host("b", bridge))
        a_host.cables = [a_host.cable(bridge, 9)]
        wait_found((a, b), 10)

        def interfaces(x):
            return {p["interface"] for n in x.nodes() if not n["self"] for p in n["paths"]}

        second = self.net.bridge()
        a_host.cables.append(a_host.cable(second, 9))
        b.host.cables.append(b.host.cable(second, 8))
        for x in (a, b):
            net.wait_for(lambda x=x: interfaces(x) == {"eth0", "eth1"}, 15, lambda x=x: f"both cables: {x.nodes()}")
        a_host.cables[0].cut()
        a_host.exec("ip", "link", "del", "eth0")
        net.wait_for(lambda: interfaces(a) == {"eth1"}, 15, lambda: f"one cable again: {a.nodes()}")

    def test_the_child_dies_and_is_replaced(self):
        a, b = self.pair_of_hosts()
        self.meet(a, b)
        child, = [p for p in children(a.pid) if "mdns-child" in command(p)]
        os.kill(child, 9)
        net.wait_for(lambda: a.log().count("mDNS runs through") == 2, 10, "another child")
        c = self.net.agent(self.net.host("c", self.net.bridges[0]))
        net.wait_for(lambda: a.knows("c") and c.knows("a"), 10, "a newcomer is found by the new child")
        wait_members((a, b), 1)

    def test_the_child_ends_with_its_agent(self):
        a, b = self.pair_of_hosts()
        wait_found((a, b), net.PAIRED_WITHIN_S)
        child, = [p for p in children(a.pid) if "mdns-child" in command(p)]
        a.kill()
        net.wait_for(lambda: "mdns-child" not in command(child), 5, "the child of a killed agent ends")
        net.wait_for(lambda: not b.knows("a"), 5, "its goodbye was heard")


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        return [int(w) for w in f.read().split()]


def command(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return f.read().replace(b"\0", b" ").decode()
    except OSError:
        return ""


if __name__ == "__main__":
    net.main()
