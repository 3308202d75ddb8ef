"""Second copies (docs/protocol.md 3.14): with disk to spare, two members hold each byte of a wanted model.

The file is on one member only. Once the copy is whole, that member is killed in the middle of an answer: the answer
goes on with exactly the tokens of an undisturbed run, and so do later ones.
"""

import os
import shutil
import signal
import sys
import time
import unittest

import deep_model
from lab import Lab, TINY, wait_for

TIMES = 40  # 240 layers in 11 blocks: some milliseconds a token
# Budgets in MiB at a context of 2,048: the whole needs 81 MiB, a half 46.
WHOLE, HALF = "200", "50"
N_TOKENS = 700
RUN = {"ignore_eos": True, "max_tokens": N_TOKENS}
PROMPT = "The quick brown fox jumps over the lazy dog."
COPY_S = 60  # with the pauses before it begins
GOES_ON_S = 60
ENDS_S = 5
ROOM = ["--spare-margin", "0"]
NO_ROOM = ["--spare-margin", "1000000T"]
OFF = ["--spare-copies", "off"]


class Copies(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.files = Lab()
        cls.addClassCleanup(cls.files.close)
        cls.file = os.path.join(cls.files.folder, "deep.gguf")
        deep_model.write(TINY, cls.file, TIMES, in_order=True)
        cls.n_bytes = os.path.getsize(cls.file)
        one = cls.files.agent("one", memory_limit=WHOLE)
        one.ok("pull", cls.file, "--name", "deep")
        one.ok("load", "deep", "--context", "2048")
        cls.expected = one.stream(PROMPT, model="deep", **RUN).finish().ids
        assert len(cls.expected) == N_TOKENS
        copy = one.model("deep")["second_copy"]
        assert copy["state"] == "no other member", copy
        assert one.model("deep")["fatal_losses"] == [one.id]
        one.terminate()

    def setUp(self):
        self.lab = Lab()
        self.addCleanup(self.end)

    def end(self):
        result = self._outcome.result
        if any(test is self for test, _ in result.failures + result.errors):
            self.lab.report(sys.stderr)
        self.lab.close()

    def slow_agent(self, name, **options):
        """One that says of itself that it computes a tenth as fast: the planner prefers the others."""
        a = self.lab.agent(name, **options)
        path = os.path.join(a.home, "data", "calibration")
        wait_for(lambda: os.path.exists(path), 30, "calibrated")
        a.keep_ports()
        a.terminate()
        with open(path) as f:
            digest, threads, stream, macs = f.read().split()
        with open(path, "w") as f:
            f.write(f"{digest} {threads} {float(stream) / 10:f} {float(macs) / 10:f}\n")
        return a.start()

    def load(self, agent):
        agent.ok("pull", self.file, "--name", "deep")
        agent.ok("load", "deep", "--context", "2048")

    def here(self, agent):
        return next((m["here_bytes"] for m in agent.ask("ls")["models"] if m["name"] == "deep"), 0)

    def wait_for_copy(self, *agents):
        for a in agents:
            wait_for(lambda a=a: a.model("deep")["second_copy"]["state"] == "complete", COPY_S,
                     lambda a=a: f"the copy is whole: {a.model('deep')}")
            m = a.model("deep")
            self.assertEqual((m["fatal_losses"], m["second_copy"]["percent"]), ([], 100))
            self.assertIn("every byte is on two members", a.ok("status").out)
            self.assertIn("second copy: complete, 100 %", a.ok("ls").out)

    def check_whole(self, s):
        s.finish(GOES_ON_S)
        self.assertIsNone(s.error)
        self.assertEqual(s.ids, self.expected)

    def kill_in_the_middle(self, entry, victim):
        s = entry.stream(PROMPT, model="deep", **RUN)
        s.reach(100)
        victim.kill()
        self.assertLess(len(s.ids), N_TOKENS - 100, "the answer was over before the fault")
        return s

    def test_holder_that_runs_everything_dies(self):
        a = self.lab.agent("n0", memory_limit=WHOLE, options=ROOM)
        b = self.slow_agent("n1", memory_limit=WHOLE, options=ROOM)
        self.lab.pair(a, b)
        self.load(a)
        wait_for(lambda: b.stage_names("deep") == ["n0"], 10, "n0 runs it alone")
        for agent in (a, b):
            wait_for(lambda x=agent: x.model("deep")["fatal_losses"] == [a.id], 5, "n0 alone has the bytes")
        self.wait_for_copy(a, b)
        self.assertEqual(self.here(b), self.n_bytes)
        self.assertEqual(b.stage_names("deep"), ["n0"])
        self.check_whole(self.kill_in_the_middle(b, a))
        self.assertEqual(b.stage_names("deep"), ["n1"])
        self.check_whole(b.stream(PROMPT, model="deep", **RUN))
        self.assertEqual(b.model("deep")["fatal_losses"], [b.id])

    def test_copier_that_is_revoked_is_cut(self):
        """In the middle of the copy, while it says nothing: no connection with it outlives its membership."""
        long = os.path.join(self.lab.folder, "long.gguf")
        shutil.copy(TINY, long)
        os.truncate(long, os.path.getsize(long) + (300 << 20))  # 9 s at the pace of copies
        a = self.lab.agent("n0", memory_limit=WHOLE, options=ROOM)
        b = self.slow_agent("n1", memory_limit=WHOLE, options=ROOM)
        self.lab.pair(a, b)
        b_id = b.id
        a.ok("pull", long, "--name", "long")
        a.ok("load", "long", "--context", "256")
        wait_for(lambda: any(m["here_bytes"] > 20 << 20 for m in b.ask("ls")["models"]), 60, "it copies")
        os.kill(b.pid, signal.SIGSTOP)
        try:
            self.assertGreater(a.n_connections(a.data_port), 0)
            a.ok("revoke", b_id)
            # An idle connection with model bytes would live for 30 s.
            wait_for(lambda: a.n_connections(a.data_port, a.control_port) == 0, 10, "all connections are cut")
        finally:
            os.kill(b.pid, signal.SIGCONT)
        self.assertFalse(any(m["here_bytes"] == m["bytes"] for m in b.ask("ls")["models"]))
        self.assertEqual(len(a.stream(PROMPT, model="long", ignore_eos=True, max_tokens=20).finish().ids), 20)

    def split_over_two_and_a_third(self, second, third):
        """n0 has the file and runs half of it, n1 the other half; n2 has joined later."""
        a = self.lab.agent("n0", memory_limit=HALF, options=ROOM)
        b = self.lab.agent("n1", memory_limit=HALF, options=second)
        c = self.slow_agent("n2", memory_limit=HALF, options=third)
        self.lab.pair(a, b)
        self.load(a)
        self.assertEqual(sorted(a.stage_names("deep")), ["n0", "n1"])
        c.ok("join", a.ask("invite")["token"], "--peer", f"127.0.0.1:{a.control_port}")
        wait_for(lambda: c.members_alive() == ["n0", "n1", "n2"] and len(c.stage_names("deep")) == 2, 20, "n2 is in")
        self.wait_for_copy(a, b, c)
        self.assertEqual(self.here(a), self.n_bytes)
        self.assertEqual(sorted(a.stage_names("deep")), ["n0", "n1"])
        return a, b, c

    def check_holder_dies(self, a, b, c):
        self.check_whole(self.kill_in_the_middle(b, a))
        self.assertEqual(sorted(b.stage_names("deep")), ["n1", "n2"])
        self.check_whole(c.stream(PROMPT, model="deep", **RUN))
        self.check_whole(b.stream(PROMPT, model="deep", **RUN))

    def test_split_holder_dies_and_a_participant_has_the_rest(self):
        a, b, c = self.split_over_two_and_a_third(ROOM, OFF)
        self.assertEqual(self.here(b), self.n_bytes)
        self.assertLess(self.here(c), self.n_bytes // 2)
        self.check_holder_dies(a, b, c)

    def test_split_holder_dies_and_a_third_has_the_rest(self):
        a, b, c = self.split_over_two_and_a_third(OFF, ROOM)
        self.assertLess(self.here(b), self.n_bytes)
        self.assertLess(self.here(c), self.n_bytes)
        self.assertGreaterEqual(self.here(b) + self.here(c), self.n_bytes)
        self.check_holder_dies(a, b, c)

    def test_split_over_two_and_the_survivor_is_too_small(self):
        """It has all bytes then, and says that it lacks the memory; with more memory it runs the model alone."""
        a, b = (self.lab.agent(n, memory_limit=HALF, options=ROOM) for n in ("n0", "n1"))
        self.lab.pair(a, b)
        self.load(a)
        self.assertEqual(sorted(b.stage_names("deep")), ["n0", "n1"])
        self.wait_for_copy(a, b)
        s = self.kill_in_the_middle(b, a)
        killed = time.monotonic()
        s.finish(GOES_ON_S)
        self.assertIsNotNone(s.error)
        self.assertLess(s.closed_at - killed, ENDS_S)
        self.assertEqual(s.ids, self.expected[:len(s.ids)])
        b.terminate()
        b.options += ["--memory-limit", WHOLE]
        b.start()
        wait_for(lambda: b.stage_names("deep") == ["n1"], 40, lambda: f"n1 runs it alone: {b.status()}")
        self.check_whole(b.stream(PROMPT, model="deep", **RUN))

    def test_without_room_no_copy_and_the_loss_is_named(self):
        a = self.lab.agent("n0", memory_limit=WHOLE, options=NO_ROOM)
        b = self.slow_agent("n1", memory_limit=WHOLE, options=NO_ROOM)
        self.lab.pair(a, b)
        self.load(a)
        wait_for(lambda: b.stage_names("deep") == ["n0"], 10, "n0 runs it alone")
        for agent in (a, b):
            wait_for(lambda x=agent: x.model("deep")["second_copy"]["state"] == "no room", 10,
                     lambda x=agent: f"no room: {x.model('deep')}")
        began = b.status()["uptime_s"]
        wait_for(lambda: b.status()["uptime_s"] >= began + 8, 30, "as long as a copy would take to begin")
        self.assertLess(self.here(b), self.n_bytes // 2)
        for agent in (a, b):
            m = agent.model("deep")
            self.assertEqual((m["fatal_losses"], m["second_copy"]["state"]), ([a.id], "no room"))
            text = agent.ok("status").out
            self.assertIn(f"the loss of {a.name} ({a.id[:10]}) would end it", text)
            self.assertIn("no other member has disk to spare", text)
        # With room the same member makes the copy.
        b.terminate()
        b.options += ROOM
        b.start()
        wait_for(lambda: b.members_alive() == ["n0", "n1"], 20, "n1 is back")
        self.wait_for_copy(b)
        self.assertEqual(self.here(b), self.n_bytes)

    def test_stopped_model_is_not_copied_and_can_be_removed(self):
        a = self.lab.agent("n0", memory_limit=WHOLE, options=ROOM)
        b = self.slow_agent("n1", memory_limit=WHOLE, options=ROOM)
        self.lab.pair(a, b)
        self.load(a)
        self.wait_for_copy(b)
        self.assertEqual(b.call("rm", "deep").code, 1)
        a.ok("stop", "deep")
        for agent in (a, b):
            wait_for(lambda x=agent: x.model("deep") is None and not x.stage_names("deep"), 20, "nobody wants it")
        b.ok("rm", "deep")
        began = b.status()["uptime_s"]
        wait_for(lambda: b.status()["uptime_s"] >= began + 8, 30, "as long as a copy would take to begin")
        self.assertEqual(self.here(b), 0)
        self.assertEqual(self.here(a), self.n_bytes)


if __name__ == "__main__":
    unittest.main()
