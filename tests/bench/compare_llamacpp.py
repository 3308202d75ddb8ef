#!/usr/bin/env python3
"""Covey beside llama.cpp on the same file, in one run, alternating: prompt 128 / generate 64.

usage: compare_llamacpp.py COVEY MODEL.gguf [--threads N] [--rounds N]

Needs the Python package xllamacpp (llama.cpp prebuilt; a native build of llama.cpp is a little faster, so the ratios
flatter Covey somewhat where the two differ). One agent alone, temperature 0, end tokens ignored, no prefix reuse (each
round's prompt begins with another word). Prints tokens per second and the ratio, as medians.
"""
import argparse, json, os, statistics, subprocess, sys, tempfile, time

WORDS = ("river stone window garden paper music winter mountain letter silver yellow forest ocean bridge market engine "
         "candle morning shadow island copper thunder velvet harbor meadow lantern orchard compass feather anchor").split()


def prompt(round_number):
    words = [WORDS[(round_number * 7 + i * 11) % len(WORDS)] for i in range(124)]
    return f"{round_number} " + " ".join(words)


def run_covey(covey, env, name, text, generate):
    out = subprocess.run([covey, "run", name, text, "--raw", "--ignore-eos", "--temperature", "0", "--max-tokens",
                          str(generate), "--json"], env=env, check=True, capture_output=True, text=True).stdout
    r = json.loads(out)
    return r["prompt_tokens"] / r["prompt_ms"] * 1e3, r["tokens_per_s"], r["prompt_tokens"]


def run_llama(server, text, generate):
    r = server.handle_completions({"prompt": text, "n_predict": generate, "temperature": 0, "ignore_eos": True,
                                   "cache_prompt": False, "stream": False})
    t = r["timings"]
    return t["prompt_per_second"], t["predicted_per_second"]


def main():
    a = argparse.ArgumentParser()
    a.add_argument("covey")
    a.add_argument("model")
    a.add_argument("--threads", type=int, default=1)
    a.add_argument("--rounds", type=int, default=5)
    a = a.parse_args()
    os.sched_setaffinity(0, list(sorted(os.sched_getaffinity(0)))[:a.threads])
    import xllamacpp as x
    params = x.CommonParams()
    params.model.path = a.model
    params.n_ctx = 2048
    params.n_parallel = 1
    params.cpuparams.n_threads = a.threads
    params.cpuparams_batch.n_threads = a.threads
    server = x.Server(params)
    with tempfile.TemporaryDirectory() as home:
        env = dict(os.environ, COVEY_HOME=home)
        agent = subprocess.Popen([a.covey, "serve", "--http", "127.0.0.1:0", "--control-port", "0", "--data-port", "0",
                                  "--mdns", "no", "--threads", str(a.threads), "--context", "2048", "--model", a.model],
                                 env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            name = os.path.basename(a.model).removesuffix(".gguf")
            deadline = time.time() + 60
            while subprocess.run([a.covey, "load", name, "--context", "2048"], env=env, capture_output=True).returncode:
                if time.time() > deadline:
                    sys.exit("the agent did not start")
                time.sleep(0.2)
            rows = []
            for i in range(a.rounds + 1):
                c = run_covey(a.covey, env, name, prompt(i), 64)
                l = run_llama(server, prompt(i), 64)
                if i:  # the first round warms both up
                    rows.append((c, l))
        finally:
            agent.terminate()
            agent.wait()
    m = statistics.median
    for what, k in (("prompt", 0), ("generate", 1)):
        ours, theirs = m(c[k] for c, _ in rows), m(l[k] for _, l in rows)
        print(f"{what:9} {rows[0][0][2] if k == 0 else 64:4} tokens, {a.threads} thread(s): covey {ours:8.1f}  "
              f"llama.cpp {theirs:8.1f} tokens/s  ratio {m(c[k] / l[k] for c, l in rows):.2f}")


if __name__ == "__main__":
    main()
