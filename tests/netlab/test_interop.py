"""Another implementation of mDNS, python-zeroconf, sees our service, and we see its. Where COVEY_PYTHON lacks it, it is
fetched with pip into a folder of the build."""

import json
import os
import subprocess
import sys
import threading
import unittest

import net
from net import Net, wait_for


PYTHON = os.environ.get("COVEY_PYTHON", sys.executable)
FOLDER = os.environ.get("COVEY_ZEROCONF_FOLDER", "/tmp/covey-zeroconf")
WITH_ZEROCONF = dict(os.environ, PYTHONPATH=FOLDER)


def has_zeroconf():
    done = subprocess.run([PYTHON, "-c", "import zeroconf"], env=WITH_ZEROCONF, capture_output=True)
    return done.returncode == 0


def fetch_zeroconf():
    """Before the network is left."""
    if not has_zeroconf():
        subprocess.run([PYTHON, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", FOLDER,
                        "zeroconf==0.154.0"], check=False)


class Zeroconf(unittest.TestCase):
    def setUp(self):
        if not has_zeroconf():
            if os.environ.get("CI") == "true":
                self.fail("zeroconf must be there under CI")
            self.skipTest("SKIP: zeroconf could not be fetched with pip")
        self.net = Net()
        self.addCleanup(self.net.close)

    def peer(self, host):
        lines = []
        p = host.popen(PYTHON, os.path.join(net.HERE, "zeroconf_peer.py"), "10.77.0.2", "covey-zeroconf",
                       "7300", env=WITH_ZEROCONF, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        def read():
            for line in p.stdout:
                lines.append(json.loads(line))
        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        self.addCleanup(p.stdout.close)
        self.addCleanup(p.kill)  # first: closing waits for the reader
        return p, lines

    def seen(self, lines, event, agent=None):
        for line in lines:
            if line["event"] == event and (agent is None or line.get("txt", {}).get("n") == agent):
                return line
        return None

    def test_each_sees_the_other(self):
        bridge = self.net.bridge()
        a = self.net.agent(self.net.host("a", bridge))
        process, lines = self.peer(self.net.host("z", bridge))
        new = wait_for(lambda: self.seen(lines, "new", "a"), 10, lambda: f"zeroconf sees us: {lines}")
        self.assertRegex(new["name"], r"^covey-[0-9a-f]{8}\._covey\._tcp\.local\.$")
        self.assertEqual(new["server"], new["name"].split(".")[0] + ".local.")
        self.assertEqual(new["port"], a.control_port)
        self.assertIn("10.77.0.1", new["addresses"])
        self.assertTrue(any(x.startswith("fe80::") for x in new["addresses"]), new)
        self.assertEqual((new["txt"]["v"], new["txt"]["n"]), ("1", "a"))
        self.assertRegex(new["txt"]["t"], r"^([0-9a-f]{2})+$")
        self.assertNotIn("i", new["txt"])

        wait_for(lambda: a.knows("stranger"), 10, lambda: f"we see zeroconf: {a.nodes()}")
        stranger, = [n for n in a.nodes() if n["name"] == "stranger"]
        self.assertEqual(stranger["state"], "discovered")
        self.assertEqual({p["address"] for p in stranger["paths"]}, {"10.77.0.2:7300"})

        a.ask("invite")
        changed = wait_for(lambda: next((x for x in lines if "i" in x.get("txt", {})), None), 10,
                           lambda: f"zeroconf sees the invitation's tag: {lines}")
        self.assertRegex(changed["txt"]["i"], r"^[0-9a-f]{32}$")

        process.stdin.close()  # it says goodbye
        wait_for(lambda: not a.knows("stranger"), 10, lambda: f"its goodbye is heard: {a.nodes()}")

    def test_our_goodbye_is_heard(self):
        bridge = self.net.bridge()
        a = self.net.agent(self.net.host("a", bridge))
        process, lines = self.peer(self.net.host("z", bridge))
        new = wait_for(lambda: self.seen(lines, "new", "a"), 10, lambda: f"zeroconf sees us: {lines}")
        a.terminate()
        wait_for(lambda: any(x["event"] == "gone" and x["name"] == new["name"] for x in lines), 10,
                 lambda: f"zeroconf hears our goodbye: {lines}")
        process.stdin.close()


if __name__ == "__main__":
    if not net.inside():
        fetch_zeroconf()
    net.main()
