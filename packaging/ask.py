"""Asks an OpenAI-style server one question, prints the answer as it comes, and how fast it came.

usage: ask.py URL MODEL QUESTION      only the standard library is needed
"""
import json
import sys
import time
import urllib.error
import urllib.request


def main():
    url, model, question = sys.argv[1:4]
    body = {"model": model, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0,
            "max_tokens": 100, "messages": [{"role": "user", "content": question}]}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    began = time.monotonic()
    first = last = None
    n_tokens, finish = 0, None
    try:
        # Nothing between this program and the agent: no proxy of the environment.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=120) as answer:
            for line in answer:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    sys.exit("\nThe answer ended early: " + event["error"].get("message", "?"))
                if event.get("usage"):
                    n_tokens = event["usage"]["completion_tokens"]
                for choice in event.get("choices", []):
                    text = choice["delta"].get("content")
                    finish = choice.get("finish_reason") or finish
                    if text:
                        last = time.monotonic()
                        first = first or last
                        sys.stdout.write(text)
                        sys.stdout.flush()
    except urllib.error.HTTPError as e:
        sys.exit("The agent refused: " + e.read().decode(errors="replace"))
    except OSError as e:
        sys.exit("The agent cannot be asked: %s" % e)
    if finish is None:
        sys.exit("\nThe answer ended early.")
    rate = (n_tokens - 1) / (last - first) if n_tokens > 1 and last > first else 0
    print("\n[%d tokens, the first after %.2f s, then %.1f tokens a second]" % (n_tokens, first - began, rate))


main()
