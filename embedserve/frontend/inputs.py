"""A request's inputs to token ids within the model's limits: prompts, special tokens, truncation, errors by input.

Knows one model and its tokenizer; nothing of the engine or of what is asked of the vectors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from embedserve.errors import EmbedserveError, InputTooLong, InvalidInput, InvalidTokenId
from embedserve.frontend.call import EmbedCall
from embedserve.frontend.tokenizer import Encoded, Tokenizer
from embedserve.model.card import ModelCard

# Names under which folders keep the prompt of each input type; sentence-transformers looks for the same.
PROMPT_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}


@dataclass(slots=True)
class Prepared:
    """Checked inputs: those without an error, end to end, and which they were."""

    encoded: Encoded
    indexes: list[int] | None  # of the good inputs; None when all are good
    token_counts: np.ndarray
    truncated: list[int] = field(default_factory=list)
    errors: dict[int, EmbedserveError] = field(default_factory=dict)


class Inputs:
    """`max_tokens` of one input, special tokens and prompt included."""

    def __init__(self, card: ModelCard, *, max_tokens: int, auto_truncate: bool) -> None:
        """Raises StartError when the tokenizer's file is damaged."""
        self._card = card
        self._max_tokens = max_tokens
        self._auto_truncate = auto_truncate
        # Where the end token's state is the vector, a second one would be another vector.
        self._tokenizer = Tokenizer(card.tokenizer_file, end_once=card.pooling == "lasttoken")

    async def prepare(self, call: EmbedCall) -> Prepared:
        """Token ids of every good input, within the model's limit, and an error for every bad one."""
        prompt = self._prompt(call)
        errors: dict[int, EmbedserveError] = {}
        if call.texts is not None:
            encoded = await self._tokenizer.encode([prompt + text for text in call.texts] if prompt else call.texts)
        else:
            encoded = self._take_token_ids(call, errors)
        if len(encoded.ids) == 0 or int(encoded.lengths.min()) == 0 or int(encoded.ids.max()) >= self._card.vocab_size:
            self._find_impossible(call, encoded, errors)
        prepared = Prepared(encoded, None, encoded.lengths, errors=errors)
        too_long = np.flatnonzero(encoded.lengths > self._max_tokens)
        if len(too_long) or errors:
            self._cut_or_refuse(call, prepared, too_long.tolist())
        if prepared.errors and not call.per_input_errors:
            raise prepared.errors[min(prepared.errors)]
        return prepared

    async def tokenize(self, call: EmbedCall, *, add_special_tokens: bool, with_offsets: bool) -> Encoded:
        """Token ids of every text, of any length; offsets count from where the text begins after its prompt."""
        prompt = self._prompt(call)
        encoded = await self._tokenizer.tokenize(
            [prompt + text for text in call.texts or ()],
            add_special_tokens=add_special_tokens,
            with_offsets=with_offsets,
        )
        if encoded.offsets is not None:
            encoded.offsets = np.maximum(encoded.offsets - len(prompt), 0)
        return encoded

    def _take_token_ids(self, call: EmbedCall, errors: dict[int, EmbedserveError]) -> Encoded:
        assert call.token_ids is not None
        inputs: list[np.ndarray] = []
        for index, ids in enumerate(call.token_ids):
            try:
                taken = np.array(ids, np.int64)
            except OverflowError:
                taken = np.array([-1])  # as far outside the vocabulary as can be
            if len(taken) and not 0 <= taken.min() <= taken.max() < self._card.vocab_size:
                bad = next(id for id in ids if not 0 <= id < self._card.vocab_size)
                errors[index] = self._outside_vocabulary(call, index, bad)
                taken = taken[:0]
            inputs.append(self._tokenizer.add_special_tokens(taken.astype(np.int32)))
        return Encoded(np.concatenate(inputs), np.fromiter(map(len, inputs), np.int32, len(inputs)))

    def _outside_vocabulary(self, call: EmbedCall, index: int, id: int) -> InvalidTokenId:
        return InvalidTokenId(
            f"input {index} has the token id {id}; the vocabulary is 0 to {self._card.vocab_size - 1}.",
            param=f"{call.field}[{index}]",
        )

    def _find_impossible(self, call: EmbedCall, encoded: Encoded, errors: dict[int, EmbedserveError]) -> None:
        """What only an odd tokenizer makes of a text: no token at all, or ids that the model has no embedding for."""
        for index in np.flatnonzero(encoded.lengths == 0).tolist():
            no_tokens = InvalidInput(
                f"input {index} has no tokens; this model's tokenizer adds none of its own, so send some text.",
                param=f"{call.field}[{index}]",
            )
            errors.setdefault(index, no_tokens)
        outside = np.flatnonzero(encoded.ids >= self._card.vocab_size)
        inputs, first = np.unique(np.searchsorted(np.cumsum(encoded.lengths), outside, side="right"), return_index=True)
        for index, place in zip(inputs.tolist(), outside[first].tolist(), strict=True):
            errors.setdefault(index, self._outside_vocabulary(call, index, int(encoded.ids[place])))

    def _cut_or_refuse(self, call: EmbedCall, prepared: Prepared, too_long: list[int]) -> None:
        """The slow path: rebuild the inputs, without those that have an error."""
        side = call.truncate or ("right" if self._auto_truncate else "none")
        encoded = prepared.encoded
        inputs = np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])
        for index in too_long:
            if side == "none":
                prepared.errors[index] = InputTooLong(
                    f"input {index} has {len(inputs[index])} tokens; this model takes {self._max_tokens}. "
                    'Send truncate="right" or "left", or start the server with --auto-truncate.',
                    param=f"{call.field}[{index}]",
                )
            else:
                inputs[index] = self._tokenizer.cut(inputs[index], self._max_tokens, side)
                prepared.truncated.append(index)
        prepared.indexes = [index for index in range(len(inputs)) if index not in prepared.errors]
        prepared.token_counts = np.fromiter(map(len, inputs), np.int32, len(inputs))
        prepared.token_counts[list(prepared.errors)] = 0
        good = [inputs[index] for index in prepared.indexes]
        prepared.encoded = Encoded(
            np.concatenate([*good, np.empty(0, np.int32)]), prepared.token_counts[prepared.indexes]
        )

    def _prompt(self, call: EmbedCall) -> str:
        """What goes before each text. Token ids carry their prompt already, so a request must not name one for them."""
        named = [name for name in ("input_type", "prompt_name", "instruction") if getattr(call, name) is not None]
        if len(named) > 1:
            raise InvalidInput(f"send one of {' and '.join(named)}, not both.", param=named[-1])
        if call.token_ids is None:
            return self._named_prompt(call)
        if named and self._named_prompt(call):
            raise InvalidInput(
                f"{named[0]} applies to texts; send token ids with their prompt already in.", param=named[0]
            )
        return ""

    def _named_prompt(self, call: EmbedCall) -> str:
        prompts = self._card.prompts
        if call.instruction is not None:
            return self._instruction_prompt(call.instruction)
        if call.prompt_name is not None:
            if call.prompt_name not in prompts:
                raise InvalidInput(
                    f"prompt_name is {call.prompt_name!r}; "
                    f"this model has {', '.join(map(repr, prompts)) or 'no prompts'}.",
                    param="prompt_name",
                )
            return prompts[call.prompt_name]
        if call.input_type is not None:
            return next((prompts[name] for name in PROMPT_NAMES[call.input_type] if name in prompts), "")
        return prompts.get(self._card.default_prompt_name or "", "")

    def _instruction_prompt(self, instruction: str) -> str:
        """The folder's query prompt with the caller's instruction: `Instruct: …\\nQuery:` (Qwen3-Embedding's card)."""
        query_prompt = self._card.prompts.get("query", "")
        head, separator, tail = query_prompt.partition("\n")
        if not head.startswith("Instruct:") or not separator:
            raise InvalidInput(
                "this model's folder defines no instruction prompt; send input_type or prompt_name, "
                "or put the instruction into the text.",
                param="instruction",
            )
        return f"Instruct: {instruction}\n{tail}"
