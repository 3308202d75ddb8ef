"""Hostile HTTP: whatever comes in, each request is answered with OpenAI's error shape or the connection ends, and
the agent serves on with the memory and the descriptors that it had."""

import contextlib
import gzip
import json
import socket
import threading
import time
import unittest

from hostile import Crowd, Unharmed, connect, noise, read_all, send_quietly
from lab import Lab, TINY, wait_for

GOOD = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


class HostileHttp(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.lab = Lab()
        cls.addClassCleanup(cls.lab.close)
        cls.agent = cls.lab.agent("n0")
        cls.agent.ok("pull", TINY, "--name", "tiny")
        cls.agent.ok("load", "tiny", "--context", "2048")
        cls.warm_up()

    @classmethod
    def warm_up(cls):
        """One round of all that allocates for good: threads' arenas, buffers."""
        for _ in range(3):
            cls.agent.chat()
        with Crowd() as crowd:
            crowd.add(cls.agent.http_port, 200, b"GET / HTTP/1.1\r\n")
        cls.agent.http("POST", "/v1/chat/completions", b"[" * (4 << 20))

    def setUp(self):
        self.unharmed = Unharmed(self, self.agent)

    def check_serves(self):
        status, body = self.agent.chat(max_tokens=2)
        self.assertEqual(status, 200, body)

    def raw(self, data, timeout_s=10, half_close=True):
        """What comes back for these bytes on one connection, until the agent closes it."""
        with connect(self.agent.http_port) as s:
            send_quietly(s, data)
            if half_close:
                with contextlib.suppress(OSError):
                    s.shutdown(socket.SHUT_WR)
            return read_all(s, timeout_s)

    def check_refused(self, body, statuses=(400,), headers=None):
        status, _, answer = self.agent.http("POST", "/v1/chat/completions", body, headers)
        self.assertIn(status, statuses, (body[:200] if isinstance(body, bytes) else body, answer[:500]))
        error = json.loads(answer)["error"]
        self.assertTrue(error["message"])
        self.assertIn("type", error)
        self.assertIn("param", error)
        self.assertIn("code", error)
        return error

    # ---- headers ----

    def test_compressed_bodies(self):
        with self.unharmed:
            body = gzip.compress(json.dumps(GOOD).encode())
            error = self.check_refused(body, (415,), {"Content-Encoding": "gzip"})
            self.assertIn("compressed", error["message"])
            status, _, _ = self.agent.http("POST", "/v1/chat/completions", GOOD, {"Content-Encoding": "identity"})
            self.assertEqual(status, 200)

    def test_pages_of_this_machine_may_read_answers(self):
        """The preflight of the Fetch standard, for an allowed Origin and for a stranger's."""
        ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
        with self.unharmed:
            mine, other = "http://localhost:3000", "http://evil.example"
            status, headers, body = self.agent.http("OPTIONS", "/v1/chat/completions", None, dict(ask, Origin=mine))
            self.assertEqual((status, body), (204, b""))
            self.assertEqual(headers["Access-Control-Allow-Origin"], mine)
            self.assertIn("POST", headers["Access-Control-Allow-Methods"])
            for name in ("authorization", "content-type"):
                self.assertIn(name, headers["Access-Control-Allow-Headers"].lower())
            for fields in (GOOD, dict(GOOD, stream=True)):
                status, headers, _ = self.agent.http("POST", "/v1/chat/completions", fields, {"Origin": mine})
                self.assertEqual((status, headers["Access-Control-Allow-Origin"]), (200, mine))
            for method in ("OPTIONS", "POST"):
                status, headers, _ = self.agent.http(method, "/v1/chat/completions", None, dict(ask, Origin=other))
                self.assertEqual(status, 403)
                self.assertNotIn("Access-Control-Allow-Origin", headers)

    # ---- bodies ----

    def test_bodies_that_are_not_json(self):
        with self.unharmed:
            for body in (b"", b"{", b"nonsense", b"[]", b"\"x\"", b"null", b"1e999", b"{\"model\":}", b"\0" * 100,
                         b"{\"model\":\"tiny\",\"model\":\"tiny\"}", b"\xef\xbb\xbf{}", b"{}" * 2, b"{\"a\":01}",
                         b"{\"model\":\"ti\0ny\"}", b"{\"model\": NaN}"):
                self.check_refused(body)
            self.check_serves()

    def test_bad_utf8(self):
        with self.unharmed:
            for bad in (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\\ud800", b"\\udc00x"):
                self.check_refused(b'{"model":"tiny","messages":[{"role":"user","content":"' + bad + b'"}]}')
            self.check_serves()

    def test_deep_and_large_json(self):
        with self.unharmed:
            for n in (65, 1000, 100000):
                self.check_refused(b"[" * n)
                self.check_refused(b'{"a":' * n)
                self.check_refused(b'{"a":' * n + b"1" + b"}" * n)
                self.check_refused(b'{"messages":' + b"[" * n + b"]" * n + b"}")
            self.check_refused(b'{"model":"tiny","x":"' + b"a" * (15 << 20) + b'"}')
            self.check_refused(b'{"model":"tiny","messages":[' + b'{"role":"user","content":"x"},' * 200000 +
                               b'{"role":"user","content":"x"}]}')
            self.check_refused(b" " * (17 << 20), statuses=(413,))
            self.check_serves()

    def test_wrong_types_for_every_field(self):
        wrong = [True, 1, -1, 1.5, 1e300, "x", "", [], {}, [[]], [None], {"a": 1}, [1, 2]]
        fine = {"stream": [True], "logprobs": [True], "seed": [1, -1], "stop": ["x", []], "temperature": [1, 1.5],
                "top_p": [1], "min_p": [1], "frequency_penalty": [1, -1, 1.5], "presence_penalty": [1, -1, 1.5],
                "repetition_penalty": [1, 1.5], "top_k": [1], "max_tokens": [1], "max_completion_tokens": [1],
                "n": [1], "logit_bias": [{}], "tools": [[]], "functions": [[]], "parallel_tool_calls": [True],
                "stream_options": [{}, {"a": 1}]}
        anything = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
        fields = ["model", "messages", "stream", "stream_options", "temperature", "top_p", "min_p", "top_k",
                  "frequency_penalty", "presence_penalty", "repetition_penalty", "seed", "stop", "logprobs",
                  "top_logprobs", "max_tokens", "max_completion_tokens", "n", "logit_bias", "tools", "functions",
                  "tool_choice", "function_call", "parallel_tool_calls", "response_format", "modalities", "prompt",
                  "raw", "ignore_eos", "deadline_ms", "no_such_field"]
        with self.unharmed:
            for field in fields:
                for value in wrong:
                    if any(value == v and type(value) is type(v) for v in fine.get(field, [])):
                        continue
                    statuses = (400, 404) if field == "model" else (400,)
                    with self.subTest(field=field, value=value):
                        self.check_refused(dict(GOOD, **{field: value}), statuses)
            for field in anything:
                self.assertEqual(self.agent.http("POST", "/v1/chat/completions", dict(GOOD, **{field: "x"}))[0], 200)
            self.check_serves()

    def test_wrong_messages(self):
        with self.unharmed:
            for m in (None, 1, "x", [], {}, {"role": "user"}, {"content": "x"}, {"role": 1, "content": "x"},
                      {"role": "user", "content": 1}, {"role": "user", "content": {}},
                      {"role": "user", "content": [1]}, {"role": "user", "content": [{"type": "image_url"}]},
                      {"role": "user", "content": [{"type": "text"}]}, {"role": "user", "content": [{"type": 1, "text": 2}]}):
                with self.subTest(message=m):
                    self.check_refused(dict(GOOD, messages=[m]))
            self.check_refused(dict(GOOD, stop=["x"] * 1000))
            self.check_refused(dict(GOOD, stop="x" * 100000))
            self.check_refused(dict(GOOD, model="x" * 100000), (400, 404))
            self.check_serves()

    def test_fields_at_their_limits(self):
        with self.unharmed:
            for more in ({"temperature": 2}, {"temperature": 0, "top_p": 0}, {"seed": 2 ** 63 - 1}, {"seed": -2 ** 63},
                         {"max_tokens": 1}, {"stop": ["a", "b", "c", "d"]}, {"logprobs": True, "top_logprobs": 20},
                         {"max_tokens": 1 << 20, "max_completion_tokens": 1}):
                status, _, body = self.agent.http("POST", "/v1/chat/completions", dict(GOOD, **more))
                self.assertEqual(status, 200, (more, body))
            for more in ({"temperature": 2.01}, {"top_p": 1.01}, {"seed": 2 ** 63}, {"top_logprobs": 21, "logprobs": True},
                         {"max_tokens": -1}, {"max_tokens": 2 ** 40}, {"top_logprobs": 1}, {"min_p": -0.1}):
                self.check_refused(dict(GOOD, **more))

    # ---- HTTP itself ----

    def test_garbage(self):
        rng = noise(1)
        with self.unharmed:
            for n in list(range(1, 40)) + [100, 1000, 40000]:
                answer = self.raw(rng.randbytes(n), 5)
                self.assertTrue(answer == b"" or answer.startswith(b"HTTP/1."), answer[:100])
            for line in (b"\r\n\r\n", b"GET", b"GET /\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"G\0T / HTTP/1.1\r\n\r\n",
                         b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
                         b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
                         b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
                         b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1073741824\r\n\r\n",
                         b"GET /%00%ff%zz/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
                         b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n"):
                answer = self.raw(line, 5)
                self.assertTrue(answer == b"" or answer.startswith(b"HTTP/1."), answer[:100])
                self.assertFalse(answer.startswith(b"HTTP/1.1 200"), (line, answer[:200]))
            self.check_serves()

    def test_huge_headers(self):
        with self.unharmed:
            for head in (b"X: " + b"a" * 100000, b"".join(b"X%d: y\r\n" % i for i in range(20000)),
                         b"Host: " + b"a" * 60000, b"Authorization: Bearer " + b"k" * 60000):
                answer = self.raw(b"GET /v1/models HTTP/1.1\r\n" + head + b"\r\n\r\n")
                self.assertFalse(answer.startswith(b"HTTP/1.1 200"), answer[:100])
            answer = self.raw(b"GET /" + b"a" * 100000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            self.assertFalse(answer.startswith(b"HTTP/1.1 200"), answer[:100])
            self.check_serves()

    def test_pipelining_and_chunks(self):
        body = json.dumps(GOOD).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        with self.unharmed:
            answer = self.raw((head + b"Content-Length: %d\r\n\r\n" % len(body) + body) * 3 +
                              b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 30, half_close=False)
            self.assertEqual(answer.count(b"HTTP/1.1 200"), 4, answer[:2000])
            chunks = b"".join(b"%x\r\n%c\r\n" % (1, c) for c in body)
            chunked = head + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
            self.assertTrue(self.raw(chunked + chunks + b"0\r\n\r\n", half_close=False).startswith(b"HTTP/1.1 200"))
            for bad in (b"zz\r\n", b"-1\r\nx\r\n", b"ffffffffffffffffff\r\n", b"5\r\nabc", b"40000000\r\nabc",
                        b"1;" + b"e" * 50000 + b"\r\nx\r\n"):
                self.assertFalse(self.raw(chunked + bad, 5).startswith(b"HTTP/1.1 200"), bad[:40])
            self.check_serves()

    def test_methods_and_paths(self):
        with self.unharmed:
            for method in ("GET", "PUT", "DELETE", "OPTIONS", "PATCH", "X" * 7):
                self.assertIn(self.agent.http(method, "/v1/chat/completions")[0], (400, 405, 501), method)
            for path in ("/", "/v1", "/v1/models/none", "/v1/" + "x" * 3000, "/covey/status", "/covey/stop", "/covey/add"):
                self.assertIn(self.agent.http("GET", path)[0], (404, 414), path)
                self.assertIn(self.agent.http("POST", path, b"{}")[0], (404, 405, 414), path)
            status, _, body = self.agent.http("HEAD", "/v1/models")
            self.assertEqual((status, body), (200, b""))
            self.check_serves()

    def test_host_and_origin(self):
        port = self.agent.http_port
        with self.unharmed:
            for host in ("evil.example", "evil.example:%d" % port, "127.0.0.1.evil.example", "localhost.evil.example",
                         "10.0.0.1", "[::1", "", "127.evil.example"):
                self.assertEqual(self.agent.http("GET", "/v1/models", headers={"Host": host})[0], 403, host)
            for host in ("localhost", "localhost:%d" % port, "127.0.0.1:%d" % port, "[::1]:%d" % port, "LOCALHOST"):
                self.assertEqual(self.agent.http("GET", "/v1/models", headers={"Host": host})[0], 200, host)
            for origin in ("http://evil.example", "https://127.0.0.1.evil.example", "null", "", "file://",
                           "http://127.evil.example"):
                self.assertEqual(self.agent.http("GET", "/v1/models", headers={"Origin": origin})[0], 403, origin)
            for origin in ("http://localhost:3000", "http://127.0.0.1"):
                self.assertEqual(self.agent.http("GET", "/v1/models", headers={"Origin": origin})[0], 200, origin)

    # ---- clients ----

    def test_slow_clients(self):
        """Some send a byte now and then, some never read their stream: others are served meanwhile."""
        body = json.dumps(dict(GOOD, stream=True, max_tokens=1500, logprobs=True, top_logprobs=20)).encode()
        request = (b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)) + body
        with self.unharmed, Crowd() as crowd:
            crowd.add(self.agent.http_port, 100, request[:20])
            deaf = 12
            for _ in range(deaf):
                s = socket.socket()
                s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                s.connect(("127.0.0.1", self.agent.http_port))
                crowd.sockets.append(s)
                send_quietly(s, request)
            for at in range(20, 60):
                for s in crowd.sockets[:100]:
                    send_quietly(s, request[at:at + 1])
                if at % 10 == 0:
                    self.check_serves()
            self.check_serves()
        wait_for(lambda: self.agent.status()["requests"] == [], 10, "the requests of the deaf have ended")

    def test_thousands_of_idle_connections(self):
        with self.unharmed, Crowd() as crowd:
            for first in (b"", b"GET / HTTP/1.1\r\nHost: loc"):
                crowd.add(self.agent.http_port, 1000, first)
                self.check_serves()
        self.check_serves()

    def test_clients_that_vanish(self):
        rng = noise(2)
        body = json.dumps(dict(GOOD, stream=True, max_tokens=500)).encode()
        request = (b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)) + body
        with self.unharmed:
            for i in range(150):
                with connect(self.agent.http_port) as s:
                    send_quietly(s, request[:rng.randrange(len(request) + 1)] if i % 2 else request)
                    if i % 4 == 0:
                        s.settimeout(5)
                        s.recv(rng.randrange(1, 400))
            wait_for(lambda: self.agent.status()["requests"] == [], 10, "no request is left")
            self.check_serves()

    def test_many_at_once(self):
        """More requests than can be served: each is answered, with 200 or with an error that says why."""
        results = []

        def ask():
            results.append(self.agent.chat(timeout_s=120, max_tokens=40)[0])

        with self.unharmed:
            threads = [threading.Thread(target=ask) for _ in range(80)]
            for t in threads:
                t.start()
            for t in threads:
                t.join(120)
            self.assertEqual(len(results), 80)
            self.assertTrue(set(results) <= {200, 429, 503}, results)
            self.assertGreaterEqual(results.count(200), 8)
            self.check_serves()


class Key(unittest.TestCase):
    def setUp(self):
        self.lab = Lab()
        self.addCleanup(self.lab.close)

    def test_beyond_loopback_only_with_a_key(self):
        open_one = self.lab.agent("open", options=["--http", "0.0.0.0:0"], start=False)
        r = open_one.call("serve", *open_one.options)
        self.assertNotEqual(r.code, 0)
        self.assertIn("api-key", r.err)
        keyed = self.lab.agent("keyed", options=["--http", "0.0.0.0:0", "--api-key", "s3cret-key"])
        with Unharmed(self, keyed):
            for header, status in ((None, 401), ("Bearer wrong", 401), ("Bearer s3cret-ke", 401), ("s3cret-key", 401),
                                   ("Basic s3cret-key", 401), ("Bearer s3cret-key", 200)):
                headers = {"Authorization": header} if header else {}
                got, _, body = keyed.http("GET", "/v1/models", headers=headers)
                self.assertEqual(got, status, header)
            self.assertEqual(keyed.http("GET", "/v1/models", headers={"Authorization": "Bearer s3cret-key",
                                                                      "Host": "evil.example"})[0], 403)


if __name__ == "__main__":
    unittest.main()
