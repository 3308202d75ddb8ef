"""A hostile host: sends mDNS answers from 5353 as fast as it is asked to. One line of standard input each:

flood N       N instances of our service with SRV, TXT and A
goodbye N     takes them back
rubbish N     N packets of random bytes, half of them behind a valid header
steal NAME    claims that the instance NAME is its own"""

import random
import socket
import struct
import sys

GROUP = ("224.0.0.251", 5353)
IN, FLUSH = 1, 0x8001


def name(*labels):
    return b"".join(bytes([len(x)]) + x.encode() for x in labels) + b"\0"


def record(owner, kind, data, ttl, cls=IN):
    return owner + struct.pack(">HHIH", kind, cls, ttl, len(data)) + data


def txt(*strings):
    return b"".join(bytes([len(s)]) + s.encode() for s in strings)


def answer(*records):
    return struct.pack(">HHHHHH", 0, 0x8400, 0, len(records), 0, 0) + b"".join(records)


def service(instance, port, ttl, target="evil"):
    kind, full, host = ("_covey", "_tcp", "local"), name(instance, "_covey", "_tcp", "local"), name(target, "local")
    return answer(record(name(*kind), 12, full, ttl),
                  record(full, 33, struct.pack(">HHH", 0, 0, port) + host, ttl, FLUSH),
                  record(full, 16, txt("v=1", "n=" + instance, "t=" + "ab" * 24), ttl, FLUSH),
                  record(host, 1, socket.inet_aton("10.77.0.200"), ttl, FLUSH))


def main():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    s.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
    s.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(sys.argv[1]))
    s.bind(("", 5353))
    seeded = random.Random(1)
    for line in sys.stdin:
        what, value = line.split()
        if what == "steal":
            s.sendto(service(value, 9, 120), GROUP)
        elif what == "rubbish":
            for i in range(int(value)):
                body = seeded.randbytes(seeded.randrange(1, 500))
                head = struct.pack(">HHHHHH", 0, 0x8400, seeded.randrange(3), seeded.randrange(9), 0, 1)
                s.sendto(body if i % 2 else head + body, GROUP)
        else:
            for i in range(int(value)):
                s.sendto(service(f"flood-{i}", 1 + i % 60000, 4500 if what == "flood" else 0), GROUP)
        print("done", flush=True)


main()
