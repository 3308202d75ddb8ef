"""A running agent listens on its three ports and its local socket, and on nothing else; its children hold none of its
pipes and sockets.

usage: check_ports.py COVEY      Linux: reads /proc of the agent and of its children
"""
import os
import re
import subprocess
import sys
import tempfile
import time

MDNS_PORT = 5353  # of Avahi's core in its child process, shared with every other mDNS program


def listening(pid):
    """[(protocol, port)] of sockets of one process that wait for strangers."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue
        found = re.match(r"socket:\[(\d+)\]", target)
        if found:
            inodes.add(found.group(1))
    ports = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        with open(f"/proc/{pid}/net/{table}") as f:
            for line in f.readlines()[1:]:
                words = line.split()
                listens = words[3] == "0A" if table.startswith("tcp") else words[2].endswith(":0000")
                if words[9] in inodes and listens:
                    ports.append((table, int(words[1].split(":")[1], 16)))
    return ports


def shared(parent, child):
    """Pipes and sockets that a child holds of its parent's, but for its standard output and error: a copy of a pipe's
    end would keep it from ever ending. What it got on purpose is the other end of a pair, another inode."""
    def held(pid):
        found = {}
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                found[os.readlink(f"/proc/{pid}/fd/{fd}")] = int(fd)
            except OSError:
                continue
        return found
    own, its = held(parent), held(child)
    return [f"{name} (its descriptor {fd}, the agent's {own[name]})" for name, fd in its.items()
            if name in own and fd > 2 and name.split(":")[0] in ("pipe", "socket")]


def children(pid):
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as f:
                if int(f.read().rsplit(")", 1)[1].split()[1]) == pid:
                    found.append(int(entry))
        except (OSError, IndexError):
            continue
    return found


def main():
    with tempfile.TemporaryDirectory(prefix="covey-") as home:
        with open(os.path.join(home, "log"), "w") as log:
            agent = subprocess.Popen([sys.argv[1], "serve", "--http", "127.0.0.1:0", "--control-port", "0", "--data-port",
                                      "0"], env=dict(os.environ, COVEY_HOME=home), stdout=subprocess.PIPE, stderr=log,
                                     stdin=subprocess.DEVNULL, text=True)
        try:
            line = agent.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:(\d+), control port (\d+), data port (\d+)", line)
            assert found, f"the agent did not start: {line!r}"
            http, control, data = map(int, found.groups())
            until = time.monotonic() + 10
            while not children(agent.pid) and time.monotonic() < until:
                time.sleep(0.05)  # mDNS starts its child a moment after the ports are open
            allowed_tcp, allowed_udp = {http, control, data}, {control}
            seen, wrong = set(), []
            for table, port in listening(agent.pid):
                seen.add((table[:3], port))
                if port not in (allowed_tcp if table.startswith("tcp") else allowed_udp):
                    wrong.append(f"the agent listens on {table} port {port}")
            for child in children(agent.pid):
                wrong.extend(f"a child of the agent's holds its {what}" for what in shared(agent.pid, child))
                for table, port in listening(child):
                    if not (table.startswith("udp") and port == MDNS_PORT) and \
                            (table[:3], port) not in {("tcp", p) for p in allowed_tcp} | {("udp", control)}:
                        # Avahi's core also answers legacy unicast from one socket of its own for each family.
                        with open(f"/proc/{child}/cmdline") as f:
                            wrong.append(f"its child {f.read()!r} listens on {table} port {port}")
            for port in allowed_tcp:
                if ("tcp", port) not in seen:
                    wrong.append(f"nothing listens on TCP port {port}, which the agent names")
            if ("udp", control) not in seen:
                wrong.append(f"nothing listens on UDP port {control}, the control port")
            for w in wrong:
                print(w)
            print(f"ports of the agent: {sorted(seen)}")
            return 1 if wrong else 0
        finally:
            agent.terminate()
            try:
                agent.wait(15)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()


sys.exit(main())
