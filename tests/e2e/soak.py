"""Thousands of requests of mixed lengths at one agent, many at once, some dropped in the middle, with a KV cache that
holds few of them: every answer that ends is the one that the same request gives alone, nothing stays behind, and memory
is flat. Not part of the suites: best with an agent built with sanitizers.

    COVEY_BINARY=build/asan/agent/covey python3 tests/e2e/soak.py [REQUESTS [CLIENTS]]
"""

import random
import sys
import threading

from lab import Lab, TINY, wait_for

WORDS = "sea sky ship sail wind wave sand salt rope mast crew hull tide foam gull reef".split()
KINDS = 60


def request(kind):
    """Request number `kind`: some begin alike, lengths differ, half have a temperature."""
    r = random.Random(kind)
    shared = random.Random(kind % 4)
    prompt = " ".join(shared.choice(WORDS) for _ in range(shared.randrange(1, 60)))
    prompt += " " + " ".join(r.choice(WORDS) for _ in range(r.randrange(1, 60)))
    return dict(prompt=prompt, max_tokens=r.choice([r.randrange(1, 60), r.randrange(200, 500)]), temperature=r.choice([0, 0.9]), seed=kind,
                ignore_eos=True)


def stream(agent, kind):
    fields = request(kind)
    return agent.stream(fields.pop("prompt"), **fields)


def client(agent, number, left, alone, problems):
    r = random.Random(1000 + number)
    while not problems:
        with left[0]:
            if left[1] == 0:
                return
            left[1] -= 1
        kind = r.randrange(KINDS)
        s = stream(agent, kind)
        if r.random() < 0.2:
            wait_for(lambda: len(s.ids) >= 1 or s.closed_at, 120, "a token")
            s.drop()
            continue
        s.thread.join(240)
        if s.error is not None and s.error.get("code") == "busy":
            continue
        if s.end is None or s.ids != alone[kind]:
            problems.append((kind, s.error, len(s.ids), s.thread.is_alive()))


def main():
    n_requests = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    n_clients = int(sys.argv[2]) if len(sys.argv) > 2 else 12
    with Lab() as lab:
        # 16,909,760 bytes would be eight contexts of 1,024 (tests/e2e/test_batch.py): this is two and a half
        agent = lab.agent("soak", memory_limit="14500000B", context=1024, threads=2)
        agent.ok("pull", TINY, "--name", "tiny")
        agent.ok("load", "tiny", "--context", "1024")
        print(f"KV cache of {agent.model()['kv_positions']} positions", flush=True)
        alone = {k: stream(agent, k).finish(120).ids for k in range(KINDS)}
        left, problems, sizes = [threading.Lock(), n_requests], [], []
        clients = [threading.Thread(target=client, args=(agent, i, left, alone, problems)) for i in range(n_clients)]
        for t in clients:
            t.start()
        while any(t.is_alive() for t in clients):
            for t in clients:
                t.join(0.5)
            sizes.append((left[1], agent.resident_kib()))
            if len(sizes) % 5 == 0:
                print(f"{sizes[-1][0]} requests to come, {sizes[-1][1]} KiB resident", flush=True)
        assert not problems, problems
        kv = wait_for(lambda: (s := agent.status())["requests"] == [] and s["kv_cache"]["running"] == 0 and
                      s["kv_cache"], 30, lambda: f"nothing stays behind: {agent.status()['requests']}")
        middle = [size for to_come, size in sizes if to_come < n_requests * 2 // 3]
        print(f"{n_requests} requests, {kv}; resident {middle[0]} KiB after a third, {sizes[-1][1]} KiB at the end")
        assert sizes[-1][1] < middle[0] * 1.1 + 4096, sizes
        assert agent.terminate(60) == 0, agent.log_tail()
        assert "Sanitizer" not in agent.log_tail(1 << 20), agent.log_tail()


main()
