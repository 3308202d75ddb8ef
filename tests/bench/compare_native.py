#!/usr/bin/env python3
"""Covey beside a native build of llama.cpp on the same files, alternating in one run: the table of ratios.

usage: compare_native.py COVEY LLAMA_BENCH FILE.gguf... [--threads 1,2] [--prompt 128,512] [--generate 64]
                         [--depth 0,2048] [--rounds 5] [--busy] [--json]

For each file and thread count: `covey bench` and `llama-bench` in turn, pinned to the same cores, one round of each at a
time. llama.cpp runs with flash attention off and on and is credited with the better of the two. Ratios are medians of the
rounds' ratios; the speeds beside them are medians too. With --busy an endless loop runs on the last of the cores all the
while. README.md in this folder says how to build llama.cpp.
"""
import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys


def pinned(cores):
    return ["taskset", "-c", ",".join(map(str, cores))]


def covey_speed(a, path, cores, prompt, generate, depth):
    out = subprocess.run(pinned(cores) + [a.covey, "bench", path, "--json", "--rounds", "1", "--threads", str(len(cores)),
                                          "--prompt", str(prompt), "--generate", str(generate), "--depth", str(depth)],
                         check=True, capture_output=True, text=True).stdout
    j = json.loads(out)
    return j["prompt_tokens_per_s"] if prompt else j["generate_tokens_per_s"]


def llama_speed(a, path, cores, prompt, generate, depth):
    best = 0.0
    for flash in ("0", "1"):
        done = subprocess.run(pinned(cores) + [a.llama, "-m", path, "-t", str(len(cores)), "-p", str(prompt), "-n",
                                               str(generate), "-d", str(depth), "-fa", flash, "-r", "1", "-o", "json"],
                              capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{a.llama} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        best = max(best, json.loads(done.stdout)[0]["avg_ts"])
    return best


@contextlib.contextmanager
def loop_on(cores):
    process = subprocess.Popen(pinned(cores) + ["sh", "-c", "while :; do :; done"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def numbers(text):
    return [int(x) for x in text.split(",") if x]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("covey")
    p.add_argument("llama")
    p.add_argument("files", nargs="+")
    p.add_argument("--threads", type=numbers, default=[1, 2])
    p.add_argument("--prompt", type=numbers, default=[128, 512])
    p.add_argument("--generate", type=numbers, default=[64])
    p.add_argument("--depth", type=numbers, default=[0, 2048])
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--busy", action="store_true", help="an endless loop takes the last core of those that are used")
    p.add_argument("--json", action="store_true")
    a = p.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    rows = []
    print(f"load {os.getloadavg()[0]:.2f}, {len(cores)} cores", file=sys.stderr)
    if not a.json:
        print(f"{'file':28} {'threads':>7} {'what':>16} {'covey':>9} {'llama.cpp':>9} {'ratio':>6}")
    for path in a.files:
        cases = [(n, 0, 0) for n in a.prompt] + [(0, n, d) for n in a.generate for d in a.depth]
        for threads in a.threads:
            for prompt, generate, depth in cases:
                ours, theirs = [], []
                with loop_on(cores[threads - 1:threads]) if a.busy else contextlib.nullcontext():
                    for _ in range(a.rounds):
                        ours.append(covey_speed(a, path, cores[:threads], prompt, generate, depth))
                        theirs.append(llama_speed(a, path, cores[:threads], prompt, generate, depth))
                what = f"prompt {prompt}" if prompt else f"generate {generate} @ {depth}"
                row = {"file": os.path.basename(path), "threads": threads, "what": what, "busy": a.busy,
                       "covey": statistics.median(ours), "llama.cpp": statistics.median(theirs),
                       "ratio": statistics.median(x / y for x, y in zip(ours, theirs))}
                rows.append(row)
                if not a.json:
                    print(f"{row['file']:28} {threads:7} {what:>16} {row['covey']:9.1f} {row['llama.cpp']:9.1f} "
                          f"{row['ratio']:6.2f}", flush=True)
    if a.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
