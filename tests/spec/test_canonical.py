"""Canonical JSON against vectors written from the rules of RFC 8785, not from the library under test."""

import hashlib
import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longstraw_core.spec import IntegrityError, SpecError, canonical_json, parse_canonical_json, sha256_digest

NUMBERS = [
    # RFC 8785 appendix B: IEEE 754 bits and the one text allowed for them (ECMAScript Number::toString)
    ("0000000000000000", "0"),
    ("8000000000000000", "0"),
    ("0000000000000001", "5e-324"),
    ("8000000000000001", "-5e-324"),
    ("7fefffffffffffff", "1.7976931348623157e+308"),
    ("ffefffffffffffff", "-1.7976931348623157e+308"),
    ("4340000000000000", "9007199254740992"),
    ("c340000000000000", "-9007199254740992"),
    ("4430000000000000", "295147905179352830000"),
    ("44b52d02c7e14af5", "9.999999999999997e+22"),
    ("44b52d02c7e14af6", "1e+23"),
    ("44b52d02c7e14af7", "1.0000000000000001e+23"),
    ("444b1ae4d6e2ef4e", "999999999999999700000"),
    ("444b1ae4d6e2ef4f", "999999999999999900000"),
    ("444b1ae4d6e2ef50", "1e+21"),
    ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
    ("3eb0c6f7a0b5ed8d", "0.000001"),
    ("41b3de4355555553", "333333333.3333332"),
    ("41b3de4355555554", "333333333.33333325"),
    ("41b3de4355555555", "333333333.3333333"),
    ("41b3de4355555556", "333333333.3333334"),
    ("41b3de4355555557", "333333333.33333343"),
    ("becbf647612f3696", "-0.0000033333333333333333"),
    ("43143ff3c1cb0959", "1424953923781206.2"),
]

STRINGS = [
    # section 3.2.2.2: two-character escapes where they exist, lower-case \u00xx below 0x20, everything else as it is
    ("\b\t\n\f\r", '"\\b\\t\\n\\f\\r"'),
    ('"\\', '"\\"\\\\"'),
    ("/", '"/"'),
    ("\x00\x0f\x1f", '"\\u0000\\u000f\\u001f"'),
    ("\x7f\x80\u20ac", '"\x7f\x80\u20ac"'),
    ("\u2028\u2029", '"\u2028\u2029"'),
    ("\U0001f600", '"\U0001f600"'),
    ("e\u0301 is not \u00e9", '"e\u0301 is not \u00e9"'),
]


@pytest.mark.parametrize(("bits", "text"), NUMBERS)
def test_numbers_are_written_as_the_rfc_says(bits: str, text: str) -> None:
    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical_json(number) == text.encode()


@pytest.mark.parametrize(("value", "text"), STRINGS)
def test_strings_are_escaped_as_the_rfc_says(value: str, text: str) -> None:
    assert canonical_json(value) == text.encode()


def test_keys_are_sorted_by_utf16_code_units_not_by_code_points() -> None:
    # section 3.2.3: U+1F600 is the surrogates D83D DE00, which sort before U+FB33
    keys = ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]
    value = {key: number for number, key in reversed(list(enumerate(keys)))}
    expected = "{" + ",".join(f"{json.dumps(key, ensure_ascii=False)}:{keys.index(key)}" for key in keys) + "}"
    assert canonical_json(value) == expected.encode()
    assert sorted(keys) != keys


def test_structure_has_no_white_space_and_literals_are_lower_case() -> None:
    value = {"b": [True, False, None, {}, []], "a": {"y": 1, "x": -1.5}}
    assert canonical_json(value) == b'{"a":{"x":-1.5,"y":1},"b":[true,false,null,{},[]]}'


@pytest.mark.parametrize("number", [2**53, -(2**53), 2**53 + 1, 10**400])
def test_integers_that_json_readers_round_are_refused_not_rounded(number: int) -> None:
    with pytest.raises(SpecError, match="canonical JSON"):
        canonical_json({"seed": number})


@pytest.mark.parametrize("number", [0, 2**53 - 1, -(2**53 - 1)])
def test_the_largest_exact_integers_keep_every_digit(number: int) -> None:
    assert canonical_json(number) == str(number).encode()
    assert parse_canonical_json(str(number).encode(), name="n") == number


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, {1: 2}, b"bytes", {"a": object()}, "\ud800", {"\udfff": 1}]
)
def test_what_has_no_json_form_is_refused(value: object) -> None:
    with pytest.raises(SpecError, match="canonical JSON"):
        canonical_json(value)


@pytest.mark.parametrize(
    "content",
    [
        b"", b" 1", b"1 ", b"1\n", b"01", b"+1", b"-0", b"-0.0", b"1.0", b"1e2", b"1E+21", b"1e21", b"0.10", b".5",
        b"NaN", b"Infinity", b"-Infinity", b"9007199254740993", b"-9007199254740993", b"9" * 5000, b"1e999",
        b'{"b":1,"a":2}', b'{"a":1,"a":1}', b'{"a": 1}', b"[1, 2]", b'"\\/"', b'"\\u0061"', b'"\\u001F"', b'"\\u0008"',
        b'"\\ud83d\\ude00"', b'"\\ud800"', b'"\x1f"', b"'a'", b"\xff", b"\xef\xbb\xbf1", b"[1", b"[1,]", b"{}{}",
        b"[" * 200_000, "1".encode("utf-16"), b"True",
    ],
    ids=lambda content: repr(content[:20]),
)  # fmt: skip
def test_any_other_form_is_refused_with_the_name_of_the_file(content: bytes) -> None:
    with pytest.raises(IntegrityError, match=r"^receipt\.json: "):
        parse_canonical_json(content, name="receipt.json")


def test_an_integral_float_beyond_2_to_the_53_reads_back_as_a_float() -> None:
    for number in (9007199254740992.0, 1e20, -1e20, 999999999999999900000.0):
        value = parse_canonical_json(canonical_json({"gradient_norm": number}), name="m")
        assert value == {"gradient_norm": number}
        assert isinstance(value["gradient_norm"], float)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_one_value_has_one_byte_form_and_it_reads_back_equal(value: object) -> None:
    content = canonical_json(value)
    assert parse_canonical_json(content, name="x") == value
    assert json.loads(content, parse_int=float) == value
    assert canonical_json(json.loads(json.dumps(value, indent=2))) == content


def test_digests_are_those_of_hashlib() -> None:
    assert sha256_digest(b"") == "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert sha256_digest(b"abc") == "sha256:" + hashlib.sha256(b"abc").hexdigest()
