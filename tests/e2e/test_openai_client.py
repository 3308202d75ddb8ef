"""The unmodified `openai` client from PyPI talks to a real agent: models, a whole answer, a stream, errors.

Needs a Python with the package (test.sh makes one, COVEY_PYTHON); without it the test is skipped, except under CI.
"""

import os
import sys
import unittest

try:
    import openai
except ImportError:
    openai = None
    python = os.environ.get("COVEY_PYTHON", "")
    if os.access(python, os.X_OK) and os.environ.get("COVEY_REEXECUTED") is None:
        os.environ["COVEY_REEXECUTED"] = "1"
        os.execv(python, [python, *sys.argv])

from lab import Lab, TINY

MESSAGES = [{"role": "user", "content": "Say something."}]


class OpenAiClient(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.lab = Lab()
        cls.addClassCleanup(cls.lab.close)
        cls.agent = cls.lab.agent("one")
        cls.agent.ok("pull", TINY, "--name", "tiny")
        cls.client = openai.OpenAI(base_url=f"http://127.0.0.1:{cls.agent.http_port}/v1", api_key="none", max_retries=0,
                                   timeout=60)

    def test_models_are_listed(self):
        self.assertIn("tiny", [m.id for m in self.client.models.list()])

    def test_stream_gives_the_same_text_as_the_whole_answer(self):
        options = dict(model="tiny", messages=MESSAGES, temperature=0, max_tokens=24)
        whole = self.client.chat.completions.create(**options)
        text, finish, usage, n_chunks = "", None, None, 0
        for chunk in self.client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                n_chunks += 1
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
        self.assertEqual(text, whole.choices[0].message.content)
        self.assertEqual(finish, whole.choices[0].finish_reason)
        self.assertEqual(usage.completion_tokens, whole.usage.completion_tokens)
        self.assertEqual(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
        self.assertGreater(usage.completion_tokens, 0)
        self.assertGreater(n_chunks, 2)

    def test_seed_repeats_an_answer(self):
        def ask(seed):
            return self.client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=1.0, seed=seed,
                                                       max_completion_tokens=24).choices[0].message.content
        self.assertEqual(ask(7), ask(7))
        self.assertGreater(len({ask(seed) for seed in range(5)}), 1)

    def test_unknown_model_is_the_clients_own_error(self):
        with self.assertRaises(openai.NotFoundError):
            self.client.chat.completions.create(model="nobody-has-this", messages=MESSAGES)

    def test_logit_bias_forces_and_bans(self):
        forced = self.client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=4,
                                                     logit_bias={"65": 100}, logprobs=True)
        tokens = [t.token for t in forced.choices[0].logprobs.content]
        self.assertEqual(len(set(tokens)), 1)
        plain = self.client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=4)
        self.assertNotEqual(plain.choices[0].message.content, forced.choices[0].message.content)
        for wrong in ({"65": 101}, {"x": 1}, {"99999999": 1}):
            with self.assertRaises(openai.BadRequestError):
                self.client.chat.completions.create(model="tiny", messages=MESSAGES, logit_bias=wrong)

    def test_field_out_of_range_is_refused(self):
        with self.assertRaises(openai.BadRequestError):
            self.client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)


if __name__ == "__main__":
    if openai is None:
        print("SKIPPED: the Python package openai is not installed (test.sh installs it)")
        sys.exit(1 if os.environ.get("CI") == "true" else 77)
    unittest.main()
