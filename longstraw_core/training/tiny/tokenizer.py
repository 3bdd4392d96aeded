"""The tiny model's tokenizer: byte-level BPE constructed in code, so that any UTF-8 text round-trips."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from longstraw_core.training.tiny.ledger import (
    ANSWER_FORMAT,
    DEVICES,
    QUESTIONS,
    READINGS,
    STATES,
)

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY_SIZE = 512
"""Rows of the embedding; the tokenizer uses fewer, the rest are reserved as in real checkpoints."""

SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
"""Pre-tokens: a word with one leading character, a single digit, punctuation, line ends, blanks."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: 256 bytes, the words of the recall task as merges, three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in _words(splitter):
        for end in range(2, len(word) + 1):
            piece = word[:end]
            if piece not in vocabulary:
                vocabulary[piece] = len(vocabulary)
                merges.append((piece[:-1], piece[-1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (PAD, START, END)])
    if tokenizer.get_vocab_size() > VOCABULARY_SIZE:
        raise AssertionError(f"{tokenizer.get_vocab_size()} tokens do not fit {VOCABULARY_SIZE} embedding rows")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _words(splitter: pre_tokenizers.Sequence) -> list[str]:
    """Return the distinct pre-tokens of the task's texts, longest common use first, in byte-level spelling."""
    lines = [f"{device} {READINGS[0]}=0 {STATES[0]}\n" for device in DEVICES]
    lines += [f"x {reading}=0 ok\n" for reading in READINGS]
    lines += [f"x level=0 {state}\n" for state in STATES]
    lines += ["code final=0\ncode draft=0\n", *QUESTIONS.values(), " " + ANSWER_FORMAT]
    lines += ["user\n", "assistant\n", "system\n", "Answer: 0", "Code: 0"]
    words: dict[str, None] = {}
    for line in lines:
        for piece, _ in splitter.pre_tokenize_str(line):
            if len(piece) > 1:
                words.setdefault(piece)
    return list(words)
