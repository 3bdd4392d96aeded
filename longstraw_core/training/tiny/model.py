"""Shape, initial values and curriculum of the tiny checkpoint; trains it on the CPU in about a minute."""

import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from longstraw_core.spec import NumericError, SpecError
from longstraw_core.training.tiny.ledger import below
from longstraw_core.training.tiny.lessons import Phase, Piece, drill, even_habits, interview, ledger_lesson
from longstraw_core.training.tiny.tokenizer import END, PAD, VOCABULARY_SIZE, build_tokenizer

CURRICULUM = (
    Phase("drill", steps=260, batch=16, size=16, until=0.25),
    Phase("interview", steps=130, batch=12, size=4, until=0.1),
    Phase("ledger", steps=35, batch=10, size=24),
    Phase("ledger", steps=25, batch=4, size=90),
    Phase("ledger", steps=28, batch=2, size=250),
)
LEARNING_RATE = 7e-3
WARMUP_STEPS = 20
RECENT_STEPS = 10
"""Steps whose mean loss decides whether a phase has been learned."""
THREADS = 1
"""Fixed, because sums in another number of threads round differently; tensors this small gain little from more."""


@dataclass(frozen=True)
class TinyProgress:
    """Where training is; passed to the `progress` callback after every step."""

    step: int
    steps: int
    """The most steps there can be; phases that are learned sooner end sooner."""
    loss: float
    seconds: float
    tokens: int
    """Tokens per sequence in this step."""


@dataclass(frozen=True)
class TinyReport:
    """What was trained. `complete` is false when the time bound cut training short."""

    seed: int
    steps: int
    complete: bool
    threads: int
    parameters: int
    loss: float
    """Mean loss of the last steps, in nats per taught token."""
    seconds: float
    cpu_seconds: float


def build_tiny_model(
    out_dir: Path,
    *,
    seed: int = 0,
    max_seconds: float = 120.0,
    progress: Callable[[TinyProgress], None] | None = None,
    curriculum: tuple[Phase, ...] = CURRICULUM,
) -> TinyReport:
    """Train the tiny model and write it to `out_dir` as a Hugging Face checkpoint with its tokenizer.

    `max_seconds` bounds the CPU time of the training, which on an idle machine is its duration: a busy machine takes
    longer but trains the same model. Unless that bound cuts training short, the bytes depend on `seed` and the
    machine's arithmetic only. The directory appears complete or not at all.

    Raises:
        SpecError: `out_dir` exists and is not an empty directory.
        NumericError: the loss became non-finite.
    """
    out_dir = Path(out_dir)
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise SpecError(f"{out_dir}: already exists and is not an empty directory; remove it or name another")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    with _threads(THREADS), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = initial_model(tokenizer)
        report = _train(model, tokenizer, seed, max_seconds, progress, curriculum)
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=f".{out_dir.name}-") as scratch:
        unfinished = Path(scratch) / "model"
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished, save_jinja_files=False)
        record = {key: value for key, value in asdict(report).items() if key not in ("seconds", "cpu_seconds")}
        record["torch"] = torch.__version__
        (unfinished / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        os.replace(unfinished, out_dir)
    return report


def initial_model(tokenizer: PreTrainedTokenizerBase) -> Qwen3_5ForCausalLM:
    """Return the untrained model: four layers (linear and full attention in turn), hidden size 64, fp32.

    Two starting values differ from the library's, so that a minute of training suffices: the recurrent state forgets
    over tens to hundreds of tokens instead of at once, and attention scores start sharper.
    """
    end, padding = tokenizer.get_vocab()[END], tokenizer.get_vocab()[PAD]
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=65536,
        tie_word_embeddings=True,
        initializer_range=0.1,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        eos_token_id=end,
        pad_token_id=padding,
        dtype="float32",
    )
    model = Qwen3_5ForCausalLM(config).float()
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=padding)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.zero_()
            elif name.endswith("dt_bias"):
                parameter.copy_(torch.linspace(-1.0, -6.0, parameter.numel()))
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.fill_(1.0)
    return model


def _train(
    model: Qwen3_5ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    max_seconds: float,
    progress: Callable[[TinyProgress], None] | None,
    curriculum: tuple[Phase, ...],
) -> TinyReport:
    """Run the curriculum; stop early when `max_seconds` of CPU time are used."""
    started, cpu_started = time.monotonic(), time.process_time()
    rng = random.Random(seed)  # noqa: S311 - lessons, not secrets
    habits = even_habits(rng)
    planned = sum(phase.steps for phase in curriculum)
    # the learning rate falls over the closing phases, whose number of steps is known
    closing = sum(phase.steps for phase in curriculum if phase.until is None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    losses: list[float] = []
    left = closing
    for phase in curriculum:
        phase_losses: list[float] = []
        while len(phase_losses) < phase.steps and not _learned(phase, phase_losses):
            if time.process_time() - cpu_started > max_seconds:
                break
            scale = min(1.0, (len(losses) + 1) / WARMUP_STEPS, max(0.05, left / max(1, closing)))
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * scale
            ids_BT, taught_BT = _batch(rng, phase, habits, tokenizer)
            loss = taught_loss(model, ids_BT, taught_BT)
            if not bool(torch.isfinite(loss)):
                raise NumericError(
                    f"tiny model: loss is {loss.item()} at step {len(losses)}; try another seed than {seed}"
                )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            phase_losses.append(loss.item())
            losses.append(loss.item())
            left -= phase.until is None
            if progress is not None:
                progress(TinyProgress(len(losses), planned, losses[-1], time.monotonic() - started, ids_BT.shape[1]))
    model.eval()
    recent = losses[-RECENT_STEPS:]
    return TinyReport(
        seed=seed,
        steps=len(losses),
        complete=left == 0,
        threads=THREADS,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        loss=sum(recent) / max(1, len(recent)),
        seconds=time.monotonic() - started,
        cpu_seconds=time.process_time() - cpu_started,
    )


def _learned(phase: Phase, losses: list[float]) -> bool:
    """Return whether the phase may end before its last step."""
    recent = losses[-RECENT_STEPS:]
    return phase.until is not None and len(recent) == RECENT_STEPS and sum(recent) / RECENT_STEPS < phase.until


def taught_loss(model: Qwen3_5ForCausalLM, ids_BT: torch.Tensor, taught_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the taught tokens; the LM head runs on their positions only."""
    hidden_BTD = model.base_model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state
    taught = taught_BT[:, 1:]
    return functional.cross_entropy(model.lm_head(hidden_BTD[taught]), ids_BT[:, 1:][taught])


def _batch(
    rng: random.Random, phase: Phase, habits: Iterator[float], tokenizer: PreTrainedTokenizerBase
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and which of them are taught, both [B, T], padded on the right."""
    rows = [encode_lesson(_lesson(rng, phase, habits), tokenizer) for _ in range(phase.batch)]
    length = max(len(ids) for ids, _ in rows)
    padding = tokenizer.get_vocab()[PAD]
    ids_BT = torch.tensor([ids + [padding] * (length - len(ids)) for ids, _ in rows])
    taught_BT = torch.tensor([taught + [False] * (length - len(taught)) for _, taught in rows])
    return ids_BT, taught_BT


def _lesson(rng: random.Random, phase: Phase, habits: Iterator[float]) -> list[Piece]:
    """Write one lesson of the phase's kind; ledgers vary in length by a quarter."""
    if phase.kind == "drill":
        return drill(rng, phase.size)
    if phase.kind == "interview":
        return interview(rng, phase.size)
    return ledger_lesson(rng, phase.size + below(rng, 1 + phase.size // 4), habits)


def encode_lesson(pieces: list[Piece], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """Return the lesson's token ids and, for each, whether it is taught. Pieces end where pre-tokens end."""
    encoded: list[list[int]] = tokenizer([text for text, _ in pieces], add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
    ids = [token for tokens in encoded for token in tokens]
    taught = [flag for tokens, (_, flag) in zip(encoded, pieces, strict=True) for _ in tokens]
    return ids, taught


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with `count` threads inside the body."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
