"""What the tests of hostile input share: attackers that are bounded in count and time, and the check that an agent
serves on and that its memory and descriptors return to where they were."""

import contextlib
import random
import socket
import time

from lab import wait_for

MARGIN_KIB = 12 * 1024  # caches of the allocator and of buffers that stay


def connect(port, host="127.0.0.1", timeout_s=5):
    s = socket.create_connection((host, port), timeout=timeout_s)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return s


def read_all(s, timeout_s=10, limit=1 << 22):
    """Everything until the other side closes; b"…" so far after the timeout or a reset."""
    s.settimeout(timeout_s)
    got = b""
    with contextlib.suppress(OSError):
        while len(got) < limit:
            piece = s.recv(65536)
            if not piece:
                break
            got += piece
    return got


def closes(s, within_s):
    """True when the other side closes the connection in time; whatever it says is dropped."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        s.settimeout(max(0.01, end - time.monotonic()))
        try:
            if not s.recv(65536):
                return True
        except ConnectionError:
            return True
        except OSError:
            return False
    return False


def send_quietly(s, data):
    with contextlib.suppress(OSError):
        s.sendall(data)


class Crowd:
    """Many connections at once; all are closed at the end."""

    def __init__(self):
        self.sockets = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for s in self.sockets:
            s.close()

    def add(self, port, n, first=b"", patience=3):
        for _ in range(n):
            for attempt in range(patience):
                try:
                    s = connect(port)
                    break
                except OSError:
                    if attempt + 1 == patience:
                        raise
            self.sockets.append(s)
            send_quietly(s, first)


class Unharmed:
    """with Unharmed(test, agent): … attack …   Afterwards the agent runs, answers, and holds no more than before."""

    def __init__(self, test, agent, margin_kib=MARGIN_KIB, deadline_s=20):
        self.test, self.agent, self.margin_kib, self.deadline_s = test, agent, margin_kib, deadline_s

    def __enter__(self):
        self.agent.status()
        self.pid = self.agent.pid
        self.n_fds, self.kib = self.agent.n_descriptors(), self.agent.resident_kib()

    def __exit__(self, kind, *_):
        self.test.assertTrue(self.agent.is_running(), f"the agent died\n{self.agent.log_tail()}")
        if kind is not None:
            return
        self.agent.status()
        wait_for(lambda: self.agent.n_descriptors() <= self.n_fds + 2, self.deadline_s,
                 lambda: f"descriptors: {self.n_fds} before, {self.agent.n_descriptors()} after")
        wait_for(lambda: self.agent.resident_kib() <= self.kib + self.margin_kib, self.deadline_s,
                 lambda: f"memory: {self.kib} KiB before, {self.agent.resident_kib()} after")


def noise(seed):
    return random.Random(seed)
