"""Real agents on one machine: pairing, names in the JSON, exit codes, and the same answer on any split."""

import os
import socket
import unittest

import lab
from lab import Lab, TINY, wait_for

# Budgets for tests/reference/tiny_split.gguf at a context of 2,048: the whole needs 12.15 MB, a half 11.2, a third 10.9.
WHOLE, HALF, THIRD = "110", "11400000B", "11100000B"

PROMPTS = ["hello world", "The quick brown fox. " * 12, "0"]
WAYS = [["--temperature", "0", "--raw"], ["--temperature", "0"],
        ["--temperature", "0.8", "--seed", "7", "--raw"], ["--temperature", "1.2", "--top-p", "0.9", "--seed", "-3"]]


def answers(agent):
    """Every prompt in every way: [(text, ids, finish)]"""
    got = []
    for prompt in PROMPTS:
        for way in WAYS:
            r = agent.run(prompt, *way, "--max-tokens", "24")
            assert len(r["token_ids"]) == r["completion_tokens"] > 0, r
            got.append((r["text"], r["token_ids"], r["finish"]))
    return got


def cluster(test, limit, n):
    """n paired agents with the tiny model loaded; the first holds the file."""
    the_lab = Lab()
    test.addClassCleanup(the_lab.close)
    agents = [the_lab.agent(f"n{i}", memory_limit=limit) for i in range(n)]
    the_lab.pair(*agents)
    agents[0].ok("pull", TINY, "--name", "tiny")
    agents[0].ok("load", "tiny", "--context", "2048")
    for a in agents:
        wait_for(a.stage_names, 10, f"{a.name} knows the plan")
    return agents


class Single(unittest.TestCase):
    """What one node answers: what all others have to equal."""

    @classmethod
    def setUpClass(cls):
        cls.one, = cluster(cls, WHOLE, 1)

    def test_logits_do_not_depend_on_threads_chunks_and_splits(self):
        ids = os.path.join(self.one.home, "ids")
        with open(ids, "w") as f:
            f.write(" ".join(str(7 * i % 300) for i in range(64)))
        digests = set()
        for options in ([], ["--threads", "2"], ["--chunk", "1"], ["--chunk", "7", "--threads", "2"], ["--chunk", "32"],
                        ["--chunk", "512"], ["--split", "1"], ["--split", "5"], ["--split", "2,4", "--chunk", "7"]):
            digests.add(self.one.ok("debug", "logits", TINY, ids, *options).out)
        self.assertEqual(len(digests), 1)
        self.assertNotEqual(digests, {self.one.ok("debug", "logits", TINY, ids, "--precision", "f32").out})

    def test_seed_decides_the_answer(self):
        def run(*options):
            return self.one.run("hello", "--temperature", "1", "--max-tokens", "24", *options)["token_ids"]

        self.assertEqual(run("--seed", "1"), run("--seed", "1"))
        self.assertNotEqual(run("--seed", "1"), run("--seed", "2"))


class Unmet(unittest.TestCase):
    """A model that another member holds, and that never ran."""

    def test_plan_before_anyone_ran_it(self):
        the_lab = Lab()
        self.addCleanup(the_lab.close)
        a, b = agents = [the_lab.agent(f"n{i}", memory_limit=HALF) for i in range(2)]
        the_lab.pair(*agents)
        a.ok("pull", TINY, "--name", "tiny")
        wait_for(lambda: any(m["name"] == "tiny" for m in b.ask("ls")["models"]), 10, "n1 hears of the model")
        plan = b.ask("plan", "tiny", "--explain")
        self.assertEqual({n for s in plan["best"]["stages"] for n in s["names"]}, {"n0", "n1"})
        self.assertIsNone(plan["running"])
        self.assertIsNone(b.model())
        shown = b.ok("plan", "tiny", "--explain").out
        self.assertRegex(shown, r"(?m)^  chosen +n[01] 0 to \d+, n[01] \d+ to %d$" % (lab.TINY_LAYERS - 1))


class Pairing(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.a, cls.b = cls.agents = cluster(cls, HALF, 2)

    def test_names_of_the_json(self):
        for agent in self.agents:
            s = agent.status()
            for key in ("id", "version", "http", "planner", "term", "models", "requests"):
                self.assertIn(key, s)
            m, = s["models"]
            for key in ("name", "epoch", "state", "stages"):
                self.assertIn(key, m)
            self.assertEqual(m["state"], "active")
            layers = []
            for stage in m["stages"]:
                self.assertTrue(set(stage) >= {"nodes", "first_layer", "last_layer"})
                layers += range(stage["first_layer"], stage["last_layer"] + 1)
            self.assertEqual(layers, list(range(lab.TINY_LAYERS)))
            self.assertEqual({n for st in m["stages"] for n in st["nodes"]}, {self.a.id, self.b.id})
            self.assertIn(s["planner"], {self.a.id, self.b.id})
            self.assertEqual(len(agent.nodes()), 2)
            for n in agent.nodes():
                self.assertTrue(set(n) >= {"id", "name", "self", "state", "memory", "compute", "paths"})
                self.assertEqual(n["state"], "alive")
                if not n["self"]:
                    for p in n["paths"]:
                        self.assertTrue(set(p) >= {"interface", "address", "rtt_us", "bytes_per_s"})
                    self.assertTrue(any(p["rtt_us"] > 0 and p["bytes_per_s"] > 0 for p in n["paths"]))
        self.assertEqual(self.a.status()["planner"], self.b.status()["planner"])
        self.assertEqual(self.a.model()["epoch"], self.b.model()["epoch"])
        invite = self.a.ask("invite")
        self.assertTrue(set(invite) >= {"token", "expires_at"})
        self.assertEqual(len(invite["token"]), 28)
        plan = self.b.ask("plan", "tiny", "--explain")
        self.assertEqual(plan["running"]["stages"], m["stages"])
        self.assertEqual(len(plan["best"]["stages"]), 2)
        self.assertTrue(any(c["verdict"] == "no memory" for c in plan["candidates"]))
        self.assertEqual(self.b.call("plan", "tiny", "--explain").code, 0)

    def test_ping_ls_doctor_version(self):
        self.assertGreater(self.a.ask("ping", "n1")["rtt_us"], 0)
        for agent in self.agents:
            m, = agent.ask("ls")["models"]
            self.assertEqual((m["name"], m["running"]), ("tiny", True))
            self.assertIn("findings", agent.ask("doctor"))
        self.assertRegex(self.a.ok("version").out, r"^covey \d+\.\d+\.\d+\n$")

    def test_exit_codes(self):
        lost = Lab()
        self.addCleanup(lost.close)
        nobody = lost.agent("nobody", start=False)
        self.assertEqual(self.a.call("status").code, 0)
        self.assertEqual(self.a.call("run", "no-such-model", "x").code, 1)
        for wrong in ([], ["frobnicate"], ["status", "extra"], ["run", "tiny"], ["run", "tiny", "x", "--temperature"],
                      ["run", "tiny", "x", "--max-tokens", "-1"], ["status", "--no-such-option"],
                      ["serve", "--http", "a:b"], ["serve", "--threads", "many"], ["debug", "other", "a", "b"]):
            self.assertEqual(self.a.call(*wrong).code, 2, wrong)
        for verb in (["status"], ["nodes"], ["run", "tiny", "x"], ["pull", "x"], ["invite"], ["doctor"]):
            self.assertEqual(nobody.call(*verb).code, 3, verb)
        small = lost.agent("small", memory_limit="9")
        small.ok("pull", TINY, "--name", "tiny")
        self.assertEqual(small.call("load", "tiny").code, 4)
        self.assertEqual(small.call("run", "tiny", "x").code, 4)
        # nobody listens there, and nobody ever will: a socket of ours holds the port
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            refused = small.call("join", self.a.ask("invite")["token"], "--peer",
                                 f"127.0.0.1:{held.getsockname()[1]}", timeout_s=90)
        self.assertEqual(refused.code, 6, refused)
        self.assertEqual(small.call("join", "not a token", "--peer", "127.0.0.1:1").code, 5)

    def test_every_entry_gives_the_answer_of_one_node(self):
        one, = cluster(type(self), WHOLE, 1)
        self.assertEqual(one.stage_names(), ["n0"])
        expected = answers(one)
        self.assertEqual(sorted(self.a.stage_names()), ["n0", "n1"])
        self.assertEqual(answers(self.a), expected)
        self.assertEqual(answers(self.b), expected)
        third = cluster(type(self), THIRD, 3)
        for agent in third:
            self.assertEqual(sorted(agent.stage_names()), ["n0", "n1", "n2"])
            self.assertEqual(answers(agent), expected)
        chats = [a.chat(temperature=0, max_tokens=24)[1]["choices"] for a in (one, self.a, self.b, *third)]
        for c in chats:
            self.assertEqual(c, chats[0])

    def test_listens_on_no_port_but_its_own(self):
        for agent in self.agents:
            inodes = set()
            for fd in os.listdir(f"/proc/{agent.pid}/fd"):
                try:
                    to = os.readlink(f"/proc/{agent.pid}/fd/{fd}")
                except OSError:
                    continue
                if to.startswith("socket:["):
                    inodes.add(to[8:-1])
            tcp, udp = set(), set()
            for name, into in (("tcp", tcp), ("tcp6", tcp), ("udp", udp), ("udp6", udp)):
                with open(f"/proc/{agent.pid}/net/{name}") as f:
                    for line in f.readlines()[1:]:
                        w = line.split()
                        if w[9] in inodes and (w[3] == "0A" or into is udp):
                            into.add(int(w[1].rsplit(":", 1)[1], 16))
            self.assertEqual(tcp, {agent.http_port, agent.control_port, agent.data_port})
            self.assertEqual(udp, {agent.control_port})


@unittest.skipUnless(lab.smollm2(), "COVEY_MODELS does not name a folder with smollm2-135m.gguf")
class SmolLM2(unittest.TestCase):
    """A real model, too large for either of two nodes, against the same on one."""

    def test_two_nodes_answer_as_one(self):
        the_lab = Lab()
        self.addCleanup(the_lab.close)
        one = the_lab.agent("one", memory_limit="1000")
        a, b = (the_lab.agent(n, memory_limit="110") for n in ("n0", "n1"))
        the_lab.pair(a, b)
        for agent in (one, a):
            agent.ok("pull", lab.smollm2(), "--name", "smollm2")
            agent.ok("load", "smollm2", "--context", "2048", timeout_s=120)
        self.assertEqual(sorted(a.stage_names("smollm2")), ["n0", "n1"])
        for way in (["--temperature", "0"], ["--temperature", "0.7", "--top-p", "0.9", "--seed", "5"]):
            prompt = "Name three animals that live in the sea."
            got = [x.run(prompt, *way, "--max-tokens", "24", model="smollm2", timeout_s=120) for x in (one, a, b)]
            for r in got:
                self.assertEqual((r["text"], r["token_ids"]), (got[0]["text"], got[0]["token_ids"]))
            self.assertEqual(len(got[0]["token_ids"]), got[0]["completion_tokens"])


if __name__ == "__main__":
    unittest.main()
