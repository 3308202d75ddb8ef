#!/usr/bin/env python3
"""Writes a GGUF file of the shape of TinyLlama 1.1B with random weights, for measuring speed only.

usage: make_shapes.py TYPE OUT.gguf [--layers N]        TYPE: F16, Q8_0, Q6_K, Q4_0, Q4_1 or Q4_K

All matrices have the type (vectors are F32). Needs the Python packages gguf and numpy. The vocabulary is "no_vocab":
engines compute the file, nobody can talk to it.
"""
import argparse

import gguf
import numpy as np

EMBD, FF, HEADS, KV_HEADS, VOCAB, LAYERS = 2048, 5632, 32, 4, 32000, 22
KV = EMBD // HEADS * KV_HEADS
MATRICES = {"attn_q": (EMBD, EMBD), "attn_k": (KV, EMBD), "attn_v": (KV, EMBD), "attn_output": (EMBD, EMBD),
            "ffn_gate": (FF, EMBD), "ffn_up": (FF, EMBD), "ffn_down": (EMBD, FF)}

# Bytes of a block, and where in it the F16 scales (d, then dmin or m) lie.
BLOCKS = {"Q4_0": (18, [(0, 0.004)]), "Q4_1": (20, [(0, 0.004), (2, -0.03)]), "Q8_0": (34, [(0, 0.0003)]),
          "Q4_K": (144, [(0, 0.0002), (2, 0.0008)]), "Q6_K": (210, [(208, 0.00002)])}
ELEMENTS = {"Q4_0": 32, "Q4_1": 32, "Q8_0": 32, "Q4_K": 256, "Q6_K": 256}


def matrix(rng, kind, n_out, n_in):
    if kind == "F16":
        return (rng.standard_normal((n_out, n_in), dtype=np.float32) * 0.02).astype(np.float16)
    size, scales = BLOCKS[kind]
    blocks = n_in // ELEMENTS[kind]
    raw = rng.integers(0, 256, size=(n_out, blocks, size), dtype=np.uint8)
    for at, scale in scales:
        d = (rng.uniform(0.5, 1.5, size=(n_out, blocks, 1)) * scale).astype(np.float16)
        raw[:, :, at:at + 2] = d.view(np.uint8)
    return raw.reshape(n_out, blocks * size)


def main():
    a = argparse.ArgumentParser()
    a.add_argument("type", choices=["F16", *BLOCKS])
    a.add_argument("out")
    a.add_argument("--layers", type=int, default=LAYERS)
    a = a.parse_args()
    rng = np.random.default_rng(1)
    w = gguf.GGUFWriter(a.out, "llama")
    w.add_name(f"random-1.1b-{a.type.lower()}")
    w.add_context_length(4096)
    w.add_embedding_length(EMBD)
    w.add_block_count(a.layers)
    w.add_feed_forward_length(FF)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_rope_dimension_count(EMBD // HEADS)
    w.add_rope_freq_base(10000.0)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(VOCAB)
    w.add_tokenizer_model("no_vocab")
    raw = None if a.type == "F16" else gguf.GGMLQuantizationType[a.type]

    def add(name, n_out, n_in, data=None):
        w.add_tensor(name, matrix(rng, a.type, n_out, n_in) if data is None else data, raw_dtype=raw)

    ones = np.ones(EMBD, dtype=np.float32)
    add("token_embd.weight", VOCAB, EMBD)
    layer = {name: matrix(rng, a.type, *shape) for name, shape in MATRICES.items()}
    for i in range(a.layers):  # the same numbers in each: engines cannot know
        w.add_tensor(f"blk.{i}.attn_norm.weight", ones)
        w.add_tensor(f"blk.{i}.ffn_norm.weight", ones)
        for name, data in layer.items():
            add(f"blk.{i}.{name}.weight", *MATRICES[name], data)
    w.add_tensor("output_norm.weight", ones)
    add("output.weight", VOCAB, EMBD)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    main()
