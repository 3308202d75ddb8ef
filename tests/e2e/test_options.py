"""Options of every verb: the manual, --help and what is accepted agree; and --keep-alive does what it says."""

import os
import re
import subprocess
import tempfile
import time
import unittest

from lab import Lab, SOURCE, TINY, binary, wait_for

ARGUMENTS = {"join": ["X"], "pull": ["X"], "plan": ["X"], "run": ["X", "Y"], "load": ["X"], "stop": ["X"], "rm": ["X"],
             "ping": ["X"], "revoke": ["X"], "bench": ["X"], "debug": ["logits", "X", "Y"]}
VALUES = {"precision": "f32", "keep-alive": "10m", "split": "1"}
USAGE, NO_AGENT = 2, 3


def manual():
    """{verb: {option: has a value}} from the SYNOPSIS of covey(1)."""
    with open(os.path.join(SOURCE, "docs", "covey.1"), encoding="utf-8") as f:
        synopsis = f.read().split(".Sh SYNOPSIS")[1].split(".Sh DESCRIPTION")[0]
    verbs = {}
    for part in synopsis.split(".Nm\n"):
        words = re.search(r"^\.Cm (.+)$", part, re.M)
        options = {m[1]: bool(m[2]) for m in re.finditer(r"^\.Op Fl -(\S+)( (?:Ar|Cm) .+)?$", part, re.M)}
        for verb in words[1].split(" Ar ")[0].split(" | ") if words else []:
            verbs[verb.split()[0]] = options
    return verbs


class Options(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.verbs = manual()
        cls.all = {o: value for options in cls.verbs.values() for o, value in options.items()}

    def call(self, *words):
        env = dict(os.environ, COVEY_HOME=self.folder.name)
        return subprocess.run([binary(), *words], env=env, capture_output=True, timeout=30, text=True)

    def test_the_manual_has_all_verbs(self):
        r = self.call("--help")
        listed = re.findall(r"^  (\w+) ", r.stdout.split("usage:")[1].split("options (")[0], re.M)
        self.assertEqual(sorted(listed), sorted(self.verbs))
        self.assertGreater(len(listed), 15)

    def test_help_of_each_verb_tells_the_options_of_the_manual(self):
        for verb, options in self.verbs.items():
            r = self.call(verb, "--help")
            self.assertEqual(r.returncode, 0)
            told = dict(re.findall(r"^  --(\S+)(?: (\S+))?", r.stdout, re.M))
            del told["help"]
            self.assertEqual({o: len(v) > 0 for o, v in told.items()}, options, verb)

    def test_each_verb_takes_its_options_and_no_others(self):
        for verb in self.verbs:
            for option, has_value in self.all.items():
                if verb == "serve" and option in self.verbs[verb]:
                    continue  # would serve: below
                value = [VALUES.get(option, "1")] if has_value else []
                r = self.call(verb, *ARGUMENTS.get(verb, []), "--" + option, *value)
                what = f"covey {verb} --{option}: exit {r.returncode}, {r.stderr}"
                if option in self.verbs[verb]:
                    self.assertNotEqual(r.returncode, USAGE, what)
                else:
                    self.assertEqual(r.returncode, USAGE, what)
                    self.assertIn(option, r.stderr)
                    self.assertIn(verb, r.stderr)

    def test_serve_takes_its_options(self):
        """Each is given a value that it cannot have, and says so; then nothing serves."""
        for option in self.verbs["serve"]:
            r = self.call("serve", "--" + option, "", "--log-level", "nonsense")
            self.assertEqual(r.returncode, USAGE, r.stderr)
            self.assertNotIn("there is no setting", r.stderr)

    def test_values_and_arguments_that_cannot_be(self):
        for words in (["load", "X", "--keep-alive", "5s"], ["load", "X", "--keep-alive", "soon"],
                      ["load", "X", "--context"], ["load", "X", "--precision", "best"], ["load"], ["load", "X", "Y"],
                      ["nodes", "--json=yes"], ["nodes", "--nonsense"], ["nonsense"]):
            self.assertEqual(self.call(*words).returncode, USAGE, words)
        self.assertEqual(self.call("load", "X", "--keep-alive", "forever").returncode, NO_AGENT)


class KeepAlive(unittest.TestCase):
    def test_an_unused_model_is_unloaded_and_a_used_one_is_not(self):
        with Lab() as lab:
            a = lab.agent("n0")
            a.ok("pull", TINY, "--name", "tiny")
            a.ok("load", "tiny", "--context", "2048")
            a.ok("load", "tiny", "--keep-alive", "10s")  # of one that runs: at once
            begun = time.monotonic()
            while time.monotonic() < begun + 12:
                a.run("Hello", "--max-tokens", "1")
                self.assertEqual(a.model()["state"], "active")
                self.assertEqual(a.model()["keep_alive_s"], 10)
            last = time.monotonic()
            wait_for(lambda: a.model() is None, 20, "it is unloaded")
            self.assertGreater(time.monotonic() - last, 8)
            a.run("Hello", "--max-tokens", "1", "--keep-alive", "1h")  # loaded again
            self.assertEqual(a.model()["keep_alive_s"], 3600)
            a.ok("load", "tiny", "--keep-alive", "forever")
            self.assertEqual(a.model()["keep_alive_s"], 0)


if __name__ == "__main__":
    unittest.main()
