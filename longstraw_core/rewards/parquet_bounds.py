"""What keeps a small Parquet file from filling the memory: bounds on its footer's figures and on what a row unpacks to.

Pages are compressed, so a file of some kilobytes can hold gigabytes. A value that repeats is stored once besides, and a
row that repeats it is measured before it becomes Python values.
"""

from typing import Any, cast

import numpy as np

MAX_ROW_GROUP_BYTES = 2**30
"""Uncompressed bytes of the columns that are read; writers make groups of 128 MiB to 1 GiB."""
MAX_ROW_GROUP_VALUES = 2**26
"""Values of one column, elements of lists counted one by one."""
MAX_BATCH_ROWS = 256
BATCH_BYTES = 128 * 2**20
_VALUE_BYTES = 16
"""What a number, or one element of a list, counts besides its text."""


def row_group_problem(group: Any, columns: set[str]) -> str | None:
    """Say why a row group would take too much memory by its own figures, and what to do, or None.

    Args:
        group: `pyarrow.parquet.RowGroupMetaData`.
        columns: names of the top-level columns that are read.
    """
    chunks = _chunks(group, columns)
    size = sum(chunk.total_uncompressed_size for chunk in chunks)
    values = max([group.num_rows, *(chunk.num_values for chunk in chunks)])
    if size > MAX_ROW_GROUP_BYTES:
        return f"unpacks to {size} bytes, more than {MAX_ROW_GROUP_BYTES}; write fewer rows per row group"
    if values > MAX_ROW_GROUP_VALUES:
        return f"has {values} values, more than {MAX_ROW_GROUP_VALUES}; write fewer rows per row group"
    return None


def batch_rows(group: Any, columns: set[str]) -> int:
    """Return how many rows of a row group to read at a time, from 1 to 256: fewer where rows are long."""
    size = sum(chunk.total_uncompressed_size for chunk in _chunks(group, columns))
    return max(1, min(MAX_BATCH_ROWS, BATCH_BYTES * group.num_rows // max(size, 1)))


def _chunks(group: Any, columns: set[str]) -> list[Any]:
    chunks = [group.column(index) for index in range(group.num_columns)]
    return [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns]


def row_sizes(batch: Any) -> np.ndarray:
    """Return int64 [rows]: bytes of text of each row of a `pyarrow.RecordBatch`, plus 16 for every value."""
    sizes = np.zeros(batch.num_rows, dtype=np.int64)
    for column in batch.columns:
        sizes += _sizes(column)
    return sizes


def _sizes(array: Any) -> np.ndarray:
    """Return int64 [elements]: the size of each element of a `pyarrow.Array`."""
    import pyarrow
    import pyarrow.compute

    kind = array.type
    types = cast(Any, pyarrow.types)
    if types.is_dictionary(kind):
        lengths = np.append(_sizes(array.dictionary), _VALUE_BYTES)  # the last stands for a null
        return lengths[array.indices.fill_null(len(lengths) - 1).to_numpy(zero_copy_only=False)]
    if types.is_struct(kind):
        fields = [_sizes(array.field(index)) for index in range(kind.num_fields)]
        return sum(fields, np.full(len(array), _VALUE_BYTES, dtype=np.int64))
    if types.is_map(kind):
        return _spans(array.offsets, _sizes(array.keys) + _sizes(array.items))
    if types.is_list(kind) or types.is_large_list(kind):
        return _spans(array.offsets, _sizes(array.values))
    if types.is_fixed_size_list(kind):
        size = kind.list_size
        elements = _sizes(array.values)[array.offset * size : (array.offset + len(array)) * size]
        return elements.reshape(len(array), size).sum(axis=1) + _VALUE_BYTES
    if any(test(kind) for test in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)):
        lengths = cast(Any, pyarrow.compute).binary_length(array).fill_null(0)
        return lengths.to_numpy(zero_copy_only=False).astype(np.int64) + _VALUE_BYTES
    return np.full(len(array), _VALUE_BYTES, dtype=np.int64)


def _spans(offsets: Any, elements: np.ndarray) -> np.ndarray:
    """Return int64 [lists]: the sum over the elements of each list."""
    totals = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(elements)])
    ends = offsets.to_numpy(zero_copy_only=False)
    return totals[ends[1:]] - totals[ends[:-1]] + _VALUE_BYTES
