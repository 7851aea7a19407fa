"""Small checkpoints and texts that tests make or read; the tensors are random, the files are as real ones.

Knows transformers and sentence-transformers, which write them; nothing of the server.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
    RobertaConfig,
    RobertaModel,
)

from loadtest import qwen3

SENTENCES_FILE = Path(__file__).parent / "data" / "sentences.txt"
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def sentences() -> list[str]:
    """At least 200 English sentences of 1 to some 20 words."""
    lines = SENTENCES_FILE.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def long_texts() -> list[str]:
    """Sentences joined 2, 3, 4, ... at a time: texts of about 20 to 330 tokens."""
    following = itertools.cycle(sentences())
    return [" ".join(itertools.islice(following, count)) for count in range(2, 26)]


def save_tiny_bert(path: Path, *, pooling: str = "cls", normalize: bool = True, seed: int = 0) -> Path:
    """A random BERT of two layers, saved by sentence-transformers; its vocabulary is the sentences' words.

    hidden 48 in 4 heads, so that a head is 12 wide; the tanh GELU; at most 64 tokens.
    """
    tokenizer = _word_tokenizer(sentences())
    bert_folder = path / "made-of"
    torch.manual_seed(seed)
    bert = BertModel(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=100,
            max_position_embeddings=64,
            hidden_act="gelu_new",
            initializer_range=0.2,
        )
    )
    bert.save_pretrained(bert_folder)
    tokenizer.save_pretrained(bert_folder)
    modules = [Transformer(str(bert_folder), max_seq_length=64), Pooling(48, pooling_mode=pooling)]
    saved = path / "tiny-bert"
    SentenceTransformer(modules=[*modules, *([Normalize()] if normalize else [])], device="cpu").save(str(saved))
    return saved


def save_tiny_qwen3(path: Path, *, seed: int = 0, **config: object) -> Path:
    """A random Qwen3 of two layers with the real tokenizer, saved by sentence-transformers.

    hidden 64, 4 heads over 2 of keys and values, each 32 wide, so that heads * head_dim is not hidden; at most 512
    tokens. RoPE's theta is 1e6, as the published models have it.
    """
    made_of = path / "made-of"
    made_of.mkdir(parents=True)
    (made_of / "tokenizer.json").write_text(json.dumps(qwen3.tokenizer()), encoding="utf-8")
    names = {"pad_token": qwen3.END_OF_TEXT, "eos_token": "<|im_end|>", "padding_side": "left"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(made_of / "tokenizer.json"), **names)
    tokenizer.save_pretrained(made_of)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 100, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}
    settings = {"vocab_size": qwen3.VOCABULARY, "initializer_range": 0.1} | sizes | heads | rope | config
    Qwen3Model(Qwen3Config(**settings)).save_pretrained(made_of)
    saved = path / "tiny-qwen3"
    modules = [Transformer(str(made_of), max_seq_length=512), Pooling(64, pooling_mode="lasttoken"), Normalize()]
    prompts = {"query": qwen3.QUERY_PROMPT, "document": ""}
    SentenceTransformer(modules=modules, device="cpu", prompts=prompts).save(str(saved))
    return saved


def save_tiny_roberta(path: Path, *, dense: bool = False, pooling: str = "mean") -> Path:
    """A random RoBERTa, whose positions begin behind the padding's; at most 62 tokens, its vectors 48 or, dense, 20."""
    tokenizer = _word_tokenizer(sentences())
    torch.manual_seed(3)
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    config = RobertaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=64, pad_token_id=0, initializer_range=0.2, **sizes
    )
    RobertaModel(config).save_pretrained(path / "made-of")
    tokenizer.save_pretrained(path / "made-of")
    modules = [Transformer(str(path / "made-of"), max_seq_length=62), Pooling(48, pooling_mode=pooling)]
    if dense:
        modules.append(Dense(48, 20, activation_function=torch.nn.Tanh()))
    saved = path / "tiny-roberta"
    SentenceTransformer(modules=[*modules, Normalize()], device="cpu").save(str(saved))
    return saved


def edit_json(file: Path, **changes: object) -> None:
    """Set keys of a JSON object in a file; a value of `...` removes its key."""
    content = json.loads(file.read_text())
    content.update(changes)
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def _word_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    normalizer, words = BertNormalizer(), BertPreTokenizer()
    found = {word for text in texts for word, _ in words.pre_tokenize_str(normalizer.normalize_str(text))}
    vocabulary = {token: i for i, token in enumerate([*_SPECIAL, *sorted(found)])}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, words
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
