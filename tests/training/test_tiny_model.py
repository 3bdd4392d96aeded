"""The tiny checkpoint: its tokenizer, its lessons, and a build that is complete and repeatable or not there at all."""

import hashlib
import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5ForCausalLM

from longstraw_core.spec import NumericError, SpecError
from longstraw_core.training.tiny.ledger import fit_ledger, question, write_ledger
from longstraw_core.training.tiny.lessons import Phase, answer, drill, even_habits, interview, ledger_lesson
from longstraw_core.training.tiny.model import encode_lesson
from longstraw_core.training.tiny.tokenizer import END, PAD, START, VOCABULARY_SIZE, build_tokenizer
from longstraw_core.training.tiny_model import TinyProgress, build_tiny_model

TOKENIZER = build_tokenizer()
SHORT = (
    Phase("drill", steps=3, batch=2, size=8),
    Phase("interview", steps=1, batch=2, size=2),
    Phase("ledger", steps=1, batch=2, size=8),
)


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


@given(st.text())
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


@pytest.mark.parametrize("text", ["\0 \t\r\n\n", "日本語 ٣½² 😀", f"a{END}b{START}", "ﬀ é"])
def test_awkward_text_survives_too(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


@given(st.integers(min_value=0, max_value=10**12))
def test_every_digit_is_a_token(number: int) -> None:
    pieces = [TOKENIZER.decode([token]) for token in TOKENIZER(f" level={number}")["input_ids"]]
    assert pieces == [" level", "=", *str(number)]


def test_the_tokenizer_is_the_same_each_time_and_fits_the_embedding() -> None:
    assert build_tokenizer().backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()
    assert len(TOKENIZER) <= VOCABULARY_SIZE
    assert (TOKENIZER.eos_token, TOKENIZER.pad_token) == (END, PAD)


def test_the_chat_template_is_the_form_of_the_lessons() -> None:
    ledger = write_ledger(random.Random(0), 5)
    chat = [{"role": "user", "content": question(ledger, "open")}]
    text = TOKENIZER.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == f"{START}user\n{question(ledger, 'open')}{END}\n{START}assistant\n"


@given(st.integers(), st.integers(min_value=2, max_value=60))
def test_a_ledger_carries_each_code_once_and_they_differ_in_their_first_digit(seed: int, lines: int) -> None:
    ledger = write_ledger(random.Random(seed), lines)
    written = ledger.text.split("\n")
    assert len(written) == lines
    assert [line for line in written if "code" in line].count(f"code final={ledger.final}") == 1
    assert [line for line in written if "code" in line].count(f"code draft={ledger.draft}") == 1
    assert 10 <= ledger.final <= 99
    assert 10 <= ledger.draft <= 99
    assert ledger.final // 10 != ledger.draft // 10


def test_a_ledger_of_one_line_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 lines"):
        write_ledger(random.Random(0), 1)


@pytest.mark.parametrize("min_tokens", [1, 100, 2048])
def test_a_fitted_ledger_is_long_enough_and_not_much_longer(min_tokens: int) -> None:
    def count(text: str) -> int:
        return len(TOKENIZER(text)["input_ids"])

    ledger = fit_ledger(random.Random(4), min_tokens, count)
    assert count(question(ledger, "open")) >= min_tokens
    assert count(question(ledger, "open")) < max(min_tokens + 16, 64)


@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_lessons_encode_as_their_joined_text_and_numbers_are_taught(seed: int) -> None:
    rng = random.Random(seed)
    for pieces in (drill(rng, 9), interview(rng, 9), ledger_lesson(rng, 9, even_habits(rng))):
        ids, taught = encode_lesson(pieces, TOKENIZER)
        assert ids == TOKENIZER("".join(text for text, _ in pieces))["input_ids"]
        assert len(ids) == len(taught)
        assert any(taught)
        assert not taught[0], "the first token has nothing to be predicted from"


def test_open_questions_are_answered_in_different_ways_and_named_ones_in_one() -> None:
    ledger, habits = write_ledger(random.Random(0), 10), even_habits(random.Random(1))
    right = f"code final={ledger.final}\nAnswer: {ledger.final}"
    answers = [answer(ledger, "open", habits) for _ in range(100)]
    assert 38 <= answers.count(right) <= 42
    assert 18 <= sum("Answer" not in text for text in answers) <= 22
    assert 3 <= answers[:10].count(right) <= 5, "evenly from the first texts on"
    assert {answer(ledger, "final", habits) for _ in range(50)} == {right}
    assert {answer(ledger, "draft", habits) for _ in range(50)} == {
        f"code draft={ledger.draft}\nAnswer: {ledger.draft}"
    }


def test_the_build_is_a_loadable_hugging_face_checkpoint(tmp_path: Path) -> None:
    seen: list[TinyProgress] = []
    report = build_tiny_model(tmp_path / "deep" / "tiny", progress=seen.append, curriculum=SHORT)
    directory = tmp_path / "deep" / "tiny"
    assert {path.name for path in directory.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    }
    assert [path.name for path in directory.parent.iterdir()] == ["tiny"]
    assert [progress.step for progress in seen] == [1, 2, 3, 4, 5]
    assert (report.steps, report.complete) == (5, True)
    assert json.loads((directory / "training.json").read_text())["seed"] == 0
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert isinstance(model, Qwen3_5ForCausalLM)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {"linear_attention", "full_attention"} == set(model.config.layer_types)
    assert model.config.max_position_embeddings >= 32768
    assert tokenizer.chat_template == TOKENIZER.chat_template
    text = "pump level=37 ok é"
    assert tokenizer(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == TOKENIZER.eos_token_id


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    threads = torch.get_num_threads()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        build_tiny_model(tmp_path / name, seed=seed, curriculum=SHORT)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert digests(tmp_path / "a")["model.safetensors"] != digests(tmp_path / "c")["model.safetensors"]


def test_a_minute_is_not_needed_to_see_it_learn(tmp_path: Path) -> None:
    losses: list[float] = []
    build_tiny_model(
        tmp_path / "tiny",
        progress=lambda progress: losses.append(progress.loss),
        curriculum=(Phase("drill", steps=45, batch=8, size=10),),
    )
    assert losses[0] > 5.0
    assert sum(losses[-5:]) / 5 < 2.5, "about log(10): digits are known to be digits"


def test_a_phase_ends_as_soon_as_it_is_learned(tmp_path: Path) -> None:
    curriculum = (Phase("drill", steps=30, batch=2, size=8, until=100.0), Phase("ledger", steps=2, batch=1, size=4))
    report = build_tiny_model(tmp_path / "tiny", curriculum=curriculum)
    assert (report.steps, report.complete) == (12, True), "ten steps to judge the first phase, then the second"


def test_training_stops_when_time_is_up_and_says_so(tmp_path: Path) -> None:
    report = build_tiny_model(tmp_path / "tiny", max_seconds=0.0, curriculum=SHORT)
    assert report.steps < 5
    assert not report.complete
    assert (tmp_path / "tiny" / "config.json").exists()


def test_an_occupied_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "notes.txt").write_text("mine")
    with pytest.raises(SpecError, match="already exists"):
        build_tiny_model(tmp_path / "tiny", curriculum=SHORT)
    assert [path.name for path in (tmp_path / "tiny").iterdir()] == ["notes.txt"]


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    build_tiny_model(tmp_path / "tiny", curriculum=SHORT[:1])
    assert (tmp_path / "tiny" / "model.safetensors").exists()


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(progress: TinyProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_tiny_model(tmp_path / "tiny", progress=interrupt, curriculum=SHORT)
    assert list(tmp_path.iterdir()) == []


def test_a_non_finite_loss_is_a_numeric_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "longstraw_core.training.tiny.model.taught_loss",
        lambda model, ids, taught: torch.tensor(float("nan"), requires_grad=True),
    )
    with pytest.raises(NumericError, match="step 0"):
        build_tiny_model(tmp_path / "tiny", curriculum=SHORT)
    assert list(tmp_path.iterdir()) == []
