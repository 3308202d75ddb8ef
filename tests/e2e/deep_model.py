"""A model that takes its time: the layers of tests/reference/tiny_split.gguf, repeated.

The tiny model answers faster than anything can be killed in the middle of. This writes a GGUF file with the same
metadata and tensors, each block `times` times, so that a token takes milliseconds and a stage some megabytes.
"""

import struct

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY, UINT32 = 8, 9, 4


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def number(self, form):
        v, = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return v

    def string(self):
        n = self.number("Q")
        self.at += n
        return self.data[self.at - n:self.at]

    def skip(self, kind):
        if kind == STRING:
            self.string()
        elif kind == ARRAY:
            inner, n = self.number("I"), self.number("Q")
            for _ in range(n):
                self.skip(inner)
        else:
            self.at += SIZES[kind]


def align(n, to=32):
    return (n + to - 1) // to * to


def layer_of(entry):
    part = entry[0].split(b".")
    return int(part[1]) if part[0] == b"blk" else -1


def write(source, target, times, in_order=False):
    """in_order: the layers one after another, as in real files, so that halves lie in different bytes."""
    with open(source, "rb") as f:
        data = bytearray(f.read())
    r = Reader(data)
    assert r.number("4s") == b"GGUF" and r.number("I") == 3
    n_tensors, n_keys = r.number("Q"), r.number("Q")
    keys_at = r.at
    layers = 0
    for _ in range(n_keys):
        name, kind = r.string(), r.number("I")
        assert name != b"general.alignment"
        if name == b"llama.block_count":
            assert kind == UINT32
            layers, = struct.unpack_from("<I", data, r.at)
            struct.pack_into("<I", data, r.at, layers * times)
        r.skip(kind)
    keys = bytes(data[keys_at:r.at])
    tensors = []
    for _ in range(n_tensors):
        name, n_dims = r.string().decode(), r.number("I")
        dims = struct.pack(f"<{n_dims}Q", *(r.number("Q") for _ in range(n_dims)))
        tensors.append((name, n_dims, dims, r.number("I"), r.number("Q")))
    base = align(r.at)
    ends = sorted(t[4] for t in tensors) + [len(data) - base]
    out = []
    for name, n_dims, dims, kind, offset in tensors:
        content = bytes(data[base + offset:base + min(e for e in ends if e > offset)])
        part = name.split(".")
        for k in range(times if part[0] == "blk" else 1):
            new = ".".join(["blk", str(int(part[1]) + k * layers), *part[2:]]) if part[0] == "blk" else name
            out.append((new.encode(), n_dims, dims, kind, content))
    if in_order:
        out.sort(key=layer_of)
    infos, offset = b"", 0
    for name, n_dims, dims, kind, content in out:
        infos += struct.pack("<Q", len(name)) + name + struct.pack("<I", n_dims) + dims + struct.pack("<IQ", kind, offset)
        offset += align(len(content))
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(out), n_keys) + keys + infos
    with open(target, "wb") as f:
        f.write(head.ljust(align(len(head)), b"\0"))
        for *_, content in out:
            f.write(content.ljust(align(len(content)), b"\0"))
    return layers * times
