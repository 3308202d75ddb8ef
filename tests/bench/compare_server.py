#!/usr/bin/env python3
"""Many requests at once: Covey's server beside llama.cpp's on the same file; and what a long prompt costs others.

usage: compare_server.py COVEY LLAMA_SERVER FILE.gguf [--threads N] [--at-once 8] [--rounds 5] [--end 0,2]

Prints, as medians of the rounds, in one run and alternating:
- tokens generated per second, all requests together: `--at-once` chats of about 128 prompt tokens and 64 generated ones
  (no two prompts begin alike, end tokens are banned by a bias; --end names them);
- Covey alone: the first token of a prompt of 2,000 tokens of which 1,900 were seen before, and of one that was not;
- Covey alone: the largest gap between two tokens of a stream while a prompt of 2,000 tokens enters, and without;
- from starting the program to the first token, the file in the page cache, both;
- memory after all that, of both: what is resident, of that the mapped file of the model, and all else (KV cache, working
  memory, the program), the latter also after the first token, when the KV cache is nearly empty; and how many positions
  Covey's KV cache holds in the end. Memory that was never written is not resident.

Both servers get the same cores and threads, eight slots and continuous batching. README.md says how to build llama.cpp.
"""
import argparse
import concurrent.futures
import http.client
import json
import os
import socket
import statistics
import subprocess
import tempfile
import threading
import time

WORDS = ("river stone window garden paper music winter mountain letter silver yellow forest ocean bridge market engine "
         "candle morning shadow island copper thunder velvet harbor meadow lantern orchard compass feather anchor").split()


def words(seed, n):
    return f"{seed} " + " ".join(WORDS[(seed * 7 + i * 11 + i * i % 13) % len(WORDS)] for i in range(n))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    def __init__(self, command, port, model, env=None):
        self.port, self.model = port, model
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def chat(self, text, n, bias, on_token=None):
        """The times at which tokens came, and how many were generated."""
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "max_tokens": n, "temperature": 0,
                "stream": True, "stream_options": {"include_usage": True}, "logit_bias": bias}
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        c.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        r = c.getresponse()
        if r.status != 200:
            raise RuntimeError(r.read()[:300])
        times, n_generated = [], 0
        for line in r:
            if not line.startswith(b"data: {"):
                continue
            j = json.loads(line[6:])
            if j.get("choices") and j["choices"][0]["delta"].get("content"):
                times.append(time.monotonic())
                if on_token:
                    on_token()
            if j.get("usage"):
                n_generated = j["usage"]["completion_tokens"]
        c.close()
        return times, n_generated

    def until_first_token(self, bias, started):
        while True:
            try:
                times, _ = self.chat("Say something.", 1, bias)
                return times[0] - started
            except (OSError, RuntimeError, IndexError, http.client.HTTPException):
                if self.process.poll() is not None:
                    raise RuntimeError("the server ended") from None
                time.sleep(0.005)

    def memory_mib(self, path):
        """What is resident, and of it the mapped model file."""
        inode, total, of_file, mapped = str(os.stat(path).st_ino), 0, 0, False
        with open(f"/proc/{self.process.pid}/smaps", encoding="utf-8") as f:
            for line in f:
                field = line.split()
                if not field[0].endswith(":"):
                    mapped = field[4] == inode
                elif field[0] == "Rss:":
                    total += int(field[1]) / 1024
                    of_file += int(field[1]) / 1024 if mapped else 0
        return total, of_file

    def stop(self):
        self.process.terminate()
        self.process.wait()


def start_covey(a, cores, home):
    port = free_port()
    name = os.path.basename(a.file).removesuffix(".gguf")
    started = time.monotonic()
    server = Server(["taskset", "-c", cores, a.covey, "serve", "--http", f"127.0.0.1:{port}", "--control-port", "0",
                     "--data-port", "0", "--mdns", "no", "--threads", str(a.threads), "--context", "4096", "--model", a.file],
                    port, name, dict(os.environ, COVEY_HOME=home))
    return server, server.until_first_token(a.bias, started)


def start_llama(a, cores):
    port = free_port()
    started = time.monotonic()
    server = Server(["taskset", "-c", cores, a.llama, "-m", a.file, "--port", str(port), "-t", str(a.threads), "-tb",
                     str(a.threads), "-np", str(a.at_once), "-c", str(4096 * a.at_once), "--no-warmup", "--jinja"], port, "x")
    return server, server.until_first_token(a.bias, started)


def together(a, server, seed):
    texts = [words(seed * 100 + i, 100) for i in range(a.at_once)]
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(a.at_once) as pool:
        done = list(pool.map(lambda t: server.chat(t, 64, a.bias), texts))
    return sum(n for _, n in done) / (time.monotonic() - started)


def first_token(a, server, text):
    started = time.monotonic()
    times, _ = server.chat(text, 2, a.bias)
    return times[0] - started


def largest_gap(a, server, seed, intruder):
    long, begun, thread = words(seed, a.long), threading.Event(), None
    count = [0]

    def on_token():
        count[0] += 1
        if count[0] == 20:
            begun.set()
    if intruder:
        thread = threading.Thread(target=lambda: (begun.wait(), server.chat(long, 2, a.bias)))
        thread.start()
    times, _ = server.chat(words(seed + 1, 20), 400, a.bias, on_token)
    if thread:
        thread.join()
    gaps = [y - x for x, y in zip(times[20:], times[21:])]
    return max(gaps), statistics.median(gaps)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("covey")
    p.add_argument("llama")
    p.add_argument("file")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--at-once", type=int, default=8)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--end", default="0,2")
    p.add_argument("--long", type=int, default=1500, help="words of a prompt of about 2,000 tokens")
    a = p.parse_args()
    a.bias = {t: -100 for t in a.end.split(",") if t}
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:a.threads]))
    m = statistics.median
    print(f"load {os.getloadavg()[0]:.2f}; {a.threads} threads on cores {cores}")
    home = tempfile.TemporaryDirectory()
    first, first_start = start_covey(a, cores, home.name)
    first.stop()
    ours, our_start = start_covey(a, cores, home.name)
    theirs, their_start = start_llama(a, cores)
    our_memory, their_memory = ours.memory_mib(a.file), theirs.memory_mib(a.file)
    try:
        print(f"start to first token: covey {our_start:.2f} s ({first_start:.2f} s the first time ever, with its calibration), llama.cpp {their_start:.2f} s")
        pairs = [(together(a, ours, i), together(a, theirs, i)) for i in range(1, a.rounds + 1)]
        print(f"{a.at_once} at once: covey {m(x for x, _ in pairs):.1f}, llama.cpp {m(y for _, y in pairs):.1f} tokens/s, "
              f"ratio {m(x / y for x, y in pairs):.2f}")
        cold, warm = [], []
        for i in range(a.rounds):
            seen = words(7000 + i, a.long - 75)
            cold.append(first_token(a, ours, seen))
            warm.append(first_token(a, ours, seen + " " + words(8000 + i, 75)))
        print(f"first token of a long prompt: {m(cold) * 1e3:.0f} ms new, {m(warm) * 1e3:.0f} ms when 95 % was seen, "
              f"{m(x / y for x, y in zip(cold, warm)):.1f} times sooner")
        quiet = [largest_gap(a, ours, 9000 + 10 * i, False) for i in range(a.rounds)]
        busy = [largest_gap(a, ours, 9500 + 10 * i, True) for i in range(a.rounds)]
        print(f"largest gap between tokens: {m(g for g, _ in quiet) * 1e3:.1f} ms alone, {m(g for g, _ in busy) * 1e3:.1f} ms "
              f"while a long prompt enters (median gap {m(g for _, g in quiet) * 1e3:.1f} ms)")
        kv = json.loads(subprocess.run([a.covey, "status", "--json"], env=dict(os.environ, COVEY_HOME=home.name), check=True,
                                       capture_output=True, text=True).stdout)["kv_cache"]
        for name, server, before in ("covey", ours, our_memory), ("llama.cpp", theirs, their_memory):
            total, of_file = server.memory_mib(a.file)
            print(f"memory of {name}: {total:.0f} MiB resident, {of_file:.0f} of the model's file, {total - of_file:.0f} of all "
                  f"else ({before[0] - before[1]:.0f} after the first token)")
        print(f"in Covey's KV cache: {kv['used_positions']} of {kv['positions']} positions")
    finally:
        ours.stop()
        theirs.stop()


if __name__ == "__main__":
    main()
