#!/usr/bin/env python3
"""Measures what the project's closing notes report about real agents, and prints one JSON object.

    COVEY_BINARY=build/agent/covey COVEY_MODELS=FOLDER python3 tests/bench/figures.py

See tests/bench/README.md for what each figure means.
"""

import json
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "e2e"))
import lab  # noqa: E402

PROMPT_TOKENS, ANSWER_TOKENS, RUNS = 128, 64, 5
IDLE_S = 20
LIMIT_OF_TWO = "110"  # MiB: SmolLM2 at a context of 2,048 does not fit into one of them


def pin(agent, core):
    for task in os.listdir(f"/proc/{agent.pid}/task"):
        os.sched_setaffinity(int(task), {core})


def prompt_of(agent, n):
    """A raw prompt of n tokens for SmolLM2, grown word by word."""
    words = "the cat sat on a mat and then it went out to see what the dog had done with all of its old bones".split()
    text = ""
    for i in range(2 * n):
        text += (" " if text else "") + words[i % len(words)]
        if i + 1 >= n:
            used = agent.run(text, "--raw", "--max-tokens", "1", model="smollm2")["prompt_tokens"]
            if used >= n:
                return text
    raise AssertionError("no prompt of that length")


def speed(agent, prompt):
    """Medians of prompt and generation speed. Each prompt begins differently, so that no cache of keys helps."""
    prefill, decode = [], []
    for i in range(RUNS):
        r = agent.run(f"{i}{time.monotonic_ns()} {prompt}", "--raw", "--ignore-eos", "--temperature", "0", "--max-tokens",
                      str(ANSWER_TOKENS), model="smollm2", timeout_s=120)
        prefill.append(r["prompt_tokens"] / r["prompt_ms"] * 1e3)
        decode.append(r["tokens_per_s"])
    return {"prompt_tokens_per_s": round(statistics.median(prefill), 1),
            "generated_tokens_per_s": round(statistics.median(decode), 1)}


def idle(agents):
    before = [a.cpu_s() for a in agents]
    began = time.monotonic()
    while time.monotonic() < began + IDLE_S:
        time.sleep(0.5)
    passed = time.monotonic() - began
    return [round((a.cpu_s() - b) / passed * 100, 3) for a, b in zip(agents, before)]


def pairing(the_lab, n):
    """Seconds from `covey join` until both see both alive."""
    times = []
    for i in range(n):
        a, b = (the_lab.agent(f"p{i}{c}", memory_limit="110") for c in "ab")
        token = a.ask("invite")["token"]
        began = time.monotonic()
        b.ok("join", token, "--peer", f"127.0.0.1:{a.control_port}")
        names = sorted((a.name, b.name))
        lab.wait_for(lambda: a.members_alive() == b.members_alive() == names, 20, "paired")
        times.append(time.monotonic() - began)
        a.terminate()
        b.terminate()
    return round(statistics.median(times), 3)


def main():
    model = lab.smollm2()
    figures = {"load_average": os.getloadavg()[0], "cores": len(os.sched_getaffinity(0))}
    with lab.Lab() as the_lab:
        figures["pairing_s_median_of_5"] = pairing(the_lab, 5)
        a, b = (the_lab.agent(n, memory_limit=LIMIT_OF_TWO) for n in ("alpha", "beta"))
        the_lab.pair(a, b)
        figures["resident_mib_without_model"] = [round(x.resident_kib() / 1024, 1) for x in (a, b)]
        figures["idle_cpu_percent_of_a_core"] = idle((a, b))
        if model is None:
            print(json.dumps(figures, indent=2))
            return
        one = the_lab.agent("one", memory_limit="1000")
        one.ok("pull", model, "--name", "smollm2")
        one.ok("load", "smollm2", "--context", "2048")
        a.ok("pull", model, "--name", "smollm2")
        a.ok("load", "smollm2", "--context", "2048", timeout_s=120)
        cores = sorted(os.sched_getaffinity(0))
        pin(one, cores[0])
        pin(a, cores[0])
        pin(b, cores[-1])
        prompt = prompt_of(one, PROMPT_TOKENS)
        figures["one_node_one_core"] = speed(one, prompt)
        figures["two_nodes_one_core_each"] = speed(a, prompt)
        figures["stages"] = [[s["names"][0], s["first_layer"], s["last_layer"], s["memory_bytes"]]
                             for s in a.model("smollm2")["stages"]]
        figures["resident_mib_with_model"] = {x.name: round(x.resident_kib() / 1024, 1) for x in (one, a, b)}
        alone, split = (figures[k]["generated_tokens_per_s"] for k in ("one_node_one_core", "two_nodes_one_core_each"))
        figures["two_links_ms_per_token"] = round(1e3 / split - 1e3 / alone, 2)
        figures["ping_rtt_us"] = round(a.ask("ping", "beta")["rtt_us"])
        plan = a.ask("plan", "smollm2")["running"]
        figures["predicted_token_ms"] = round(plan["predicted_token_ms"], 2)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
