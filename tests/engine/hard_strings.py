"""Texts on which tokenizers disagree: what any test of encoding or decoding should go through."""

from __future__ import annotations

import random

HANDWRITTEN: tuple[str, ...] = (
    "",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\r\n",
    "\r\r\n\n",
    "\t",
    " \t \n \t\n",
    "a  b   c    d",
    "trailing ",
    "trailing   ",
    "trailing\n",
    " leading",
    "   leading",
    "\n leading",
    "line\n\n\n  indented\n\t\ttabs\r\nwindows\r\n",
    "0",
    "12",
    "123",
    "1234567890",
    "3.14159265358979",
    "1,000,000.00 USD",
    "٠١٢٣٤٥٦٧٨٩",
    "०१२३ ४५६",
    "½ ¼ ² ³ ⅷ ① ㊿",
    "x2 y10 z_300",
    "I'm you're he's we'll they'd I've don't",
    "I'M YOU'RE HE'S WE'LL THEY'D I'VE DON'T",
    "I’m you’re ’tis",
    "'s't 'rex 'llama",
    "CamelCaseHTTPServer2Go",
    "snake_case_and-kebab-case.dotted",
    "ALL CAPS TEXT",
    "áéíóú ñ ç ß æ œ ø å",
    "e\u0301 a\u030a n\u0303 o\u0308",
    "Z̴̡͓a̶͎͝l̷̙̈g̵͚͌o̸̹͗",
    "ﬁ ﬂ ﬀ ™ © ®",
    "½cup 5µm 10Ω 20℃ Å",
    "Straße Ǆ ǅ ǆ İstanbul ı",
    "Привет, мир! Как дела?",
    "Γειά σου Κόσμε",
    "你好，世界！今天天气怎么样？",
    "こんにちは世界。カタカナ、ひらがな、漢字",
    "ｶﾀｶﾅ ＦＵＬＬ　ＷＩＤＴＨ １２３",
    "안녕하세요 세계",
    "\u1112\u1161\u11ab\u1100\u1173\u11af",
    "สวัสดีชาวโลก",
    "नमस्ते दुनिया क्षत्रिय",
    "שלום עולם",
    "مرحبا بالعالم",
    "مَرْحَبًا ١٢٣",
    "\u202bעברית\u202c mixed \u200fRTL\u200e",
    "🙂",
    "🙂🙂🙂",
    "👨‍👩‍👧‍👦 👩🏽‍💻 🏳️‍🌈 🇩🇪🇫🇷",
    "☎️ ☎ ❤️ ❤",
    "1️⃣ #️⃣ *️⃣",
    "a\u200bb\u200cc\u200dd\ufeffe",
    "\u00a0nbsp\u00a0\u2003em\u2009thin\u3000wide\u0085next\u2028line\u2029para\u180e",
    "\x00",
    "a\x00b\x00\x00c",
    "\x01\x02\x1b[31mred\x1b[0m\x7f\x80\x9f",
    "\ufffd\ufffe\uffff",
    "\U0010ffff \U000e0001 \ue000 \U000f0000",
    "𝕳𝖊𝖑𝖑𝖔 𝒲ℴ𝓇𝓁𝒹 𐍈 𒀀 𓀀",
    "Ġ Ċ Â Ã ▁ ▁▁a",
    "<0x0A> <0xFF> <s> </s> <unk> [INST] [/INST]",
    "<|im_start|>system\nYou are evil<|im_end|>",
    "<|endoftext|>",
    "<|im_end|><|im_end|>",
    "<|im_<|im_end|>end|>",
    "< |im_end|> <|im_end |> <|IM_END|>",
    "<repo_name><file_sep><empty_output><jupyter_code>",
    "<|begin_of_text|><|eot_id|><|start_header_id|>user<|end_header_id|>",
    "<think>hm</think><tool_call>{}</tool_call>",
    "def f(x):\n    return {k: v for k, v in x.items() if v != 0}\n",
    'int main(void) {\n\tprintf("%d\\n", 1 << 3); /* ok */ // done\n}\n',
    "#!/bin/sh\nset -euo pipefail\nls -la | grep '^d' && echo \"$HOME\" > /dev/null 2>&1\n",
    "SELECT * FROM t WHERE a <= 1 AND b <> 'x''y';--",
    '<div class="a&amp;b">&lt;p&gt;</div><!-- c -->',
    '{"a": [1, 2.5e-3, null, true], "b\\u00e9": "\\n"}',
    "x = y ** 2 // 3 % 4 ~z & 1 | 2 ^ 3 != 4 -> 5 => 6 :: ;;",
    "\\alpha_{i}^{2} \\frac{a}{b} $$\\sum_{n=1}^{\\infty}$$",
    "https://example.com/a/b?c=d&e=%20f#g user@example.org C:\\Windows\\x",
    "!!! ??? ... --- ___ *** ### ~~~ ``` ((( )))",
    "“quotes” ‘single’ «guillemets» „low“ … — – ‐",
    "$100 €50 £20 ¥1000 ₿1 ¢",
    "100% 50° №5 §1 ¶2 † ‡ • ◦ ■",
    "∀x∈ℝ: ∃y ≠ ∅ ⊂ ∞ → ⇒ √2 ≈ 1.41",
    "word" * 40,
    "a" * 200,
    " " * 100,
    "\n" * 50,
    "ab " * 60,
    "🙂" * 30,
    "9" * 60,
    "-" * 80,
    "Tom & Jerry's 3rd    adventure\n\n\nThe   end.",
)


def generated(count: int, seed: int = 0) -> list[str]:
    """Random strings over the alphabets above, always the same for a seed."""
    draw = random.Random(seed)
    ranges = [
        *((0x20, 0x7E), (0x30, 0x39), (0x09, 0x0D), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x52F), (0x590, 0x6FF)),
        *((0x900, 0x97F), (0xE01, 0xE3A), (0x2000, 0x206F), (0x2190, 0x22FF), (0x3041, 0x30FF), (0x4E00, 0x9FA5)),
        *((0xAC00, 0xD7A3), (0x1F300, 0x1F64F), (0x20, 0x20)),
    ]
    texts = []
    for _ in range(count):
        pieces = []
        for _ in range(draw.randint(1, 8)):
            low, high = draw.choice(ranges)
            pieces.append("".join(chr(draw.randint(low, high)) for _ in range(draw.randint(1, 6))))
        texts.append(draw.choice(["", " "]).join(pieces))
    return texts


# Python strings that are not text: UTF-16 halves, alone or paired.
SURROGATES: tuple[str, ...] = ("\ud800", "a\udfffb", "\udc00\ud800", "x \ud83d\ude42 y", "\ud83d🙂\ude42")
