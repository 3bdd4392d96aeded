"""Parquet files that unpack to far more than they have bytes are refused before that, and long rows do not add up."""

import os
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from longstraw_core.rewards import parquet_bounds, row_sources
from longstraw_core.rewards.parquet_bounds import batch_rows, row_sizes
from longstraw_core.rewards.row_sources import SourceRow, open_source
from longstraw_core.rewards.rows import RowRefused
from longstraw_core.spec import DataRefused

from .conftest import dapo_row

COLUMNS = {"data_source", "prompt", "ability", "reward_model", "extra_info"}


def rows_of(path: Path) -> list[SourceRow]:
    return list(open_source(path, "rows.data").rows())


def test_a_row_group_that_unpacks_to_too_much_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parquet_bounds.MAX_ROW_GROUP_BYTES == 2**30
    monkeypatch.setattr(parquet_bounds, "MAX_ROW_GROUP_BYTES", 2**24)
    path = tmp_path / "rows.data"
    letters = "a" * 2**23
    column = pyarrow.array([letters + str(number) for number in range(4)])
    schema = pyarrow.schema([("data_source", pyarrow.string())])
    with parquet.ParquetWriter(path, schema, compression="zstd", use_dictionary=False) as writer:
        writer.write_table(pyarrow.table({"data_source": column.slice(0, 1)}))
        writer.write_table(pyarrow.table({"data_source": column}))
    assert path.stat().st_size < 200_000
    before = pyarrow.total_allocated_bytes()
    source = open_source(path, "rows.data")
    with pytest.raises(DataRefused, match=r"rows\.data: row group 1 unpacks to 33\d{6} bytes, .*fewer rows per row"):
        next(source.rows())
    assert pyarrow.total_allocated_bytes() - before < 2**20, "not even the first group was read"


def test_a_column_that_is_not_read_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_bounds, "MAX_ROW_GROUP_BYTES", 10_000)
    table = pyarrow.Table.from_pylist([dapo_row("one")])
    parquet.write_table(table.append_column("embedding", [[os.urandom(50_000)]]), str(tmp_path / "rows.data"))
    assert [row.fields for row in rows_of(tmp_path / "rows.data")] == [dapo_row("one")]


def test_a_row_group_with_too_many_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_bounds, "MAX_ROW_GROUP_VALUES", 1000)
    path = tmp_path / "rows.data"
    parquet.write_table(pyarrow.table({"prompt": [[1] * 1001]}), str(path))
    assert path.stat().st_size < 2000
    with pytest.raises(DataRefused, match=r"row group 0 has 1001 values, more than 1000"):
        rows_of(path)


def test_a_row_that_repeats_one_stored_value_is_measured_and_refused_alone(tmp_path: Path) -> None:
    text = pyarrow.array(["a" * 2**20])
    repeated = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 100_001, pyarrow.int32()), text)
    path = tmp_path / "rows.data"
    column = pyarrow.ListArray.from_arrays([0, 1, 100_001], repeated)  # 97 GiB in the second row
    parquet.write_table(pyarrow.table({"prompt": column}), str(path), dictionary_pagesize_limit=2**30)
    assert path.stat().st_size < 100_000
    short, long = rows_of(path)
    assert short.fields == {"prompt": ["a" * 2**20]}
    assert isinstance(long.fields, RowRefused)
    assert "longer than 67108864 bytes" in str(long.fields)
    assert list(open_source(path, "rows.data").fetch([(0, 0), (1, 1)])) == [short.fields, None]


def test_the_longest_row_is_the_same_in_both_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_sources, "MAX_ROW_BYTES", 3000)
    path = tmp_path / "rows.data"
    parquet.write_table(pyarrow.Table.from_pylist([dapo_row("short"), dapo_row("x" * 3000)]), str(path))
    kept, refused = rows_of(path)
    assert kept.fields == dapo_row("short")
    assert isinstance(refused.fields, RowRefused)


def test_sizes_are_those_of_the_text_in_every_nesting() -> None:
    kinds: dict[str, Any] = {
        "flat": pyarrow.array(["ab", None, "é"]),
        "large": pyarrow.array(["ab", None, "é"], pyarrow.large_string()),
        "bytes": pyarrow.array([b"ab", None, b"12"], pyarrow.binary()),
        "coded": pyarrow.array(["ab", None, "é"]).dictionary_encode(),
    }
    for name, array in kinds.items():
        assert row_sizes(pyarrow.record_batch({name: array})).tolist() == [18, 16, 18], name
    lists = pyarrow.array([["abc", "d"], [], None, ["ef"]])
    assert row_sizes(pyarrow.record_batch({"list": lists})).tolist() == [52, 16, 16, 34]
    assert row_sizes(pyarrow.record_batch({"list": lists}).slice(3)).tolist() == [34]
    fixed = pyarrow.array([["a", "bc"], ["def", ""]], pyarrow.list_(pyarrow.string(), 2))
    assert row_sizes(pyarrow.record_batch({"fixed": fixed}).slice(1)).tolist() == [51]
    maps = pyarrow.array([[("k", "value")], []], pyarrow.map_(pyarrow.string(), pyarrow.string()))
    assert row_sizes(pyarrow.record_batch({"map": maps})).tolist() == [54, 16]
    structs = pyarrow.array([{"a": "xy", "b": 1}, {"a": "z", "b": None}])
    assert row_sizes(pyarrow.record_batch({"struct": structs, "flat": kinds["flat"].slice(0, 2)})).tolist() == [68, 65]


@pytest.mark.parametrize(("length", "rows"), [(10, 256), (2**20, 127), (2**26, 1)])
def test_long_rows_are_read_a_few_at_a_time(length: int, rows: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.data"
    column = pyarrow.array(["a" * length] * 4)
    parquet.write_table(pyarrow.table({"prompt": column}), str(path), use_dictionary=False)
    assert batch_rows(parquet.ParquetFile(str(path)).metadata.row_group(0), COLUMNS) == rows
