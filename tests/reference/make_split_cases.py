#!/usr/bin/env python3
"""Splits texts with the Python package tokenizers (Hugging Face; its own regular expressions, not
PCRE2) by the rules of well-known models, and writes split_cases.json, which
tests/unit/test_tokenizer.c compares with runtime/tokenizer_split.c.

    python3 -m venv /tmp/v && /tmp/v/bin/pip install tokenizers
    /tmp/v/bin/python tests/reference/make_split_cases.py

The patterns are those of the models' tokenizer.json files.
"""
import json
import os
import random

import tokenizers
from tokenizers import Regex, pre_tokenizers

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
          r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
RULES = {"smollm": [r"\p{N}", GPT2], "gpt-2": [GPT2], "llama-bpe": [LLAMA3], "qwen2": [QWEN2], "gpt-4o": [O200K],
         "tekken": [TEKKEN]}

TEXTS = ["", " ", "a", "Hello, world!", "I'm they'll WE'VE don't it's 's 'S", "x = 1234567 + 8.9e10;", "  two  spaces   ",
         "\n\n\nlines\r\n\r\n  indented\n\t\ttabs\t \n", "naïve café ÜBER straße", "東京は日本の首都です。123年", "مرحبا بالعالم ١٢٣",
         "हिन्दी में नमस्ते", "👩‍👩‍👧‍👦 family 🎉🎉", "a\u00a0b\u2003c\u3000d\u2028e\u0085f", "CamelCaseXMLHttpRequest snake_case",
         "https://example.org/a/b?c=d&e=f#g", "<|im_start|>user\nhi<|im_end|>", "\u200bzero\u200dwidth\ufeff", "e\u0301 combining n\u0303o",
         "½ ² Ⅷ ①", "def f(x):\n    return x**2  # ok\n", "   ", "\t\n ", "tail  ", "a//b/\n/c", "ǅ ǈ titlecase ʰ modifier ª º",
         "'", "''s", "$100,000.00 (50%)", "_under__score_", "a\u0000b\u0001c", "İstanbul ẞ ﬁ"]


def main():
    rng = random.Random(7)
    alphabet = "aZé ß東ह\u094d1٣½ \n\r\t\u00a0\u3000'.,/!_-sStTlL👍\u200d\u0301"
    texts = TEXTS + ["".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 40))) for _ in range(120)]
    cases = []
    for name, patterns in RULES.items():
        pre = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(p), "isolated") for p in patterns])
        for text in texts:
            cases.append({"rule": name, "text": text, "words": [w for w, _ in pre.pre_tokenize_str(text) if w]})
    here = os.path.dirname(os.path.abspath(__file__))
    with open(os.path.join(here, "split_cases.json"), "w", encoding="utf-8") as f:
        json.dump({"made_with": f"tokenizers {tokenizers.__version__}", "cases": cases}, f, ensure_ascii=True,
                  separators=(",", ":"))
        f.write("\n")
    print(len(cases), "cases")


if __name__ == "__main__":
    main()
