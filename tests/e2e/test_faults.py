"""Machines that die, leave, come back and join in the middle of an answer.

Whenever the survivors have the memory and the bytes, the client's stream has to go on with exactly the tokens of an
undisturbed run; else it ends with an error that says so. Nothing may hang.
"""

import os
import sys
import time
import unittest

import deep_model
from lab import Lab, TINY, wait_for

TIMES = 40  # 240 layers: some milliseconds a token
# Budgets in MiB at a context of 2,048: the whole needs 81 MiB, a half 46, a third 34.
WHOLE, HALF = "200", "50"
N_TOKENS = 700
RUN = {"ignore_eos": True, "max_tokens": N_TOKENS}
PROMPT = "The quick brown fox jumps over the lazy dog."
GOES_ON_S = 40  # for the whole rest of an answer on a busy machine
ENDS_S = 5
REBALANCE_S = 120  # changes that nothing forces are a minute apart, and wait for measurements


class Faults(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.files = Lab()
        cls.addClassCleanup(cls.files.close)
        cls.file = os.path.join(cls.files.folder, "deep.gguf")
        deep_model.write(TINY, cls.file, TIMES)
        one = cls.files.agent("one", memory_limit=WHOLE)
        one.ok("pull", cls.file, "--name", "deep")
        one.ok("load", "deep", "--context", "2048")
        cls.expected = one.stream(PROMPT, model="deep", **RUN).finish().ids
        sampled = dict(RUN, temperature=0.9, seed=11)
        cls.expected_sampled = one.stream(PROMPT, model="deep", **sampled).finish().ids
        assert len(cls.expected) == len(cls.expected_sampled) == N_TOKENS
        assert cls.expected != cls.expected_sampled
        one.terminate()

    def cluster(self, *limits, everywhere=True):
        """Paired agents n0, n1, … with the model loaded, its file on all or on the first alone."""
        self.lab = Lab()
        self.addCleanup(self.end)
        agents = [self.lab.agent(f"n{i}", memory_limit=m) for i, m in enumerate(limits)]
        self.lab.pair(*agents)
        for a in agents if everywhere else agents[:1]:
            a.ok("pull", self.file, "--name", "deep")
        agents[0].ok("load", "deep", "--context", "2048")
        for a in agents:
            wait_for(lambda a=a: a.stage_names("deep"), 10, f"{a.name} knows the plan")
        return agents

    def end(self):
        result = self._outcome.result
        if any(test is self for test, _ in result.failures + result.errors):
            self.lab.report(sys.stderr)
        self.lab.close()

    def by_name(self, name):
        return next(a for a in self.lab.agents if a.name == name)

    def stream(self, agent, **fields):
        return agent.stream(PROMPT, model="deep", **dict(RUN, **fields))

    def check_whole(self, s, expected):
        s.finish(GOES_ON_S)
        self.assertIsNone(s.error)
        self.assertEqual(s.ids, expected)
        self.assertEqual(s.end["completion_tokens"], N_TOKENS)

    def check_next_request(self, agent):
        self.check_whole(self.stream(agent), self.expected)

    def kill_in_the_middle(self, choose, **fields):
        """choose(head, tail, spare) gives (entry, victim)."""
        agents = self.cluster(HALF, HALF, HALF)
        head, tail = (self.by_name(n) for n in agents[0].stage_names("deep"))
        spare = next(a for a in agents if a not in (head, tail))
        entry, victim = choose(head, tail, spare)
        s = self.stream(entry, **fields)
        s.reach(100)
        victim.kill()
        self.assertLess(len(s.ids), N_TOKENS - 100, "the answer was over before the fault")
        self.check_whole(s, self.expected_sampled if fields else self.expected)
        self.assertNotIn(victim.name, entry.stage_names("deep"))
        self.check_next_request(entry)

    def test_head_dies_entry_is_spare(self):
        self.kill_in_the_middle(lambda head, tail, spare: (spare, head))

    def test_tail_dies_entry_is_head(self):
        self.kill_in_the_middle(lambda head, tail, spare: (head, tail))

    def test_head_dies_entry_is_tail_and_samples(self):
        self.kill_in_the_middle(lambda head, tail, spare: (tail, head), temperature=0.9, seed=11)

    def test_planner_dies(self):
        agents = self.cluster(HALF, HALF, HALF)
        planner_id = agents[0].status()["planner"]
        planner = next(a for a in agents if a.id == planner_id)
        entry = next(a for a in agents if a is not planner)
        s = self.stream(entry)
        s.reach(100)
        planner.kill()
        self.check_whole(s, self.expected)
        wait_for(lambda: entry.status()["planner"] not in (None, planner_id), 15, "a new planner")
        self.check_next_request(entry)

    def test_nobody_can_take_over(self):
        a, b = self.cluster(HALF, HALF)
        for agent in (a, b):
            agent.keep_ports()
        s = self.stream(a)
        s.reach(100)
        b.kill()
        killed = time.monotonic()
        s.finish(GOES_ON_S)
        self.assertIsNotNone(s.error, "the answer was over before the fault")
        self.assertLess(s.closed_at - killed, ENDS_S)
        self.assertEqual(s.ids, self.expected[:len(s.ids)])
        self.assertTrue(s.error["message"])
        self.assertEqual(a.status()["requests"], [])
        refused = a.call("run", "deep", "x", "--max-tokens", "3", timeout_s=60)
        self.assertIn(refused.code, (1, 4, 6), refused)
        b.start()
        wait_for(lambda: a.stage_names("deep") and b.stage_names("deep"), 30, "the plan after the return")
        self.check_next_request(a)
        self.check_next_request(b)

    def test_sigterm_leaves_politely(self):
        agents = self.cluster(HALF, HALF, HALF)
        head, tail = (self.by_name(n) for n in agents[0].stage_names("deep"))
        spare = next(a for a in agents if a not in (head, tail))
        s = self.stream(spare)
        s.reach(100)
        self.assertEqual(tail.terminate(), 0, tail.log_tail())
        self.check_whole(s, self.expected)
        for a in (head, spare):
            wait_for(lambda a=a: [n["state"] for n in a.nodes() if n["name"] == tail.name] == ["left"], 10,
                     lambda a=a: f"{tail.name} has left: {a.nodes()}")

    def test_sigterm_with_an_answer_that_nobody_takes_over(self):
        """Not the whole answer is waited for: the client hears why it ends, and the agent is gone."""
        self.lab = Lab()
        self.addCleanup(self.end)
        a = self.lab.agent("n0", memory_limit=WHOLE)
        a.ok("pull", self.file, "--name", "deep")
        a.ok("load", "deep", "--context", "2048")
        # More than can be computed in the moment that is left to it, on any machine.
        streams = [a.stream(PROMPT, model="deep", ignore_eos=True, max_tokens=1900) for _ in range(8)]
        for s in streams:
            s.reach(5)
        self.assertEqual(a.terminate(), 0, a.log_tail())
        for s in streams:
            s.finish(5)
            self.assertIsNotNone(s.error)
            self.assertIn("stopping", s.error["message"])
            self.assertLess(len(s.ids), 1900)

    def test_restart_comes_back_without_join(self):
        a, b = self.cluster(HALF, HALF)
        for agent in (a, b):
            agent.keep_ports()
        self.assertEqual(b.terminate(), 0)
        b.start()
        wait_for(lambda: a.members_alive() == b.members_alive() == ["n0", "n1"], 20, "both see both again")
        wait_for(lambda: len(b.stage_names("deep")) == 2, 30, "the plan after the return")
        self.check_next_request(b)
        a.kill()
        a.start()
        wait_for(lambda: len(a.stage_names("deep")) == 2, 40, "the plan after the other's return")
        self.check_next_request(a)

    def test_third_joins_and_is_used_when_it_helps(self):
        """Six layers over two machines cost mostly the way between them: one that holds all is far better."""
        self.lab = Lab()
        self.addCleanup(self.end)
        a, b = (self.lab.agent(n, memory_limit="11400000B") for n in ("n0", "n1"))
        self.lab.pair(a, b)
        a.ok("pull", TINY, "--name", "tiny")
        a.ok("load", "tiny", "--context", "2048")
        self.assertEqual(sorted(a.stage_names()), ["n0", "n1"])
        expected = a.run(PROMPT, "--temperature", "0", "--max-tokens", "50")["token_ids"]
        c = self.lab.agent("n2", memory_limit=WHOLE)
        c.ok("join", a.ask("invite")["token"], "--peer", f"127.0.0.1:{a.control_port}")
        for agent in (a, b, c):
            wait_for(lambda x=agent: x.stage_names() == ["n2"], REBALANCE_S, lambda: f"n2 is used: {a.stage_names()}")
            self.assertEqual(agent.run(PROMPT, "--temperature", "0", "--max-tokens", "50")["token_ids"], expected)

    def test_not_enough_until_another_joins(self):
        self.lab = Lab()
        self.addCleanup(self.end)
        a = self.lab.agent("n0", memory_limit=HALF)
        a.ok("pull", self.file, "--name", "deep")
        self.assertEqual(a.call("load", "deep", "--context", "2048").code, 4)
        b = self.lab.agent("n1", memory_limit=HALF)
        self.lab.pair(a, b)
        wait_for(lambda: len(a.stage_names("deep")) == 2, 20, "the plan of two")
        self.check_next_request(b)

    def test_client_that_goes_away_frees_its_request(self):
        a, b = self.cluster(HALF, HALF)
        for entry in (a, b):
            s = self.stream(entry, max_tokens=1900)
            s.reach(20)
            self.assertEqual(len(entry.status()["requests"]), 1)
            s.drop()
            wait_for(lambda e=entry: e.status()["requests"] == [], 5, "the request is gone")
        self.check_next_request(a)

    def test_two_at_once(self):
        a, b = self.cluster(HALF, HALF)
        streams = [(self.stream(a), self.expected), (self.stream(b, temperature=0.9, seed=11), self.expected_sampled)]
        for s, expected in streams:
            self.check_whole(s, expected)

    def test_prompts_up_to_the_context(self):
        a, b = self.cluster(HALF, HALF)
        status, body = a.chat(model="deep", messages=[{"role": "user", "content": "7" * 4000}], max_tokens=1)
        self.assertEqual((status, body["error"]["type"]), (400, "invalid_request_error"), body)
        long = "7" * 1900
        s = a.stream(long, model="deep", ignore_eos=True)
        s.finish(60)
        self.assertIsNone(s.error)
        self.assertEqual(s.end["finish"], "length")
        self.assertEqual(s.end["prompt_tokens"] + s.end["completion_tokens"], 2048)
        self.assertGreater(s.end["prompt_tokens"], 1800)


if __name__ == "__main__":
    unittest.main()
