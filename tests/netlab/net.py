"""Hosts out of network namespaces, wired with veth cables to bridges, and agents that run in them.

Works without root: a script that calls enter() starts itself again under `unshare -Urnm` (as root under `unshare
-nm`), in a namespace without any way out, which is where the bridges are. Each host is a namespace of its own. All
waits have deadlines. Only Avahi's daemon needs root.
"""

import atexit
import http.client
import os
import shutil
import socket
import subprocess
import sys
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "e2e"))

import lab  # noqa: E402
from lab import TINY, wait_for  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))

# Budgets for the tiny model at a context of 2,048: the whole needs 12.15 MB, a half 11.2.
WHOLE, HALF = "110", "11400000B"
# What the issue promises.
PAIRED_WITHIN_S = 5


def is_root():
    """Of the machine, not of a user namespace."""
    with open("/proc/self/uid_map") as f:
        return os.getuid() == 0 and f.read().split() == ["0", "0", "4294967295"]


def needs_root(test):
    """Skips, and says so plainly; under CI, which runs as root, nothing is skipped."""
    def wrapped(self):
        if not is_root():
            if os.environ.get("CI") == "true":
                raise AssertionError("CI must run the network lab as root: Avahi's daemon needs it")
            self.skipTest("SKIP: Avahi's daemon starts only as root")
        test(self)
    return wrapped


def sh(*words, check=True):
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True)
    if check and done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, words))}: {done.stderr}")
    return done.stdout


def batch(lines, host=None):
    """Commands of ip(8), in a host or here."""
    where = ["-n", host] if host else []
    done = subprocess.run(["ip", *where, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(f"ip -batch {lines}: {done.stderr}")


def inside():
    """Whether enter() has been here already."""
    here = os.readlink("/proc/self/ns/net")
    return os.environ.get("NETLAB_OUTSIDE", here) != here


def enter():
    """Returns in a network and mount namespace of this script's own."""
    if not inside():
        flags = "-nm" if os.getuid() == 0 else "-Urnm"
        environment = dict(os.environ, NETLAB_OUTSIDE=os.readlink("/proc/self/ns/net"))
        done = subprocess.run(["unshare", flags, "--kill-child", sys.executable, *sys.argv], env=environment)
        sys.exit(done.returncode)
    sh("mount", "--make-rprivate", "/")
    sh("mount", "-t", "tmpfs", "tmpfs", "/run")  # hides the machine's own D-Bus, and holds our namespaces
    os.makedirs("/run/netns", exist_ok=True)
    sh("ip", "link", "set", "lo", "up")


class HostAgent(lab.Agent):
    """An agent inside a host. Commands go through its Unix socket, which namespaces do not divide."""

    def __init__(self, host, *rest):
        super().__init__(*rest)
        self.host = host
        self.prefix = ["ip", "netns", "exec", host.name]

    def connection(self, timeout_s=60):
        path = os.path.join(self.home, "agent.sock")

        class Connection(http.client.HTTPConnection):
            def connect(self):
                self.sock = socket.socket(socket.AF_UNIX)
                self.sock.settimeout(timeout_s)
                self.sock.connect(path)

        return Connection("localhost", timeout=timeout_s)

    def found(self):
        """Names of nodes that discovery shows and that are not members."""
        return sorted(n["name"] for n in self.nodes() if n["state"] == "discovered")

    def knows(self, name):
        return any(n["name"] == name for n in self.nodes())

    def log(self):
        with open(os.path.join(self.home, "serve.log"), errors="replace") as f:
            return f.read()


class Host:
    def __init__(self, net, name):
        self.net, self.name, self.n = net, name, 0
        self.daemon_env, self.processes = {}, []
        sh("ip", "netns", "add", name)
        batch(["link set lo up"], name)

    def exec(self, *words, check=True):
        return sh("ip", "netns", "exec", self.name, *words, check=check)

    def popen(self, *words, **options):
        p = subprocess.Popen(["ip", "netns", "exec", self.name, *words], **options)
        self.processes.append(p)
        return p

    def cable(self, bridge, number, v4=True):
        """The next interface, plugged into a bridge: eth0 first. Its address ends in `number`."""
        eth, port = f"eth{self.n}", f"{self.name}-{self.n}"
        self.n += 1
        # A namespace is taken apart in the background: the port of a host of the same name may still be there.
        words = ["ip", "link", "add", eth, "netns", self.name, "type", "veth", "peer", "name", port]
        deadline = time.monotonic() + 10
        while (done := subprocess.run(words, capture_output=True, text=True)).returncode != 0:
            if "File exists" not in done.stderr or time.monotonic() > deadline:
                raise AssertionError(f"{' '.join(words)}: {done.stderr}")
            sh("ip", "link", "del", port, check=False)
        # No duplicate detection: addresses are usable at once. The switch has no addresses.
        self.exec("sysctl", "-qw", f"net.ipv6.conf.{eth}.accept_dad=0", f"net.ipv6.conf.{eth}.router_solicitations=0")
        sh("sysctl", "-qw", f"net.ipv6.conf.{port}.disable_ipv6=1")
        batch([f"link set {port} master {bridge.name} up"])
        lines = [f"addr add 10.77.{bridge.number}.{number}/24 brd + dev {eth}"] if v4 else []
        batch([*lines, f"link set {eth} up"], self.name)
        return Cable(self, port, eth)

    def avahi(self):
        """Avahi's daemon with a system bus of its own."""
        folder = os.path.join(self.net.folder, "bus-" + self.name)
        os.makedirs(folder)
        with open(os.path.join(folder, "log"), "wb") as log:
            self.popen("unshare", "-m", "-u", "sh", os.path.join(HERE, "avahi_host.sh"), self.name,
                       env=dict(os.environ, DIR=folder), stdout=subprocess.DEVNULL, stderr=log)
        self.daemon_env = {"DBUS_SYSTEM_BUS_ADDRESS": f"unix:path={folder}/bus"}

        def log_text():
            with open(os.path.join(folder, "log"), errors="replace") as f:
                return f.read()

        def runs():
            done = subprocess.run(["ip", "netns", "exec", self.name, "dbus-send", "--system", "--print-reply",
                                   "--dest=org.freedesktop.Avahi", "/", "org.freedesktop.Avahi.Server.GetState"],
                                  env=dict(os.environ, **self.daemon_env), capture_output=True, text=True)
            return "int32 2" in done.stdout  # running
        wait_for(runs, 20, lambda: f"Avahi's daemon runs: {log_text()}")

    def close(self):
        for p in self.processes:
            if p.poll() is None:
                p.terminate()
                try:
                    p.wait(5)
                except subprocess.TimeoutExpired:
                    p.kill()
                    p.wait(5)
        sh("ip", "netns", "del", self.name, check=False)


class Cable:
    def __init__(self, host, port, interface):
        self.host, self.port, self.interface = host, port, interface

    def cut(self):
        batch([f"link set {self.port} down"])

    def replug(self):
        batch([f"link set {self.port} up"])


class Bridge:
    def __init__(self, number):
        self.number, self.name = number, f"br{number}"
        batch([f"link add {self.name} type bridge forward_delay 0"])
        sh("sysctl", "-qw", f"net.ipv6.conf.{self.name}.disable_ipv6=1")
        batch([f"link set {self.name} up"])

    def block_multicast(self):
        rules = f"""table bridge lab {{
            chain forward {{
                type filter hook forward priority 0; policy accept;
                ip daddr 224.0.0.0/4 drop
                ip6 daddr ff02::fb drop
            }}
        }}
        """
        done = subprocess.run(["nft", "-f", "-"], input=rules, capture_output=True, text=True)
        if done.returncode != 0:
            raise AssertionError(f"nft: {done.stderr}")

    def close(self):
        sh("ip", "link", "del", self.name, check=False)
        sh("nft", "delete", "table", "bridge", "lab", check=False)


class Net(lab.Lab):
    """A network; use with addCleanup(net.close)."""

    def __init__(self):
        super().__init__()
        self.hosts, self.bridges = {}, []

    def bridge(self):
        self.bridges.append(Bridge(len(self.bridges)))
        return self.bridges[-1]

    def host(self, name, *bridges, v4=True):
        h = Host(self, name)
        self.hosts[name] = h
        h.cables = [h.cable(b, len(self.hosts), v4) for b in bridges]
        return h

    def agent(self, host, name=None, memory_limit=HALF, options=(), env=None, start=True):
        all_options = ["--http", "127.0.0.1:0", "--control-port", "0", "--data-port", "0", "--threads", "1",
                       "--memory-limit", str(memory_limit), "--context", "2048", "--log-level", "debug", *options]
        name = name or host.name
        a = HostAgent(host, os.path.join(self.folder, name), name, all_options, dict(host.daemon_env, **(env or {})))
        self.agents.append(a)
        return a.start() if start else a

    def close(self):
        super().close()
        for h in self.hosts.values():
            h.close()
        for b in self.bridges:
            b.close()
        self.hosts, self.bridges, self.agents = {}, [], []


def wait_found(agents, deadline_s):
    for a in agents:
        for b in agents:
            if a is not b:
                wait_for(lambda a=a, b=b: a.knows(b.name), deadline_s,
                         lambda a=a, b=b: f"{a.name} finds {b.name}: {a.nodes()}")


def wait_members(agents, deadline_s):
    names = sorted(a.name for a in agents)
    for a in agents:
        wait_for(lambda a=a: a.members_alive() == names, deadline_s,
                 lambda a=a: f"{a.name} sees {names} alive: {a.nodes()}")


def wait_measured(agents):
    """Plans need the rates of all and both directions of each path."""
    for a in agents:
        wait_for(lambda a=a: all(n["compute"]["stream_bytes_per_s"] > 0 and
                                 (n["self"] or any(p["up"] and p["bytes_per_s"] > 0 for p in n["paths"]))
                                 for n in a.nodes() if n["member"]), 40,
                 lambda a=a: f"{a.name} has measured all: {a.nodes()}")


def join(first, *others, options=()):
    for other in others:
        other.ok("join", first.ask("invite")["token"], *options)


def load(holder, agents):
    holder.ok("pull", TINY, "--name", "tiny")
    holder.ok("load", "tiny", "--context", "2048", timeout_s=120)
    for a in agents:
        wait_for(a.stage_names, 20, lambda a=a: f"{a.name} knows the plan: {a.status()}")


PROMPT = "The quick brown fox. " * 6


def answer(agent, max_tokens=32):
    r = agent.run(PROMPT, "--temperature", "0", "--max-tokens", str(max_tokens), "--ignore-eos")
    return r["text"], r["token_ids"], r["finish"]


def single_answer(max_tokens=32):
    """What one node that needs nobody says."""
    net = Net()
    try:
        one = net.agent(net.host("one"), memory_limit=WHOLE, options=["--mdns", "no"])
        load(one, [one])
        assert one.stage_names() == ["one"], one.status()
        return answer(one, max_tokens)
    finally:
        net.close()


def main():
    enter()
    atexit.register(lambda: shutil.rmtree("/run/netns", ignore_errors=True))
    unittest.main(verbosity=2)
