"""Model files that are cut short, damaged or not models at all: `covey pull FILE` ends with a sentence that names the
file and what is wrong, or takes a file whose damage only changes numbers; the agent serves on."""

import os
import struct
import unittest

import deep_model
from hostile import Unharmed, noise
from lab import Lab, TINY, wait_for


class HostileModels(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.lab = Lab()
        cls.addClassCleanup(cls.lab.close)
        cls.agent = cls.lab.agent("n0")
        cls.agent.ok("pull", TINY, "--name", "tiny")
        cls.agent.ok("load", "tiny", "--context", "2048")
        with open(TINY, "rb") as f:
            cls.good = f.read()
        cls.folder = os.path.join(cls.lab.folder, "files")
        os.mkdir(cls.folder)

    def check_serves(self):
        self.assertEqual(self.agent.chat(max_tokens=2)[0], 200)

    def pull(self, content, name="bad.gguf"):
        path = os.path.join(self.folder, name)
        with open(path, "wb") as f:
            f.write(content)
        return self.agent.call("pull", path, "--name", "bad"), path

    def check_refused(self, content, name="bad.gguf", word=""):
        r, path = self.pull(content, name)
        self.assertEqual(r.code, 1, r)
        self.assertTrue(r.err.startswith("covey: "), r)
        self.assertIn(os.path.basename(path), r.err, "the sentence does not name the file")
        said = r.err.split(os.path.basename(path), 1)[1].strip(" :'\"\n")
        self.assertGreater(len(said.split()), 2, f"the sentence does not say what is wrong: {r.err}")
        self.assertIn(word, r.err)
        self.assertNotIn("bad", [m["name"] for m in self.agent.ask("ls")["models"]])
        return said

    def test_cut_short_everywhere(self):
        data_at = self.good.rindex(b"token_embd.weight")
        with Unharmed(self, self.agent):
            for n in sorted({0, 1, 3, 4, 7, 8, 15, 16, 23, 24, 25, 100, 1000, 5000, data_at, data_at + 100,
                             len(self.good) // 2, len(self.good) - 32, len(self.good) - 1}):
                with self.subTest(bytes=n):
                    self.check_refused(self.good[:n])
            self.check_serves()

    def test_not_a_model(self):
        with Unharmed(self, self.agent):
            for content in (b"", b"\0" * 4096, b"GGUF", b"GGML" + self.good[4:], noise(5).randbytes(100000),
                            b"<html>not found</html>", b"version https://git-lfs.github.com/spec/v1\n"):
                self.check_refused(content)
            self.check_refused(self.good[:4] + struct.pack("<I", 99) + self.good[8:], word="99")
            self.check_refused(self.good[:4] + struct.pack(">I", 3) + self.good[8:])
            for at in (8, 16):
                for value in (2 ** 63, 2 ** 64 - 1, 2 ** 32, 10 ** 7):
                    self.check_refused(self.good[:at] + struct.pack("<Q", value) + self.good[at + 8:])
            for path in (self.folder, "/dev/null", os.path.join(self.folder, "is-not-there.gguf")):
                r = self.agent.call("pull", path)
                self.assertEqual(r.code, 1, r)
                self.assertIn(os.path.basename(path), r.err)
            self.check_serves()

    def test_numbers_that_lie(self):
        lies = []
        for key, values in ((b"llama.block_count", (0, 7, 2 ** 31, 2 ** 32 - 1)),
                            (b"llama.embedding_length", (0, 1, 2 ** 31, 63)),
                            (b"llama.attention.head_count", (0, 7, 2 ** 31)),
                            (b"llama.feed_forward_length", (0, 2 ** 32 - 1)),
                            (b"llama.context_length", (0,))):
            at = self.good.index(key) + len(key)
            self.assertEqual(struct.unpack_from("<I", self.good, at)[0], 4, key)  # a u32
            lies += [self.good[:at + 4] + struct.pack("<I", v) + self.good[at + 8:] for v in values]
        with Unharmed(self, self.agent):
            for content in lies:
                self.check_refused(content)
            self.check_serves()

    def test_another_name_for_the_same_file(self):
        r, _ = self.pull(self.good, "again.gguf")
        self.assertEqual(r.code, 0, r)
        self.assertEqual([m["name"] for m in self.agent.ask("ls")["models"]], ["bad"])
        self.agent.ok("pull", TINY, "--name", "tiny")
        self.assertEqual([m["name"] for m in self.agent.ask("ls")["models"]], ["tiny"])
        self.check_serves()

    def test_mutations(self):
        """Bits flipped in the header: refused with a sentence, or taken; what is taken can be asked for."""
        rng = noise(6)
        header = self.good.rindex(b"weight", 0, 60000) + 40
        taken = 0
        with Unharmed(self, self.agent, margin_kib=24 * 1024):
            for i in range(120):
                content = bytearray(self.good)
                for _ in range(rng.choice((1, 1, 1, 4, 30))):
                    content[rng.randrange(8, header)] = rng.randrange(256)
                if content == self.good:
                    continue
                r, path = self.pull(bytes(content), f"m{i}.gguf")
                if r.code == 0:
                    taken += 1
                    if taken <= 4:
                        self.assertIn(self.agent.call("run", "bad", "x", "--raw", "--max-tokens", "2").code, (0, 1, 4))
                        self.agent.call("stop", "bad")
                        wait_for(lambda: not self.agent.stage_names("bad"), 20, "it runs no longer")
                    self.agent.ok("rm", "bad")
                    continue
                self.assertEqual(r.code, 1, r)
                self.assertIn(os.path.basename(path), r.err)
            self.check_serves()

    def test_file_that_shrinks_while_it_serves(self):
        """A mapping that fails under us ends requests, not the agent (PROTOCOL 5.2)."""
        path = os.path.join(self.folder, "shrinks.gguf")
        deep_model.write(TINY, path, 30)
        with Unharmed(self, self.agent):
            self.agent.ok("pull", path, "--name", "shrinks")
            self.agent.ok("run", "shrinks", "x", "--raw", "--max-tokens", "2")
            os.truncate(path, os.path.getsize(path) // 3)
            r = self.agent.call("run", "shrinks", "some other words", "--raw", "--max-tokens", "200", timeout_s=90)
            self.assertIn(r.code, (1, 4, 6), r)
            self.assertTrue(self.agent.is_running())
            self.agent.ok("stop", "shrinks")
            wait_for(lambda: not self.agent.stage_names("shrinks"), 20, "it runs no longer")
            self.agent.ok("rm", "shrinks")
            self.check_serves()


if __name__ == "__main__":
    unittest.main()
