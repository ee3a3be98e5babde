"""Writes smollm2.json: what transformers makes of the real SmolLM2-135M-Instruct.Q4_1.gguf, in float32.

    python -m tests.engine.golden.make_smollm2 SmolLM2-135M-Instruct.Q4_1.gguf

For each prompt: its token ids, 64 greedy tokens (going on past a stop token), the smallest gap between the best and
the second logit on the way (below about 1e-4 two correct engines may part), and the ten best logits after the prompt.
It needs accelerate beside transformers and takes about five minutes on two cores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TOKENS = 64
# Without digits: transformers' tokenizer for this file does not split them, flint's does, as the model wants.
PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about autumn rain.",
    "Explain why the sky is blue to a child.",
    "List three uses of baking soda.",
    "Translate to Spanish: The book is on the table.",
    "Write a Python function that reverses a string.",
    "Who wrote Pride and Prejudice, and what is it about?",
    "Summarise: The cat sat on the mat. It rained. The cat went inside and slept by the fire.",
    "Fix the grammar: she dont like the apples what he buyed.",
    "Give me a recipe for pancakes.",
    "What is the difference between a virus and a bacterium?",
    "Tell me a joke about programmers.",
    "Describe the water cycle in a few sentences.",
    "Write a polite email declining an invitation.",
    "Name the planets of the solar system in order.",
    "How does a bicycle stay upright?",
    "Continue the story: The old lighthouse had been dark for years, until one night",
    "Write a SQL query that counts users by country.",
    "Rewrite in formal English: gonna grab some food, wanna come?",
    "¿Qué es la fotosíntesis?",
)


def main(gguf: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    )
    cases = []
    for prompt in PROMPTS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        tokens, gap, best = [], float("inf"), None
        fed, cache = torch.tensor([ids]), None
        with torch.inference_mode():
            for _ in range(TOKENS):
                out = model(fed, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                top = out.logits[0, -1].topk(10)
                best = best or {"ids": top.indices.tolist(), "logits": [round(x, 5) for x in top.values.tolist()]}
                gap = min(gap, float(top.values[0] - top.values[1]))
                tokens.append(int(top.indices[0]))
                fed = top.indices[None, :1]
        cases.append({"prompt": prompt, "ids": ids, "tokens": tokens, "smallest_gap": round(gap, 6), "best": best})
        print(f"{gap:.5f} {tokenizer.decode(tokens)!r}", flush=True)
    lines = ",\n".join("  " + json.dumps(case, ensure_ascii=False) for case in cases)
    Path(__file__).with_name("smollm2.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
