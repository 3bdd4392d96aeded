"""Which rows transaction t reads: a pure function of the row count, the seed and t, so a run can resume anywhere."""

import hashlib
from dataclasses import dataclass

from longstraw_core.spec import DataRefused


@dataclass(frozen=True)
class Selection:
    """Rows of one transaction, as positions among the eligible rows."""

    indices: tuple[int, ...]
    position: int
    """Rows read by all earlier transactions together."""
    epoch: int
    """How often all rows had been read before the first row of this transaction."""


def select_rows(count: int, *, per_transaction: int, transaction: int, seed: int, shuffle: bool) -> Selection:
    """Return the rows of `transaction` (1, 2, ...) out of `count` eligible rows.

    Epochs follow each other without a gap, each a seeded permutation of all rows (file order when `shuffle` is off).
    A transaction that spans two epochs must not meet a row twice: rows of the new epoch that it has already read at
    the end of the old one wait until right after it. Every epoch still reads every row exactly once.

    Raises:
        DataRefused: there are fewer eligible rows than one transaction needs.
    """
    if per_transaction < 1 or transaction < 1:
        raise ValueError(f"per_transaction {per_transaction} and transaction {transaction} must be at least 1")
    if count < per_transaction:
        raise DataRefused(
            f"{count} usable rows, but data.prompts_per_transaction is {per_transaction}; "
            "add rows or lower data.prompts_per_transaction"
        )
    position = (transaction - 1) * per_transaction
    epoch, offset = divmod(position, count)
    order = _epoch_order(epoch, count, per_transaction, seed, shuffle)
    chosen = order[offset : offset + per_transaction]
    missing = per_transaction - len(chosen)
    if missing:
        chosen += _after_tail(_permutation(epoch + 1, count, seed, shuffle), chosen, missing)[:missing]
    return Selection(indices=tuple(chosen), position=position, epoch=epoch)


def _epoch_order(epoch: int, count: int, per_transaction: int, seed: int, shuffle: bool) -> list[int]:
    """Return the order in which `epoch` is read, after the adjustment at its start.

    The adjustment depends on the end of the epoch before, so the walk starts at the last epoch that begins together
    with a transaction, at most `per_transaction` epochs back.
    """
    first = epoch
    while first * count % per_transaction:
        first -= 1
    order = _permutation(first, count, seed, shuffle)
    for current in range(first + 1, epoch + 1):
        carried = current * count % per_transaction
        following = _permutation(current, count, seed, shuffle)
        order = _after_tail(following, order[count - carried :], per_transaction - carried) if carried else following
    return order


def _after_tail(order: list[int], tail: list[int], needed: int) -> list[int]:
    """Move rows of `tail` out of the first `needed` places of `order`, keeping the rest in sequence."""
    seen = set(tail)
    head = [row for row in order if row not in seen][:needed]
    taken = set(head)
    return head + [row for row in order if row not in taken]


def _permutation(epoch: int, count: int, seed: int, shuffle: bool) -> list[int]:
    """Return all rows sorted by a keyed digest: the same on every platform and Python version."""
    if not shuffle:
        return list(range(count))
    key = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=32).digest()
    return sorted(
        range(count),
        key=lambda row: hashlib.blake2b(row.to_bytes(8, "big"), key=key, digest_size=16).digest(),
    )
