"""A file is written whole, and nothing but a file is replaced."""

import os
import stat
from pathlib import Path

import pytest

from longstraw_core.spec import SpecError
from longstraw_core.stages.whole_file import write_whole


def test_a_file_is_made_with_its_directory_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    for content in (b"first", b""):
        write_whole(path, content)
        assert path.read_bytes() == content
    assert os.listdir(path.parent) == ["file"]


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link, tmp_path):
        with pytest.raises(SpecError, match="not a regular file"):
            write_whole(path, b"content")
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    assert link.is_symlink()
