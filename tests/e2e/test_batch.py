"""Many requests at once: the same answers as alone, on one node and on two, with much and with little KV cache; prefixes
that were seen before are not computed again, and usage says so."""

import json
import os
import threading
import unittest

import deep_model
from lab import Lab, TINY, wait_for

QUEUE = 64  # PIPELINE_REQUESTS_MAX
SYSTEM = "You are a careful assistant who answers in rhymes. " * 8
PROMPTS = [SYSTEM + "What is the sea?", SYSTEM + "What is the sky?", "The quick brown fox. " * 12, "0", SYSTEM,
           "hello world", SYSTEM + "What is the sea? And who sails it?", "The quick brown fox. " * 10 + "!"]
WAYS = [{"temperature": 0}, {"temperature": 0.9, "seed": 7}, {"temperature": 1.2, "top_p": 0.9, "seed": -3}]


def request(i):
    return dict(WAYS[i % len(WAYS)], messages=[{"role": "user", "content": PROMPTS[i]}], max_tokens=60 + 20 * (i % 5))


def text_of(reply):
    status, body = reply
    assert status == 200, body
    return body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"], body["usage"]


def at_once(agents, n_rounds=1):
    """All requests, at the same time, spread over the agents: [(text, finish, usage)] of each round"""
    replies = [None] * (len(PROMPTS) * n_rounds)

    def ask(k):
        replies[k] = text_of(agents[k % len(agents)].chat(**request(k % len(PROMPTS))))

    threads = [threading.Thread(target=ask, args=(k,)) for k in range(len(replies))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert None not in replies, replies
    return replies


def cluster(test, limit, n, context, options=()):
    the_lab = Lab()
    test.addClassCleanup(the_lab.close)
    agents = [the_lab.agent(f"n{i}", memory_limit=limit, context=context) for i in range(n)]
    the_lab.pair(*agents)
    agents[0].ok("pull", TINY, "--name", "tiny")
    agents[0].ok("load", "tiny", "--context", str(context), *options)
    for a in agents:
        wait_for(a.stage_names, 10, f"{a.name} knows the plan")
    return agents


class Batch(unittest.TestCase):
    """The tiny model has 768 bytes of KV a position, and takes 11,404,736 with a context of 1,024."""

    @classmethod
    def setUpClass(cls):
        cls.one, = cluster(cls, "110", 1, 2048)
        cls.alone = [text_of(cls.one.chat(**request(i)))[:2] for i in range(len(PROMPTS))]

    def check(self, replies):
        for k, reply in enumerate(replies):
            self.assertEqual(reply[:2], self.alone[k % len(PROMPTS)], f"request {k}")

    def test_answers_do_not_depend_on_companions(self):
        self.assertGreater(len({text for text, _ in self.alone}), len(PROMPTS) - 3)
        self.assertGreaterEqual(self.one.model()["kv_positions"], 4 * 2048)
        self.check(at_once([self.one]))

    def test_seen_prefixes_are_not_computed_again(self):
        fields = dict(request(0), messages=[{"role": "user", "content": "Once upon a time. " * 20 + "The end?"}])
        first = text_of(self.one.chat(**fields))
        again = text_of(self.one.chat(**fields))
        self.assertEqual(first[:2], again[:2])
        n, cached = again[2]["prompt_tokens"], again[2]["prompt_tokens_details"]["cached_tokens"]
        self.assertEqual(cached, n - 1)
        fields["messages"][0]["content"] = "Once upon a time. " * 20 + "Go on!"
        other = text_of(self.one.chat(**fields))
        self.assertGreater(other[2]["prompt_tokens_details"]["cached_tokens"], n // 2)
        self.assertLess(other[2]["prompt_tokens_details"]["cached_tokens"], n)

    def test_two_nodes_give_the_same(self):
        pair = cluster(self.__class__, "11400000B", 2, 2048)
        self.assertEqual(len(pair[0].stage_names()), 2)
        self.check(at_once(pair, 2))

    def test_little_cache_gives_the_same(self):
        """Room for the context of one: sequences wait, and go back into the queue."""
        small, = cluster(self.__class__, "11550000B", 1, 1024)
        self.assertLess(small.model()["kv_positions"], 1100)
        self.check(at_once([small], 3))
        kv = small.status()["kv_cache"]
        self.assertEqual(kv["running"], 0)
        self.assertLessEqual(kv["used_positions"], kv["positions"])
        self.assertGreater(kv["used_positions"], 0)

    def test_one_request_too_many_is_told_so(self):
        """64 wait or run; the next one is refused, and welcome again when one of them is gone."""
        the_lab = Lab()
        self.addCleanup(the_lab.close)
        deep = os.path.join(the_lab.folder, "deep.gguf")
        deep_model.write(TINY, deep, 40)
        a = the_lab.agent("n0", memory_limit="200")
        a.ok("pull", deep, "--name", "deep")
        a.ok("load", "deep", "--context", "2048")
        streams = [a.stream("Once upon a time", model="deep", ignore_eos=True, max_tokens=1900) for _ in range(QUEUE)]
        wait_for(lambda: len(a.status()["requests"]) == QUEUE, 60, lambda: f"all wait: {len(a.status()['requests'])}")
        status, body = a.chat(model="deep", max_tokens=1)
        self.assertEqual(status, 429, body)
        self.assertEqual(body["error"]["type"], "rate_limit_error")
        self.assertIn("as many requests as it can", body["error"]["message"])
        r = a.call("run", "deep", "x", "--max-tokens", "1")
        self.assertEqual(r.code, 1, r)
        self.assertIn("as many requests as it can", r.err)
        self.assertFalse(any(s.error for s in streams))
        for s in streams:  # most of them still wait for their first token
            s.drop()
        wait_for(lambda: not a.status()["requests"], 60, "those whose clients are gone have ended")
        status, body = a.chat(model="deep", max_tokens=1)
        self.assertEqual(status, 200, body)

    def test_cache_of_8_bits(self):
        """It is a choice, said in the listing, takes less memory, and is as independent of companions."""
        f16 = self.one.model()["stages"][0]["memory_bytes"]
        self.assertEqual({m["kv_type"] for m in json.loads(self.one.http("GET", "/v1/models")[2])["data"]}, {"f16"})
        small, = cluster(self.__class__, "110", 1, 2048, ["--precision", "fast-kv8"])
        self.assertLess(small.model()["stages"][0]["memory_bytes"], f16)
        self.assertEqual({m["kv_type"] for m in json.loads(small.http("GET", "/v1/models")[2])["data"]}, {"q8_0"})
        self.assertEqual(small.ask("plan", "tiny")["running"]["precision"], "fast-kv8")
        alone = [text_of(small.chat(**request(i)))[:2] for i in range(len(PROMPTS))]
        self.assertEqual([reply[:2] for reply in at_once([small])], alone)


if __name__ == "__main__":
    unittest.main()
