"""A specification file is accepted exactly, or every wrong field is named with its place and what is allowed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longstraw_core.spec import SpecError, TransactionSpec, canonical_json
from longstraw_core.spec.parse import parse_transaction_spec

MINIMAL = """\
name: demo
model: {snapshot: model, family: qwen3_5_text}
data:
  path: rows.jsonl
"""


def parse(extra: str = "", *overrides: str) -> TransactionSpec:
    return parse_transaction_spec(MINIMAL + extra, "run.yaml", overrides=overrides)


def complaint(extra: str = "", *overrides: str) -> str:
    with pytest.raises(SpecError) as caught:
        parse(extra, *overrides)
    return str(caught.value)


def test_a_minimal_file_gets_the_documented_defaults() -> None:
    spec = parse()
    assert spec.objective.gradient == "exact"
    assert spec.sampling.group_size == 8
    assert spec.objective.clip_low == 0.2


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        ("objectve: {}\n", ["run.yaml:5: objectve", "unknown field", "objective"]),
        ("objective:\n  gradint: exact\n", ["run.yaml:6: objective.gradint", "unknown field", "gradient"]),
        ("objective: {gradient: fast}\n", ["run.yaml:5: objective.gradient", "'fast'", "'response_adapter'"]),
        ("objective: {clip_low: yes}\n", ["objective.clip_low", "'yes'", "valid number"]),
        ("lora: {targets: everything}\n", ["lora.targets", "'everything'", "'attention+mlp'"]),
        ("lora: {rank: 0}\n", ["lora.rank", "0", "greater than or equal to 1"]),
        ("lora: {rank: 010}\n", ["lora.rank", "'010'", "valid integer"]),
        ("lora: {rank: true}\n", ["lora.rank", "True", "valid integer"]),
        ("lora: {alpha: '3'}\n", ["lora.alpha", "'3'", "valid number"]),
        ("sampling: {temperature: 0}\n", ["sampling.temperature", "greater than 0"]),
        ("optimizer: {learning_rate: .nan}\n", ["optimizer.learning_rate", "nan", "finite"]),
        ("optimizer: {learning_rate: .inf}\n", ["optimizer.learning_rate", "inf", "finite"]),
        ("reward: {overlong_max_tokens: 8}\n", ["reward", "overlong_cache_tokens", "together"]),
        ("sampling: 3\n", ["sampling", "must be an object"]),
        ("layout: {context_parallel: 2, expert_parallel: 3}\n", ["layout", "3", "does not divide", "2"]),
        ("name: again\n", ["run.yaml:5: name appears twice"]),
        ("seed: *anchor\n", ["run.yaml:5", "aliases are not accepted"]),
        ("seed: [\n", ["run.yaml:", "not valid YAML"]),
        ("seed: !!binary aGVsbG8=\n", ["run.yaml:5", "type tags", "binary"]),
        ("seed: !!timestamp x\n", ["run.yaml:5", "type tags"]),
        ("seed: !!set {a}\n", ["run.yaml:5", "type tags"]),
        ("seed: !!python/object/apply:os.system [id]\n", ["run.yaml:5", "type tags"]),
        ('storage: {uri: "file://a\\0b"}\n', ["storage.uri"]),
        ("seed: 2024-01-01\n", ["seed", "2024-01-01", "valid integer"]),
        ("seed: -1\n", ["seed", "-1"]),
    ],
)
def test_a_wrong_field_is_named_with_line_value_and_what_is_allowed(extra: str, parts: list[str]) -> None:
    message = complaint(extra)
    for part in parts:
        assert part in message
    assert "\n" not in message


def test_every_wrong_field_gets_its_own_line() -> None:
    message = complaint("lora: {rank: 0, alpha: -1}\nsampling: {group_size: 0}\n")
    assert len(message.splitlines()) == 3


def test_missing_fields_are_named() -> None:
    with pytest.raises(SpecError) as caught:
        parse_transaction_spec("name: demo\n", "run.yaml")
    assert "model: required field is missing" in str(caught.value)
    assert "data: required field is missing" in str(caught.value)


@pytest.mark.parametrize("seed", [9007199254740993, 2**53, 10**30])
def test_a_seed_that_json_readers_would_round_is_refused_digit_for_digit(seed: int) -> None:
    assert str(seed) in complaint(f"seed: {seed}\n")


@pytest.mark.parametrize("seed", [0, 2**53 - 1, 9007199254740991])
def test_every_accepted_seed_keeps_all_digits(seed: int) -> None:
    spec = parse(f"seed: {seed}\n")
    assert spec.seed == seed
    again = parse_transaction_spec(canonical_json(spec), "parameter spec")
    assert again.seed == seed


@pytest.mark.parametrize("field", ["sampling.group_size", "sampling.max_response_tokens", "layout.page_tokens"])
def test_the_whole_kind_of_oversized_integers_is_refused(field: str) -> None:
    assert field in complaint("", f"{field}=9007199254740993")


def test_scientific_notation_without_a_point_is_a_number() -> None:
    assert parse("optimizer: {learning_rate: 1e-5}\n").optimizer.learning_rate == 1e-5


def test_overrides_replace_nested_fields_and_are_validated_like_the_file() -> None:
    spec = parse("", "objective.gradient=stopgrad", "seed=7", "lora.targets=[q_proj, k_proj]")
    assert spec.objective.gradient == "stopgrad"
    assert spec.seed == 7
    assert spec.lora.targets == ("q_proj", "k_proj")
    assert "objective.gradient" in complaint("", "objective.gradient=fast")
    assert "FIELD.PATH=VALUE" in complaint("", "objective.gradient")
    assert "not a group of fields" in complaint("", "name.inner=3")


@pytest.mark.parametrize("text", ["", "# only a comment\n", "[]", "3", "null", b"\xff\xfe", "\0"])
def test_what_is_no_mapping_is_refused(text: str | bytes) -> None:
    with pytest.raises(SpecError, match=r"run\.yaml"):
        parse_transaction_spec(text, "run.yaml")


def test_deep_nesting_and_huge_files_are_refused_without_a_crash() -> None:
    with pytest.raises(SpecError):
        parse_transaction_spec("[" * 100_000, "run.yaml")
    with pytest.raises(SpecError, match="too long"):
        parse_transaction_spec("#" * (2 << 20), "run.yaml")


@given(st.text(max_size=200))
def test_no_random_text_ends_in_anything_but_a_spec_error(text: str) -> None:
    with pytest.raises(SpecError, match=r"run\.yaml"):
        parse_transaction_spec(text, "run.yaml")


def test_parsing_what_was_written_gives_the_same_specification() -> None:
    spec = parse("lora: {rank: 8, targets: [q_proj]}\nobjective: {importance_cap: null}\n")
    assert parse_transaction_spec(canonical_json(spec), "again") == spec
