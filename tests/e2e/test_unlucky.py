"""What unlucky users do: odd arguments, files that are no files, files that change behind the agent's back. Each ends
with a sentence and an exit code that fits, and the agent serves on with right answers."""

import os
import shutil
import subprocess
import unittest

from lab import Lab, TINY, binary, wait_for

ASK = ("Once upon a time", "--raw", "--ignore-eos", "--temperature", "0", "--max-tokens", "40")


def copy_of_tiny(lab, name):
    path = os.path.join(lab.folder, name)
    shutil.copy(TINY, path)
    return path


class Arguments(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.lab = Lab()
        cls.addClassCleanup(cls.lab.close)
        cls.agent = cls.lab.agent("n0")
        cls.agent.ok("pull", TINY, "--name", "tiny")
        cls.agent.ok("load", "tiny", "--context", "256")

    def raw_call(self, *words):
        return subprocess.run([binary(), *words], env=self.agent.env, capture_output=True, timeout=60)

    def test_arguments_that_are_no_text(self):
        for words in (("plan", b"\xff\xfe"), ("run", "tiny", b"\xc3("), ("pull", b"/tmp/\xff.gguf"),
                      ("ping", b"\xed\xa0\x80"), ("pull", TINY, "--name", b"\xff")):
            r = self.raw_call(*words)
            self.assertEqual(r.returncode, 2, (words, r))
            self.assertIn(b"not valid UTF-8", r.stderr, words)

    def test_values_that_no_option_can_have(self):
        for words in (("load", "tiny", "--precision", "double"), ("debug", "logits", TINY, TINY, "--precision", "x"),
                      ("run", "tiny", "x", "--temperature", "nan"), ("run", "tiny", "x", "--temperature", "inf"),
                      ("run", "tiny", "x", "--top-p", "nan")):
            r = self.agent.call(*words)
            self.assertEqual(r.code, 2, (words, r))
        r = self.agent.call("run", "tiny", "x", "--max-tokens", "0")
        self.assertEqual(r.code, 1, r)
        self.assertIn("max_tokens", r.err)
        for field in ("max_tokens", "max_completion_tokens"):
            status, body = self.agent.chat(**{field: 0})
            self.assertEqual((status, body["error"]["type"]), (400, "invalid_request_error"), field)

    def test_files_that_are_not_there(self):
        for path in ("/missing.gguf", "./missing", "../missing.gguf", "missing.gguf", "folder/missing.gguf"):
            r = self.agent.call("pull", path)
            self.assertEqual(r.code, 1, r)
            self.assertIn(f"{path}: No such file or directory", r.err)
        self.assertIn("tiny is here, from the file", self.agent.ok("pull", TINY, "--name", "tiny").out)
        self.assertEqual(self.agent.ask("pull", TINY, "--name", "tiny")["from"], "file")

    def test_sizes_have_one_kind_of_unit(self):
        """Sizes count in 1024, rates in 1000."""
        for words in (("nodes",), ("status",), ("ls",), ("plan", "tiny", "--explain"), ("doctor",)):
            out = self.agent.ok(*words).out
            self.assertNotRegex(out, r"\d [kKMGT]B\b(?!/s)", words)
            self.assertNotRegex(out, r"\d [KMGT]iB/s", words)
        self.assertRegex(self.agent.ok("nodes").out, r"110 MiB of \S+ [GT]iB +\S+ [MG]B/s")

    def test_contexts_that_cannot_be(self):
        """While the model runs with another context, which goes on."""
        for context in ("2049", "4294967295"):
            for verb in ("load", "plan"):
                r = self.agent.call(verb, "tiny", "--context", context)
                self.assertIn(r.code, (1, 4), r)
                self.assertIn(f"a context of {context} is more than", r.err)
        self.assertEqual(self.agent.model()["context"], 256)
        self.assertEqual(len(self.agent.run(*ASK)["token_ids"]), 40)

    def test_contexts_that_hold_no_answer(self):
        for context in ("1", "15"):
            r = self.agent.call("load", "tiny", "--context", context)
            self.assertEqual(r.code, 1, r)
            self.assertIn("too short", r.err)
            r = self.raw_call("serve", "--context", context)
            self.assertEqual(r.returncode, 2, r)
        self.assertEqual(self.agent.model()["context"], 256)

    def test_life_of_a_token(self):
        r = self.agent.call("invite", "--ttl", "0")
        self.assertEqual(r.code, 2, r)
        self.assertIn("at least one second", r.err)
        for words, said in (((), "10 minutes."), (("--ttl", "90"), "90 seconds."), (("--ttl", "7200"), "120 minutes.")):
            r = self.agent.ok("invite", *words)
            self.assertIn(said, r.err)

    def test_peers_that_can_be_no_address(self):
        for peer in (":::::", "a b", "[::1", "x:y:z", "host:70000"):
            r = self.raw_call("serve", "--peer", peer)
            self.assertEqual(r.returncode, 2, (peer, r))
            self.assertIn(peer.encode(), r.stderr)

    def test_without_a_home(self):
        env = {k: v for k, v in os.environ.items() if k not in ("HOME", "COVEY_HOME") and not k.startswith("XDG_")}
        said = set()
        for verb in ("serve", "status", "doctor", "ls"):
            r = subprocess.run([binary(), verb], env=env, capture_output=True, timeout=60)
            self.assertEqual(r.returncode, 2, (verb, r))
            said.add(r.stderr)
        self.assertEqual(len(said), 1, said)

    def test_settings_that_are_a_folder(self):
        home = os.path.join(self.lab.folder, "odd")
        os.makedirs(os.path.join(home, "config", "covey.ini"))
        r = subprocess.run([binary(), "serve"], env=dict(os.environ, COVEY_HOME=home), capture_output=True, timeout=60)
        self.assertEqual(r.returncode, 2, r)
        self.assertIn(b"covey.ini: this is a folder", r.stderr)

    def test_names_that_cannot_be_shown(self):
        for name in ("", "a\nb", "a\x1b[31mb", "x" * 96):
            r = self.agent.call("pull", TINY, "--name", name)
            self.assertEqual(r.code, 1, (name, r))
            self.assertIn("name", r.err)
        self.assertEqual([m["name"] for m in self.agent.ask("ls")["models"]], ["tiny"])
        for name in ("", "a\nb", b"x\xffy", "\x1b[31m"):
            r = self.raw_call("serve", "--name", name)
            self.assertEqual(r.returncode, 2, (name, r))

    def test_home_too_long_for_a_socket(self):
        for verb in ("status", "doctor"):
            r = subprocess.run([binary(), verb], env=dict(os.environ, COVEY_HOME="/tmp/" + "h" * 120),
                               capture_output=True, timeout=60)
            self.assertEqual(r.returncode, 3, r)
            self.assertIn(b"too long for a socket", r.stderr)

    def test_version_and_empty_body(self):
        self.assertEqual(self.agent.ok("version", "--json").json["version"], self.agent.status()["version"])
        status, _, body = self.agent.http("POST", "/v1/chat/completions", b"")
        self.assertEqual(status, 400)
        self.assertIn(b"the body is empty", body)


@unittest.skipUnless(subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode == 0,
                     "needs mount namespaces")
class Disk(unittest.TestCase):
    """The data folder is a small file system of its own, in a mount namespace."""

    def lasting_disk(self, agent):
        """A data folder that outlives its agent, in the namespace of a process of its own."""
        data = os.path.join(agent.home, "data")
        os.makedirs(data)
        holder = subprocess.Popen(["unshare", "-rm", "sh", "-c",
                                   'mount -t tmpfs -o size=1m none "$0" && echo up && exec cat', data],
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE)

        def end():
            holder.stdin.close()
            holder.wait(10)
            holder.stdout.close()

        self.addCleanup(end)
        self.assertEqual(holder.stdout.readline(), b"up\n")
        agent.prefix = ["nsenter", "-t", str(holder.pid), "-U", "-m", "--preserve-credentials"]
        return f"/proc/{holder.pid}/root{data}"

    @staticmethod
    def fill(path):
        try:
            with open(path, "wb", buffering=0) as f:
                while True:
                    f.write(bytes(4096))
        except OSError:
            pass

    def assert_disk_full(self, agent):
        wait_for(lambda: agent.status()["disk_full"], 60, lambda: f"{agent.name} says it: {agent.status()}")
        self.assertIsNone(agent.status()["planner"])
        self.assertIn("cannot be written", agent.ok("status").out)
        self.assertTrue(any("is the disk full?" in f["text"] for f in agent.ask("doctor")["findings"]))

    def test_start_with_a_full_disk(self):
        lab = Lab()
        self.addCleanup(lab.close)
        agent = lab.agent("n0", start=False)
        data = self.lasting_disk(agent)
        agent.start()
        agent.ok("pull", TINY, "--name", "tiny")
        agent.ok("load", "tiny", "--context", "256")
        term = agent.status()["term"]
        self.assertEqual(agent.terminate(), 0)
        self.fill(f"{data}/filler")
        agent.start()
        self.assert_disk_full(agent)
        os.unlink(f"{data}/filler")
        wait_for(lambda: agent.status()["planner"] == agent.id, 30, "it plans again")
        self.assertGreater(agent.status()["term"], term)
        self.assertFalse(agent.status()["disk_full"])
        wait_for(lambda: agent.stage_names(), 30, "what was wanted runs")
        self.assertEqual(len(agent.run(*ASK)["token_ids"]), 40)

    def test_election_with_a_full_disk(self):
        """The planner dies: a node that cannot write down a new term does not claim, lives, and serves on."""
        lab = Lab()
        self.addCleanup(lab.close)
        full = lab.agent("n0", start=False)
        data = self.lasting_disk(full)
        full.start()
        full.keep_ports()
        other = lab.agent("n1", memory_limit="9")
        full.ok("pull", TINY, "--name", "tiny")
        lab.pair(full, other)
        full.ok("load", "tiny", "--context", "256")
        planner = wait_for(lambda: full.status()["planner"], 30, "there is a planner")
        if planner == full.id:  # the other one has to be it
            other_id = other.id
            full.kill()
            wait_for(lambda: other.status()["planner"] == other_id, 30, "the other one plans")
            full.start()
            wait_for(lambda: full.status()["planner"] == other_id, 30, "it is followed")
        wait_for(lambda: full.stage_names() == ["n0"], 60, lambda: f"it runs on n0: {full.status()}")
        answer = full.run(*ASK)["token_ids"]
        self.fill(f"{data}/filler")
        other.kill()
        self.assert_disk_full(full)
        self.assertEqual(full.run(*ASK)["token_ids"], answer)
        os.unlink(f"{data}/filler")
        wait_for(lambda: full.status()["planner"] == full.id, 30, "it plans")
        self.assertFalse(full.status()["disk_full"])
        self.assertEqual(full.run(*ASK)["token_ids"], answer)

    def test_full_disk_refuses_and_the_agent_lives(self):
        lab = Lab()
        self.addCleanup(lab.close)
        agent = lab.agent("n0", start=False)
        data = os.path.join(agent.home, "data")
        os.makedirs(data)
        agent.prefix = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=1m none "$0" && exec "$@"', data]
        agent.start()
        agent.ok("pull", TINY, "--name", "tiny")
        filler = f"/proc/{agent.pid}/root{data}/filler"
        with self.assertRaises(OSError), open(filler, "wb", buffering=0) as f:
            while True:
                f.write(bytes(4096))
        for words in (("load", "tiny", "--context", "256"), ("invite",), ("leave",)):
            r = agent.call(*words)
            self.assertEqual(r.code, 1, (words, r))
            self.assertIn("is the disk full?", r.err)
        self.assertTrue(agent.is_running())
        self.assertEqual(agent.status()["models"], [])
        os.unlink(filler)
        agent.ok("load", "tiny", "--context", "256")
        self.assertEqual(len(agent.run(*ASK)["token_ids"]), 40)


class Files(unittest.TestCase):
    def setUp(self):
        self.lab = Lab()
        self.addCleanup(self.lab.close)
        self.agent = self.lab.agent("n0")

    def load(self, path):
        self.agent.ok("pull", path, "--name", "tiny")
        self.agent.ok("load", "tiny", "--context", "256")

    def test_fifo_is_no_model(self):
        fifo = os.path.join(self.lab.folder, "fifo")
        os.mkfifo(fifo)
        r = self.agent.call("pull", fifo)
        self.assertEqual(r.code, 1, r)
        self.assertIn("not a regular file", r.err)
        self.agent.ok("pull", TINY, "--name", "tiny")
        self.assertEqual(self.agent.terminate(), 0)

    def test_file_that_changed_is_not_loaded(self):
        path = copy_of_tiny(self.lab, "changed.gguf")
        self.agent.ok("pull", path, "--name", "tiny")
        with open(path, "r+b") as f:
            f.seek(os.path.getsize(path) - 100000)
            f.write(os.urandom(1000))
        r = self.agent.call("load", "tiny", "--context", "256")
        self.assertEqual(r.code, 4, r)
        self.assertIn(path, r.err)
        self.assertIn("has changed", r.err)

    def assert_failed_by(self, path):
        """Status and doctor say what is wrong, with the file's name."""
        m = wait_for(lambda: self.agent.model() if self.agent.model()["state"] == "failed" else None, 10,
                     lambda: f"the model failed: {self.agent.model()}")
        self.assertIn(path, m["why"])
        findings = [f for f in self.agent.ask("doctor")["findings"] if f["level"] == "problem"]
        self.assertTrue(any(path in f["text"] for f in findings), findings)

    def test_file_cut_while_it_runs(self):
        """The answer ends with a sentence that names the file; the whole file runs again, with right answers, though
        some pages of the mapping had become zeros."""
        path = copy_of_tiny(self.lab, "cut.gguf")
        self.load(path)
        expected = self.agent.run(*ASK)["token_ids"]
        os.truncate(path, 150000)
        r = self.agent.call("run", "tiny", *ASK)
        self.assertEqual(r.code, 4, r)
        self.assertIn(path, r.err)
        self.assertIn("tiny", r.err)
        self.assertNotIn("again and again", r.err)
        self.assert_failed_by(path)
        again = self.agent.call("load", "tiny")
        self.assertNotEqual(again.code, 0, again)
        self.assertIn(path, again.err)
        shutil.copy(TINY, path)
        self.agent.ok("load", "tiny")
        self.assertEqual(self.agent.run(*ASK)["token_ids"], expected)

    def test_file_changed_while_it_runs(self):
        """Same size, other bytes: nobody asks, and it is noticed all the same."""
        path = copy_of_tiny(self.lab, "other.gguf")
        self.load(path)
        expected = self.agent.run(*ASK)["token_ids"]
        with open(path, "r+b") as f:
            f.seek(os.path.getsize(path) - 100000)
            f.write(os.urandom(1000))
        self.assert_failed_by(path)
        r = self.agent.call("run", "tiny", *ASK)
        self.assertNotEqual(r.code, 0, r)
        self.assertIn(path, r.err)
        shutil.copy(TINY, path)
        self.agent.ok("pull", path, "--name", "tiny")
        self.assertEqual(self.agent.run(*ASK)["token_ids"], expected)

    def test_repaired_model_is_not_refused_for_the_old_reason(self):
        path = copy_of_tiny(self.lab, "repaired.gguf")
        self.agent.ok("pull", path, "--name", "tiny")
        os.truncate(path, 150000)
        r = self.agent.call("load", "tiny", "--context", "256")
        self.assertEqual(r.code, 4, r)
        self.assertIn(path, r.err)
        shutil.copy(TINY, path)
        self.agent.ok("pull", path, "--name", "tiny")
        self.agent.ok("load", "tiny", "--context", "256", timeout_s=20)
        self.assertEqual(len(self.agent.run(*ASK)["token_ids"]), 40)

    def test_model_whose_file_is_gone_can_be_stopped(self):
        path = copy_of_tiny(self.lab, "gone.gguf")
        self.load(path)
        os.unlink(path)
        self.agent.terminate()
        self.agent.start()
        self.assertEqual([m["name"] for m in self.agent.status()["models"]], ["tiny"])
        self.agent.ok("stop", "tiny")
        self.assertEqual(self.agent.status()["models"], [])


if __name__ == "__main__":
    unittest.main()
