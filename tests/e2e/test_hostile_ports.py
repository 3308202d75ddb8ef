"""Hostile input on the control and data ports: strangers, thieves of tokens, replays. The agent serves on, a real
node can still join, and memory and descriptors return to where they were."""

import contextlib
import os
import select
import socket
import struct
import threading
import time
import unittest

from hostile import Crowd, Unharmed, closes, connect, noise, read_all, send_quietly
from lab import Lab, TINY, wait_for

FIRST_BYTES = 56  # proto/session.h: what a stranger may say
DENIED_S = 8      # a stranger is out by then (3 s, on a busy machine)


class Recorder:
    """A TCP proxy on loopback that keeps what went through: [(to_server, to_client)] for each connection."""

    def __init__(self, to_port):
        self.to_port, self.recorded = to_port, []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self._accept, daemon=True)
        self.thread.start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client):
        record = [bytearray(), bytearray()]
        self.recorded.append(record)
        with contextlib.suppress(OSError), client, connect(self.to_port) as server:
            while True:
                for s in select.select([client, server], [], [])[0]:
                    piece = s.recv(65536)
                    if not piece:
                        return
                    record[0 if s is client else 1].extend(piece)
                    (server if s is client else client).sendall(piece)

    def close(self):
        self.listener.close()


class HostilePorts(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.lab = Lab()
        cls.addClassCleanup(cls.lab.close)
        cls.agent = cls.lab.agent("n0")
        cls.friend = cls.lab.agent("n1")
        cls.agent.ok("pull", TINY, "--name", "tiny")
        cls.recorder = Recorder(cls.agent.control_port)
        cls.addClassCleanup(cls.recorder.close)
        token = cls.agent.ask("invite")["token"]
        cls.friend.ok("join", token, "--peer", f"127.0.0.1:{cls.recorder.port}")
        cls.used_token = token
        wait_for(lambda: cls.agent.members_alive() == ["n0", "n1"], 20, "paired")
        cls.agent.ok("load", "tiny", "--context", "2048")
        cls.ports = (cls.agent.control_port, cls.agent.data_port)
        with Crowd() as crowd:  # what stays allocated after a first crowd
            for port in cls.ports:
                crowd.add(port, 100, b"x")

    def check_serves(self):
        self.assertEqual(self.agent.chat(max_tokens=2)[0], 200)
        wait_for(lambda: self.agent.members_alive() == ["n0", "n1"], 15, "the friend is still a member and alive")

    def unharmed(self):
        return Unharmed(self, self.agent)

    def check_stranger(self, port, data, may_answer=False):
        """What a stranger sends gets no answer and a closed connection."""
        with connect(port) as s:
            send_quietly(s, data)
            began = time.monotonic()
            answer = read_all(s, DENIED_S)
            self.assertLess(time.monotonic() - began, DENIED_S, f"port {port} keeps a stranger after {data[:40]!r}")
            if not may_answer:
                self.assertEqual(answer, b"")

    def test_random_bytes(self):
        rng = noise(3)
        with self.unharmed():
            for port in self.ports:
                for n in (FIRST_BYTES, FIRST_BYTES + 1, 128, 1000, 100000):
                    for _ in range(10):
                        self.check_stranger(port, rng.randbytes(n), may_answer=port == self.agent.data_port)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
                for i in range(3000):
                    s.sendto(rng.randbytes(rng.randrange(1, 1400)), ("127.0.0.1", self.agent.control_port))
                s.sendto(b"", ("127.0.0.1", self.agent.control_port))
            self.check_serves()

    def test_true_beginning_and_then_garbage(self):
        first = bytes(self.recorder.recorded[0][0][:FIRST_BYTES])
        rng = noise(4)
        with self.unharmed():
            for at in range(FIRST_BYTES):
                wrong = bytearray(first)
                wrong[at] ^= 1 << rng.randrange(8)
                self.check_stranger(self.agent.control_port, bytes(wrong))
            for at in (0, 1, 7, 8, 40, 55):  # half handshakes
                with connect(self.agent.control_port) as s:
                    send_quietly(s, first[:at])
                    self.assertTrue(closes(s, DENIED_S), f"half a handshake of {at} bytes is kept")
            self.check_serves()

    def test_gigabyte_length(self):
        with self.unharmed():
            for port in self.ports:
                for head in (struct.pack("<I", 1 << 30), struct.pack(">I", 1 << 30), struct.pack("<Q", 1 << 30)):
                    self.check_stranger(port, head * 40, may_answer=port == self.agent.data_port)
            self.check_serves()

    def test_thousands_of_idle_connections(self):
        with self.unharmed(), Crowd() as crowd:
            for port in self.ports:
                crowd.add(port, 2000)
                self.check_serves()
            # the oldest are out at once, the rest after their time
            self.assertLess(self.agent.n_descriptors(), 300)
            for s in crowd.sockets[:100] + crowd.sockets[-100:]:
                self.assertTrue(closes(s, DENIED_S))
        self.check_serves()

    def test_half_open_for_ever_and_a_real_node_joins(self):
        """65 strangers that begin a handshake, and begin again as soon as they are put out."""
        stop = threading.Event()
        first = bytes(self.recorder.recorded[0][0][:FIRST_BYTES - 1])

        def hold():
            while not stop.is_set():
                with contextlib.suppress(OSError), connect(self.agent.control_port) as s:
                    send_quietly(s, first)
                    while not stop.is_set() and not closes(s, 0.5):
                        pass
                stop.wait(0.05)

        late = self.lab.agent("late")
        with self.unharmed():
            threads = [threading.Thread(target=hold, daemon=True) for _ in range(65)]
            for t in threads:
                t.start()
            try:
                late.ok("join", self.agent.ask("invite")["token"], "--peer", f"127.0.0.1:{self.agent.control_port}")
                wait_for(lambda: "late" in self.agent.members_alive(), 20, "the real node is alive")
            finally:
                stop.set()
                for t in threads:
                    t.join(20)
            late.ok("leave")
            late.terminate()
            self.check_gone("late")
        self.check_serves()

    def check_gone(self, name):
        wait_for(lambda: name not in self.agent.members_alive(), 20, f"{name} has left")

    def test_replayed_handshake_and_session(self):
        recorded = [bytes(r[0]) for r in self.recorder.recorded if len(r[0]) > FIRST_BYTES]
        self.assertTrue(recorded, "a real session went through the recorder")
        nodes_before = sorted((n["name"], n["state"]) for n in self.agent.nodes())
        with self.unharmed():
            for data in recorded:
                for _ in range(20):
                    with connect(self.agent.control_port) as s:
                        send_quietly(s, data[:FIRST_BYTES])
                        # The first message is a valid one where its secret still is: an answer of one fixed size
                        # may come, but nothing that a thief can go on with.
                        s.settimeout(DENIED_S)
                        with contextlib.suppress(OSError):
                            s.recv(4096)
                        send_quietly(s, data[FIRST_BYTES:])
                        self.assertTrue(closes(s, DENIED_S))
                    with connect(self.agent.control_port) as s:
                        send_quietly(s, data)
                        self.assertTrue(closes(s, DENIED_S))
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
                for data in recorded:
                    s.sendto(data[:1200], ("127.0.0.1", self.agent.control_port))
            self.assertEqual(sorted((n["name"], n["state"]) for n in self.agent.nodes()), nodes_before)
            self.check_serves()

    def test_wrong_secret(self):
        """A whole agent of another cluster dials with its own secret: it stays a stranger."""
        other = self.lab.agent("other", options=["--peer", f"127.0.0.1:{self.agent.control_port}"])
        with self.unharmed():
            for _ in range(3):
                self.check_serves()
            # It has dialled, for its own log or nodes say so, and is nobody's member.
            self.assertEqual(self.agent.members_alive(), ["n0", "n1"])
            self.assertEqual(other.members_alive(), ["other"])
            foreign = other.ask("invite")["token"]
            thief = self.lab.agent("thief")
            self.check_not_accepted(thief, foreign, f"127.0.0.1:{self.agent.control_port}")
            thief.terminate()
            other.terminate()
        self.check_serves()

    def check_not_accepted(self, agent, token, where):
        """Says soon (not after the 20 s of a host that is not there) that the token is no good, and what to do."""
        r = agent.call("join", token, "--peer", where, timeout_s=15)
        self.assertEqual(r.code, 5, r)
        self.assertIn("token", r.err)
        self.assertIn("covey invite", r.err)

    def test_reused_and_expired_tokens(self):
        late = self.lab.agent("late2")
        where = f"127.0.0.1:{self.agent.control_port}"
        with self.unharmed():
            self.check_not_accepted(late, self.used_token, where)
            short = self.agent.ask("invite", "--ttl", "1")
            wait_for(lambda: time.time() > short["expires_at"] + 1, 10, "it has expired")
            self.check_not_accepted(late, short["token"], where)
            wrong = self.agent.ask("invite")["token"]
            wrong = wrong[:5] + ("0" if wrong[5] != "0" else "1") + wrong[6:]
            self.check_not_accepted(late, wrong, where)
            self.assertEqual(late.members_alive(), ["late2"])
            late.terminate()
        self.check_serves()


if __name__ == "__main__":
    unittest.main()
