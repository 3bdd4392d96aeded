"""Content-addressed artifact store, trees, receipts and verification; knows no stage and no model."""

from longstraw_core.artifacts.external import (
    check_external,
    describe_external_file,
    describe_external_tree,
    left_out,
    read_external_manifest,
    require_external,
)
from longstraw_core.artifacts.faults import Fault, VerifyReport
from longstraw_core.artifacts.file_store import FileStore
from longstraw_core.artifacts.garbage import GarbageReport, collect_garbage
from longstraw_core.artifacts.policy import PolicyMoved, advance_policy, check_policy_parent, read_policy
from longstraw_core.artifacts.receipts import (
    ReceiptPlace,
    find_receipt,
    list_receipts,
    read_receipt,
    receipt_name,
    split_receipt_uri,
    write_receipt,
)
from longstraw_core.artifacts.signing import ReceiptKeys, keys_from_environment
from longstraw_core.artifacts.snapshots import register_snapshot
from longstraw_core.artifacts.store import AlreadyPublished, Store, open_store, path_of_file_uri
from longstraw_core.artifacts.trees import (
    build_tree,
    check_directory,
    materialize_tree,
    publish_manifest,
    publish_tree,
    read_manifest,
)
from longstraw_core.artifacts.verify import verify_store
from longstraw_core.artifacts.workdir import seal_directory, unseal_directory, verify_directory

__all__ = [
    "AlreadyPublished",
    "Fault",
    "FileStore",
    "GarbageReport",
    "PolicyMoved",
    "ReceiptKeys",
    "ReceiptPlace",
    "Store",
    "VerifyReport",
    "advance_policy",
    "build_tree",
    "check_directory",
    "check_external",
    "check_policy_parent",
    "collect_garbage",
    "describe_external_file",
    "describe_external_tree",
    "find_receipt",
    "keys_from_environment",
    "left_out",
    "list_receipts",
    "materialize_tree",
    "open_store",
    "path_of_file_uri",
    "publish_manifest",
    "publish_tree",
    "read_external_manifest",
    "read_manifest",
    "read_policy",
    "read_receipt",
    "receipt_name",
    "register_snapshot",
    "require_external",
    "seal_directory",
    "split_receipt_uri",
    "unseal_directory",
    "verify_directory",
    "verify_store",
    "write_receipt",
]
