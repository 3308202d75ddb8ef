"""Agents for tests: started on free ports in a folder of their own, watched, and always cleaned up.

Every wait has a deadline and polls a condition; nothing here sleeps for a fixed time in the hope that something
has happened by then.
"""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.dirname(os.path.dirname(HERE))
TINY = os.path.join(SOURCE, "tests", "reference", "tiny_split.gguf")
TINY_LAYERS = 6
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def binary():
    path = os.environ.get("COVEY_BINARY")
    if not path:
        raise RuntimeError("COVEY_BINARY must name the program to test (meson sets it)")
    return os.path.abspath(path)


def smollm2():
    """The path of SmolLM2, or None where it is not there. Under CI it has to be there."""
    return real_model("smollm2-135m.gguf")


def real_model(file):
    folder = os.environ.get("COVEY_MODELS", "")
    path = os.path.join(folder, file)
    if folder and os.path.exists(path):
        return path
    if os.environ.get("CI") == "true":
        raise RuntimeError(f"COVEY_MODELS must name the folder of {file} under CI")
    return None


def wait_for(condition, deadline_s, what):
    """Polls until condition() is true and gives its value; AssertionError with `what` after the deadline."""
    end = time.monotonic() + deadline_s
    last = None
    while True:
        try:
            value = condition()
            if value:
                return value
        except (OSError, http.client.HTTPException, NoAgent) as e:
            last = e
        if time.monotonic() >= end:
            detail = what() if callable(what) else what
            raise AssertionError(f"not within {deadline_s} s: {detail}" + (f" (last: {last!r})" if last else ""))
        time.sleep(0.02)


class NoAgent(Exception):
    """The command could not reach its agent."""


class Result:
    """What a command gave: .code, .out, .err, .json"""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    @property
    def json(self):
        return json.loads(self.out)

    def __repr__(self):
        return f"exit {self.code}\nstdout: {self.out[:2000]}\nstderr: {self.err[:2000]}"


class Agent:
    """One `covey serve` and the commands that speak to it."""

    def __init__(self, home, name, options=(), env=None):
        self.home, self.name, self.options = home, name, list(options)
        self.env = dict(os.environ, COVEY_HOME=home, **(env or {}))
        self.process = None
        self.prefix = []  # of the command that serves
        self.http_port = self.control_port = self.data_port = 0
        os.makedirs(home, exist_ok=True)

    # ---- life ----

    def start(self, deadline_s=30):
        log = open(os.path.join(self.home, "serve.log"), "ab")
        if self.process is not None:
            self.process.stdout.close()
        command = [*self.prefix, binary(), "serve", "--name", self.name, *self.options]
        self.process = subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stderr=log,
                                        stdin=subprocess.DEVNULL)
        log.close()
        watchdog = threading.Timer(deadline_s, self.process.kill)
        watchdog.start()
        line = self.process.stdout.readline().decode()
        watchdog.cancel()
        found = re.match(r"covey \S+: http http://(\S+):(\d+), control port (\d+), data port (\d+)", line)
        if not found:
            self.process.kill()
            raise AssertionError(f"{self.name} did not start: {line!r}\n{self.log_tail()}")
        self.http_host = found.group(1).strip("[]")
        self.http_port, self.control_port, self.data_port = (int(found.group(i)) for i in (2, 3, 4))
        wait_for(lambda: self.call("status").code == 0, deadline_s, f"{self.name} answers its socket")
        return self

    def keep_ports(self):
        """Later starts use the ports of this one, as an installed agent does."""
        self.options += ["--http", f"127.0.0.1:{self.http_port}", "--control-port", str(self.control_port),
                         "--data-port", str(self.data_port)]

    @property
    def pid(self):
        return self.process.pid

    def kill(self):
        self.process.kill()
        self.process.wait(10)

    def terminate(self, deadline_s=15):
        """SIGTERM; gives the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(deadline_s)

    def is_running(self):
        return self.process is not None and self.process.poll() is None

    def cleanup(self):
        if self.process is None:
            return
        if self.is_running():
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        self.process.stdout.close()

    def log_tail(self, n=3000):
        with open(os.path.join(self.home, "serve.log"), "rb") as f:
            return f.read()[-n:].decode(errors="replace")

    # ---- commands ----

    def call(self, *words, timeout_s=60, input_text=None):
        done = subprocess.run([binary(), *words], env=self.env, capture_output=True, timeout=timeout_s,
                              input=input_text)
        return Result(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))

    def ok(self, *words, timeout_s=60):
        r = self.call(*words, timeout_s=timeout_s)
        assert r.code == 0, f"covey {' '.join(words)} on {self.name}: {r!r}\n{self.log_tail()}"
        return r

    def ask(self, verb, *words):
        r = self.call(verb, *words, "--json")
        if r.code == 3:
            raise NoAgent(r.err)
        assert r.code == 0, f"covey {verb} on {self.name}: {r!r}"
        return r.json

    def status(self):
        return self.ask("status")

    def nodes(self):
        return self.ask("nodes")["nodes"]

    @property
    def id(self):
        return self.status()["id"]

    def model(self, name="tiny"):
        for m in self.status()["models"]:
            if m["name"] == name:
                return m
        return None

    def stage_names(self, name="tiny"):
        """Names of the nodes of the running plan in stage order; [] when none is active."""
        m = self.model(name)
        return [s["names"][0] for s in m["stages"]] if m and m["state"] == "active" else []

    def run(self, prompt, *options, model="tiny", timeout_s=60):
        return self.ok("run", model, prompt, *options, "--json", timeout_s=timeout_s).json

    def members_alive(self):
        return sorted(n["name"] for n in self.nodes() if n["member"] and n["state"] == "alive")

    # ---- HTTP ----

    def connection(self, timeout_s=60):
        return http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=timeout_s)

    def http(self, method, path, body=None, headers=None, timeout_s=60):
        """(status, headers, body bytes)"""
        c = self.connection(timeout_s)
        with contextlib.closing(c):
            if isinstance(body, (dict, list)):
                body = json.dumps(body).encode()
            c.request(method, path, body=body, headers=headers or {})
            r = c.getresponse()
            return r.status, dict(r.getheaders()), r.read()

    def chat(self, timeout_s=60, **fields):
        """A whole answer of /v1/chat/completions: (status, JSON)"""
        fields.setdefault("model", "tiny")
        fields.setdefault("messages", [{"role": "user", "content": "Say something."}])
        status, _, body = self.http("POST", "/v1/chat/completions", fields, {"Content-Type": "application/json"},
                                    timeout_s)
        return status, json.loads(body)

    def stream(self, prompt, timeout_s=60, model="tiny", **fields):
        return Stream(self, dict({"model": model, "prompt": prompt, "stream": True, "raw": True,
                                  "temperature": 0}, **fields), timeout_s)

    # ---- what it costs ----

    def resident_kib(self):
        with open(f"/proc/{self.pid}/status") as f:
            return int(re.search(r"VmRSS:\s+(\d+)", f.read()).group(1))

    def n_connections(self, *ports):
        """TCP connections of the agent that are established with these ports of its own."""
        inodes = set()
        for fd in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(f"/proc/{self.pid}/fd/{fd}"))
        n = 0
        for table in ("tcp", "tcp6"):
            with open(f"/proc/{self.pid}/net/{table}") as f:
                for line in f.readlines()[1:]:
                    words = line.split()
                    n += (words[3] == "01" and int(words[1].rsplit(":", 1)[1], 16) in ports
                          and f"socket:[{words[9]}]" in inodes)
        return n

    def n_descriptors(self):
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def cpu_s(self):
        with open(f"/proc/{self.pid}/stat") as f:
            words = f.read().rsplit(")", 1)[1].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


class Stream:
    """An answer as it comes (/covey/generate): .ids and .text grow, .end is the last line, .error the error."""

    def __init__(self, agent, fields, timeout_s):
        self.ids, self.text, self.end, self.error, self.status = [], "", None, None, None
        self.closed_at = None
        self.connection = agent.connection(timeout_s)
        self.connection.request("POST", "/covey/generate", json.dumps(fields).encode(),
                                {"Content-Type": "application/json"})
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self):
        try:
            r = self.connection.getresponse()
            self.status = r.status
            if r.status != 200:
                self.error = json.loads(r.read())["error"]
                return
            for line in r:
                item = json.loads(line)
                self.text += item.get("text", "")
                if "id" in item:
                    self.ids.append(item["id"])
                if "error" in item:
                    self.error = item["error"]
                if "finish" in item:
                    self.end = item
        except (OSError, http.client.HTTPException, ValueError) as e:
            self.error = {"message": repr(e), "code": "broken"}
        finally:
            self.closed_at = time.monotonic()
            self.connection.close()

    def reach(self, n, deadline_s=30):
        """Waits until n tokens have come."""
        wait_for(lambda: len(self.ids) >= n or self.closed_at, deadline_s, lambda: f"{n} tokens, have {len(self.ids)}")
        assert len(self.ids) >= n, f"ended after {len(self.ids)} tokens: {self.error}"

    def finish(self, deadline_s=60):
        self.thread.join(deadline_s)
        assert not self.thread.is_alive(), f"hangs after {len(self.ids)} tokens"
        return self

    def drop(self):
        """The client goes away without a word."""
        with contextlib.suppress(OSError, AttributeError):
            self.connection.sock.shutdown(socket.SHUT_RDWR)
        self.thread.join(10)


class Lab:
    """A temporary folder with agents in it; use as a context manager, or call close()."""

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="covey-e2e-")
        self.agents = []

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is not None:
            self.report(sys.stderr)
        self.close()

    def report(self, to):
        for a in self.agents:
            if a.process is not None:
                print(f"---- log of {a.name} ----\n{a.log_tail()}", file=to)

    def close(self):
        for a in self.agents:
            a.cleanup()
        shutil.rmtree(self.folder, ignore_errors=True)

    def agent(self, name, memory_limit="110", context=2048, threads=1, options=(), env=None, start=True):
        """An agent on free ports, without mDNS: tests say themselves who is there."""
        all_options = ["--http", "127.0.0.1:0", "--control-port", "0", "--data-port", "0", "--mdns", "no",
                       "--threads", str(threads), "--memory-limit", str(memory_limit), "--context", str(context),
                       "--log-level", "debug", *options]
        a = Agent(os.path.join(self.folder, name), name, all_options, env)
        self.agents.append(a)
        return a.start() if start else a

    def pair(self, first, *others):
        """Makes members of all, by token and address; waits until all see all."""
        for other in others:
            token = first.ask("invite")["token"]
            other.ok("join", token, "--peer", f"127.0.0.1:{first.control_port}")
        names = sorted(a.name for a in (first, *others))
        for a in (first, *others):
            wait_for(lambda a=a: a.members_alive() == names, 20,
                     lambda a=a: f"{a.name} sees {a.members_alive()}, not {names}")
        for a in (first, *others):
            # Plans need the rates of all and both directions of each path.
            wait_for(lambda a=a: all(n["compute"]["stream_bytes_per_s"] > 0 for n in a.nodes()), 30,
                     lambda a=a: f"{a.name} knows the speed of all")
            wait_for(lambda a=a: all(n["self"] or any(p["up"] and p["bytes_per_s"] > 0 for p in n["paths"])
                                     for n in a.nodes()), 30,
                     lambda a=a: f"{a.name} knows the bandwidth to all: {a.nodes()}")
