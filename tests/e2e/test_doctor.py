"""What the doctor finds, with an agent and without one; and peers that were named and never answered."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import unittest

from lab import Lab, TINY, binary, wait_for


def findings(agent, code=0):
    r = agent.call("doctor", "--json")
    assert r.code == code, r
    return r.json["findings"]


def problems(agent, code=0):
    return [f["text"] for f in findings(agent, code) if f["level"] == "problem"]


class Doctor(unittest.TestCase):
    def setUp(self):
        self.lab = Lab()
        self.addCleanup(self.lab.close)

    def test_peer_that_never_answered(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))  # bound and not listening: nobody can answer there
            peer = f"127.0.0.1:{s.getsockname()[1]}"
            agent = self.lab.agent("n0", options=["--peer", peer])
            wait_for(lambda: any(n["state"] == "no answer" and n["name"] == peer for n in agent.nodes()), 10,
                     lambda: agent.nodes())
            self.assertNotIn("not a member", agent.ok("nodes").out)
            found = findings(agent)
            self.assertIn(f"no answer from {peer}", [f["text"] for f in found if f["level"] == "problem"])
            self.assertFalse(any("1 other node(s) found" in f["text"] for f in found), found)

    def test_wanted_model_that_nobody_holds(self):
        path = os.path.join(self.lab.folder, "gone.gguf")
        shutil.copy(TINY, path)
        agent = self.lab.agent("n0")
        agent.ok("pull", path, "--name", "tiny")
        agent.ok("load", "tiny", "--context", "256")
        self.assertFalse(any("holds it" in p for p in problems(agent)))
        os.unlink(path)
        agent.terminate()
        agent.start()
        wait_for(lambda: any("tiny is wanted" in p and "holds it" in p for p in problems(agent)), 10,
                 lambda: problems(agent))

    @unittest.skipUnless(shutil.which("nft") and subprocess.run(["unshare", "-rn", "true"], check=False).returncode == 0,
                         "needs nft and network namespaces")
    def test_multicast_that_is_blocked(self):
        """On an interface of a network namespace, without and with a firewall that drops mDNS."""
        up = ("ip link add lan type veth peer name far && ip link set far up && ip link set lan up && "
              "ip addr add 10.7.0.1/24 dev lan && ")
        drop = ("nft 'table ip t { chain c { type filter hook input priority 0; udp dport 5353 drop; }; }' && ")
        home = dict(os.environ, COVEY_HOME=os.path.join(self.lab.folder, "lonely"))
        for rules, said, level in (("", "multicast seems to pass on lan", "ok"),
                                   (drop, "multicast seems blocked on lan", "problem")):
            r = subprocess.run(["unshare", "-rn", "sh", "-c", up + rules + '"$0" doctor --json', binary()], env=home,
                               capture_output=True, timeout=60)
            self.assertEqual(r.returncode, 3, r)
            found = [(f["text"], f["level"]) for f in json.loads(r.stdout)["findings"]]
            self.assertIn((said, level), found)

    def test_without_an_agent(self):
        home = os.path.join(self.lab.folder, "alone")
        os.makedirs(os.path.join(home, "config"))

        def doctor(http, control, data):
            with open(os.path.join(home, "config", "covey.ini"), "w", encoding="utf-8") as f:
                f.write(f"http = 127.0.0.1:{http}\ncontrol-port = {control}\ndata-port = {data}\n")
            r = subprocess.run([binary(), "doctor", "--json"], env=dict(os.environ, COVEY_HOME=home),
                               capture_output=True, timeout=60)
            self.assertEqual(r.returncode, 3, r)
            return [f["text"] for f in json.loads(r.stdout)["findings"] if f["level"] == "problem"]

        self.assertEqual([t for t in doctor(0, 0, 0) if "multicast" not in t], ["no agent runs here"])
        with contextlib.ExitStack() as stack:
            ports = []
            for host in ("127.0.0.1", "", ""):
                s = stack.enter_context(socket.socket())
                s.bind((host, 0))
                s.listen()
                ports.append(s.getsockname()[1])
            u = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
            u.bind(("", 0))
            taken = doctor(*ports)
            for option, port in zip(("--http", "--control-port", "--data-port"), ports):
                self.assertTrue(any(f"TCP port {port} ({option})" in t for t in taken), (option, taken))
            port = u.getsockname()[1]
            self.assertTrue(any(f"UDP port {port} (--control-port)" in t for t in doctor(0, port, 0)))
        os.rmdir(os.path.join(home, "data"))
        with open(os.path.join(home, "data"), "w", encoding="utf-8"):
            pass
        self.assertTrue(any(os.path.join(home, "data") in t for t in doctor(0, 0, 0)))


if __name__ == "__main__":
    unittest.main()
