#!/usr/bin/env python3
"""Makes the small GGUF models of this folder and what a correct engine computes for them.

  make_models.py TINY_DIR        (TINY_DIR holds llama/, llama_rope3/, gemma3/ and qwen2/: config.json, model.safetensors,
                                  reference.json)
  make_models.py others TINY_DIR (gemma3 and qwen2 only)

  make_models.py corpus DIR      (small valid files for tests/fuzz/corpus/gguf)

The expected logits come from the plain F64 forward pass below, which is first held against the
logits of transformers (reference.json) for the F32 weights. Needs numpy and gguf (0.19).
"""
import json, os, struct, sys
import numpy as np
import gguf
from gguf import GGMLQuantizationType as T

HERE = os.path.dirname(os.path.abspath(__file__))


def load_safetensors(path):
    data = open(path, "rb").read()
    n = struct.unpack("<Q", data[:8])[0]
    head = json.loads(data[8:8 + n])
    head.pop("__metadata__", None)
    out = {}
    for name, t in head.items():
        assert t["dtype"] == "F32"
        a, b = t["data_offsets"]
        out[name] = np.frombuffer(data[8 + n + a:8 + n + b], np.float32).reshape(t["shape"])
    return out


def permute(w, n_heads):
    """Rows of a head from halves (transformers) to neighbouring pairs (the llama architecture of GGUF)."""
    return w.reshape(n_heads, 2, w.shape[0] // n_heads // 2, -1).swapaxes(1, 2).reshape(w.shape)


def rope3_factors(cfg, head_dim):
    r = cfg["rope_parameters"]
    if r["rope_type"] != "llama3":
        return None
    freqs = 1.0 / r["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    old, lo, hi, factor = r["original_max_position_embeddings"], r["low_freq_factor"], r["high_freq_factor"], r["factor"]
    out = []
    for f in freqs:
        wave = 2 * np.pi / f
        if wave < old / hi:
            out.append(1.0)
        elif wave > old / lo:
            out.append(factor)
        else:
            s = (old / wave - lo) / (hi - lo)
            out.append(1.0 / ((1 - s) / factor + s))
    return np.array(out, np.float32)


def from_transformers(folder):
    cfg = json.load(open(folder + "/config.json"))
    w = load_safetensors(folder + "/model.safetensors")
    h = dict(n_layers=cfg["num_hidden_layers"], n_embd=cfg["hidden_size"], n_ff=cfg["intermediate_size"], n_heads=cfg["num_attention_heads"],
             n_kv_heads=cfg["num_key_value_heads"], head_dim=cfg.get("head_dim") or cfg["hidden_size"] // cfg["num_attention_heads"],
             eps=cfg["rms_norm_eps"], base=cfg["rope_parameters"]["rope_theta"], context=cfg["max_position_embeddings"])
    t = {"token_embd.weight": w["model.embed_tokens.weight"], "output_norm.weight": w["model.norm.weight"]}
    if not cfg["tie_word_embeddings"]:
        t["output.weight"] = w["lm_head.weight"]
    f = rope3_factors(cfg, h["head_dim"])
    if f is not None:
        t["rope_freqs.weight"] = f
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
             "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    for i in range(h["n_layers"]):
        for ours, theirs in names.items():
            x = w[f"model.layers.{i}.{theirs}.weight"]
            if ours == "attn_q":
                x = permute(x, h["n_heads"])
            if ours == "attn_k":
                x = permute(x, h["n_kv_heads"])
            t[f"blk.{i}.{ours}.weight"] = x
    return h, t


def forward(h, t, ids):
    """Logits [len(ids), vocabulary] in F64."""
    W = lambda n: t[n].astype(np.float64)
    norm = lambda x, g: x / np.sqrt((x * x).mean(-1, keepdims=True) + h["eps"]) * g
    n, d, H, G = len(ids), h["head_dim"], h["n_heads"], h["n_kv_heads"]
    x = W("token_embd.weight")[ids]
    freq = h["base"] ** (-np.arange(0, d, 2) / d)
    if "rope_freqs.weight" in t:
        freq = freq / W("rope_freqs.weight")
    a = np.arange(n)[:, None] * freq[None]
    c, s = np.cos(a)[:, None], np.sin(a)[:, None]

    def rope(y):
        o = np.empty_like(y)
        o[..., 0::2] = y[..., 0::2] * c - y[..., 1::2] * s
        o[..., 1::2] = y[..., 0::2] * s + y[..., 1::2] * c
        return o

    mask = np.triu(np.full((n, n), -np.inf), 1)
    for i in range(h["n_layers"]):
        L = lambda k: W(f"blk.{i}.{k}.weight")
        y = norm(x, L("attn_norm"))
        q = rope((y @ L("attn_q").T).reshape(n, H, d))
        k = rope((y @ L("attn_k").T).reshape(n, G, d))
        v = (y @ L("attn_v").T).reshape(n, G, d)
        k, v = np.repeat(k, H // G, 1), np.repeat(v, H // G, 1)
        p = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(d) + mask
        p = np.exp(p - p.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", p, v).reshape(n, H * d) @ L("attn_output").T
        y = norm(x, L("ffn_norm"))
        g = y @ L("ffn_gate").T
        x = x + (g / (1 + np.exp(-g)) * (y @ L("ffn_up").T)) @ L("ffn_down").T
    x = norm(x, W("output_norm.weight"))
    return x @ W("output.weight" if "output.weight" in t else "token_embd.weight").T


def write(path, h, t, type_of, meta=None, arch="llama"):
    """Writes the file and returns the tensors as an engine sees them."""
    w = gguf.GGUFWriter(path, arch)
    w.add_name(os.path.splitext(os.path.basename(path))[0])
    w.add_block_count(h["n_layers"])
    w.add_context_length(h["context"])
    w.add_embedding_length(h["n_embd"])
    w.add_feed_forward_length(h["n_ff"])
    w.add_head_count(h["n_heads"])
    w.add_head_count_kv(h["n_kv_heads"])
    w.add_key_length(h["head_dim"])
    w.add_value_length(h["head_dim"])
    w.add_rope_dimension_count(h["head_dim"])
    w.add_rope_freq_base(h["base"])
    w.add_layer_norm_rms_eps(h["eps"])
    if meta:
        meta(w)
    seen = {}
    for name, x in t.items():
        kind = type_of(name) if x.ndim == 2 else T.F32
        data = gguf.quants.quantize(x, kind)
        seen[name] = gguf.quants.dequantize(data, kind).reshape(x.shape)
        w.add_tensor(name, data, raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    print(path, os.path.getsize(path))
    return seen


def expected(h, seen, ids):
    x = forward(h, seen, ids)
    out = list(ids)
    greedy, margins = [], []
    for _ in range(16):
        y = forward(h, seen, out)[-1]
        a = np.sort(y)
        greedy.append(int(y.argmax()))
        margins.append(round(float(a[-1] - a[-2]), 5))
        out.append(greedy[-1])
    return {"prompt": [int(i) for i in ids], "logits": [round(float(v), 6) for v in x[-1]], "all_argmax": [int(i) for i in x.argmax(-1)],
            "greedy": greedy, "margins": margins}


def tiny(folder, name, kinds):
    h, t = from_transformers(folder)
    ref = json.load(open(folder + "/reference.json"))
    worst = np.abs(forward(h, t, ref["prompt"])[-1] - np.array(ref["logits"])).max()
    assert worst < 2e-5, worst
    print(name, "differs from transformers by", worst)
    out = {"source": "transformers " + ref["transformers"], "f32": {k: ref[k] for k in ("prompt", "logits", "all_argmax", "greedy", "margins")}}
    for kind in kinds:
        path = f"{HERE}/{name}_{kind.name.lower()}.gguf"
        seen = write(path, h, t, lambda n: kind)
        out[kind.name.lower()] = out["f32"] if kind == T.F32 else expected(h, seen, ref["prompt"])
    json.dump(out, open(f"{HERE}/{name}.json", "w"), separators=(",", ":"))


def other(folder, arch):
    """A model of another architecture in F32, as convert_hf_to_gguf.py of llama.cpp maps it. Expected are transformers' values."""
    cfg, ref = json.load(open(folder + "/config.json")), json.load(open(folder + "/reference.json"))
    w = load_safetensors(folder + "/model.safetensors")
    gemma = arch == "gemma3"
    names = {"attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight"}
    if gemma:
        names |= {"ffn_norm.weight": "pre_feedforward_layernorm.weight", "post_attention_norm.weight": "post_attention_layernorm.weight",
                  "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
                  "attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight"}
    else:
        names |= {f"attn_{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"}
    names |= {f"attn_{x}.weight": f"self_attn.{x}_proj.weight" for x in "qkv"}
    names |= {"attn_output.weight": "self_attn.o_proj.weight"} | {f"ffn_{x}.weight": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
    t = {"token_embd.weight": w["model.embed_tokens.weight"], "output_norm.weight": w["model.norm.weight"]}
    if not cfg["tie_word_embeddings"]:
        t["output.weight"] = w["lm_head.weight"]
    for i in range(cfg["num_hidden_layers"]):
        for ours, theirs in names.items():
            t[f"blk.{i}.{ours}"] = w[f"model.layers.{i}.{theirs}"]
    if gemma:  # its norms multiply by 1 + weight
        t = {n: (x + np.float32(1) if n.endswith("norm.weight") else x) for n, x in t.items()}
    rope = cfg["rope_parameters"]
    h = dict(n_layers=cfg["num_hidden_layers"], n_embd=cfg["hidden_size"], n_ff=cfg["intermediate_size"], n_heads=cfg["num_attention_heads"],
             n_kv_heads=cfg["num_key_value_heads"], head_dim=cfg.get("head_dim") or cfg["hidden_size"] // cfg["num_attention_heads"],
             eps=cfg["rms_norm_eps"], base=rope["full_attention"]["rope_theta"] if gemma else rope["rope_theta"],
             context=cfg["max_position_embeddings"])

    def meta(out):
        if gemma:
            out.add_sliding_window(cfg["sliding_window"])
            out.add_float32("gemma3.attention.scale", cfg["query_pre_attn_scalar"] ** -0.5)

    write(f"{HERE}/tiny_{arch}_f32.gguf", h, t, lambda n: T.F32, meta, arch)
    out = {"source": "transformers " + ref["transformers"], "f32": {k: ref[k] for k in ("prompt", "logits", "all_argmax", "greedy", "margins")}}
    json.dump(out, open(f"{HERE}/tiny_{arch}.json", "w"), separators=(",", ":"))


MERGES = """Ġ t|h e|i n|Ġ a|r e|o n|Ġt he|e r|Ġ s|a t|o r|Ġ w|e s|i s|Ġ o|n d|o u|e n|in g|Ġ c|a n|Ġ b|i t|e d|Ġ f|Ġ p|a l|Ġo f|Ġ in|Ġa nd|Ġt o|Ġ m|l l|Ġ d|a r|Ġ h|l e|o w|a s|Ġ is|v e|s t|c h|r o|o t|Ġ l|Ġ n|l o|Ġ y|Ġy ou|u r|e l|l d|Ġh e|Ġ it|Ġ I|Ġ T|0 0|1 0|Ġ 2|! !""".split("|")
TEMPLATE = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


def byte_letters():
    """GPT-2's printable letter for every byte."""
    keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    out, extra = {}, 0
    for b in range(256):
        if b in keep:
            out[b] = chr(b)
        else:
            out[b] = chr(256 + extra)
            extra += 1
    return out


def vocabulary():
    letters = byte_letters()
    order = sorted(letters, key=lambda b: (ord(letters[b]) >= 256, b))
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + [letters[b] for b in order]
    for m in MERGES:
        a, b = m.split(" ")
        assert a in tokens and b in tokens and a + b not in tokens, m
        tokens.append(a + b)
    return tokens


def split_model():
    """Six random layers whose attention output and feed-forward have several slices, and all four storage types."""
    h = dict(n_layers=6, n_embd=32, n_ff=544, n_heads=4, n_kv_heads=2, head_dim=16, eps=1e-5, base=10000.0, context=2048)
    tokens = vocabulary()
    g = np.random.default_rng(20261130)
    rnd = lambda o, i: (g.standard_normal((o, i)) * 1.4 / np.sqrt(i)).astype(np.float32)
    t = {"token_embd.weight": g.standard_normal((len(tokens), 32)).astype(np.float32)}
    for i in range(6):
        t[f"blk.{i}.attn_norm.weight"] = (1 + 0.1 * g.standard_normal(32)).astype(np.float32)
        t[f"blk.{i}.attn_q.weight"], t[f"blk.{i}.attn_k.weight"], t[f"blk.{i}.attn_v.weight"] = rnd(64, 32), rnd(32, 32), rnd(32, 32)
        t[f"blk.{i}.attn_output.weight"] = rnd(32, 64)
        t[f"blk.{i}.ffn_norm.weight"] = (1 + 0.1 * g.standard_normal(32)).astype(np.float32)
        t[f"blk.{i}.ffn_gate.weight"], t[f"blk.{i}.ffn_up.weight"], t[f"blk.{i}.ffn_down.weight"] = rnd(544, 32), rnd(544, 32), rnd(32, 544)
    t["output_norm.weight"] = (1 + 0.1 * g.standard_normal(32)).astype(np.float32)
    out = rnd(len(tokens), 32)
    plain = [all(c == "Ġ" or 32 < ord(c) < 127 for c in s) and not s.startswith("<|") for s in tokens]
    out[~np.array(plain)] = 0  # greedy text is plain ASCII and does not end by itself
    t["output.weight"] = out

    def meta(w):
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre("smollm")
        w.add_token_list(tokens)
        w.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
        w.add_token_merges(MERGES)
        w.add_bos_token_id(1)
        w.add_eos_token_id(2)
        w.add_unk_token_id(0)
        w.add_pad_token_id(2)
        w.add_add_bos_token(False)
        w.add_add_space_prefix(False)
        w.add_chat_template(TEMPLATE)

    kinds = {"attn_q": T.Q8_0, "attn_k": T.F16, "attn_v": T.F32, "attn_output": T.Q8_0, "token_embd": T.Q8_0, "output": T.F16}

    def type_of(name):
        part = name.split(".")[-2]
        if name == "blk.1.attn_output.weight":
            return T.Q4_1
        if name == "blk.2.attn_output.weight":
            return T.F16
        if name == "blk.3.ffn_down.weight":
            return T.Q8_0
        return kinds.get(part, T.Q4_1)

    seen = write(f"{HERE}/tiny_split.gguf", h, t, type_of, meta)
    ids = [1] + [int(i) for i in np.random.default_rng(7).integers(3, len(tokens), 23)]
    json.dump({"source": "make_models.py", "mixed": expected(h, seen, ids)}, open(f"{HERE}/tiny_split.json", "w"), separators=(",", ":"))


def corpus(folder):
    """Small valid files from which fuzzing starts."""
    os.makedirs(folder, exist_ok=True)
    h = dict(n_layers=1, n_embd=8, n_ff=8, n_heads=1, n_kv_heads=1, head_dim=8, eps=1e-5, base=10000.0, context=16)
    one = lambda *s: np.ones(s, np.float32)
    t = {"token_embd.weight": one(3, 8), "output_norm.weight": one(8), "rope_freqs.weight": one(4)}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        t[f"blk.0.{name}.weight"] = one(8, 8)
    t["blk.0.attn_norm.weight"], t["blk.0.ffn_norm.weight"] = one(8), one(8)

    def meta(w):
        w.add_token_list(["a", "b", "ab"])
        w.add_token_types([3, 1, 1])
        w.add_token_scores([0.0, -1.0, -2.0])
        w.add_token_merges(["a b"])
        w.add_bos_token_id(0)
        w.add_add_bos_token(True)
        w.add_custom_alignment(64)

    write(folder + "/model.gguf", h, t, lambda n: T.F32)
    write(folder + "/tokenizer.gguf", h, t, lambda n: T.F16, meta)
    for arch in ("gemma3", "qwen2"):
        t = {n: x for n, x in t.items() if n != "rope_freqs.weight"}
        more = {f"blk.0.attn_{x}.bias": one(8) for x in "qkv"}
        if arch == "gemma3":
            more = {f"blk.0.{x}_norm.weight": one(8) for x in ("attn_q", "attn_k", "post_attention", "post_ffw")}

        def windows(w):
            w.add_sliding_window(4)
            w.add_uint32("gemma3.attention.sliding_window_pattern", 2)
            w.add_float32("gemma3.rope.freq_base_swa", 10000.0)
            w.add_float32("gemma3.attention.scale", 0.25)

        write(f"{folder}/{arch}.gguf", h, t | more, lambda n: T.F32, windows if arch == "gemma3" else None, arch)
    data = bytearray(open(folder + "/model.gguf", "rb").read())
    data[4] = 2
    open(folder + "/version2.gguf", "wb").write(data)


def main():
    if sys.argv[1] == "corpus":
        return corpus(sys.argv[2])
    if sys.argv[1] == "others":
        return [other(f"{sys.argv[2]}/{arch}", arch) for arch in ("gemma3", "qwen2")]
    tiny(sys.argv[1] + "/llama", "tiny_llama", [T.F32, T.F16, T.Q8_0, T.Q4_1])
    tiny(sys.argv[1] + "/llama_rope3", "tiny_rope3", [T.Q8_0])
    for arch in ("gemma3", "qwen2"):
        other(f"{sys.argv[1]}/{arch}", arch)
    split_model()


if __name__ == "__main__":
    main()
