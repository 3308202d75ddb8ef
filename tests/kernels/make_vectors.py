"""Writes kernels_vectors.h: random blocks of every quantised type and what the Python package `gguf`
dequantises them to. Usage: pip install gguf; python make_vectors.py > kernels_vectors.h"""
import numpy as np
from gguf import GGMLQuantizationType as T
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

SCALES = {T.Q4_1: [0, 2], T.Q5_1: [0, 2], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q2_K: [80, 82],
          T.Q3_K: [108], T.Q6_K: [208]}
TYPES = [T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_NL, T.MXFP4]

rng = np.random.default_rng(1)
print("/* Made by tests/kernels/make_vectors.py with the Python package gguf: do not edit. */")
print("/* clang-format off */")
for t in TYPES:
    elements, size = GGML_QUANT_SIZES[t]
    n = 256 // elements
    blocks = rng.integers(0, 256, (n, size), dtype=np.uint8)
    if t == T.MXFP4:
        blocks[:, 0] = rng.integers(0, 140, n)
        blocks[0, 0], blocks[1, 0] = 0, 1
    else:
        for at in SCALES.get(t, [0]):
            scale = (rng.standard_normal(n) * 0.01).astype(np.float16)
            blocks[:, at:at + 2] = scale.view(np.uint8).reshape(n, 2)
    values = dequantize(blocks.reshape(1, -1), t).astype(np.float32).reshape(-1)
    for name, type_, data, width in [("bytes", "uint8_t", blocks.reshape(-1), 24),
                                     ("floats", "uint32_t", values.view(np.uint32), 10)]:
        print(f"static const {type_} {t.name.lower()}_{name}[{len(data)}] = {{")
        for i in range(0, len(data), width):
            print("    " + ", ".join(f"0x{v:x}" for v in data[i:i + width]) + ",")
        print("};")
