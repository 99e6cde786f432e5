"""Files that are written whole, on disks that fail and on file systems that lack `fsync`."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxpipe._durable import (
    DiskError,
    failed_write,
    fsync,
    fsync_tree,
    rename,
    write_file,
    write_output,
)

WRITES: dict[str, Callable[[Path], None]] = {
    "write_file": lambda file: write_file(file, "new"),
    "rename": lambda file: rename(file.with_name("source"), file),
    "fsync": lambda file: fsync(file.parent),
    "fsync_tree": lambda file: fsync_tree(file.parent),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "source").write_text("new")
    (tmp_path / "file").write_text("old")
    return tmp_path / "file"


def fail_fsync(monkeypatch, number: int, fails: Callable[[int], bool]) -> None:
    """Makes `fsync` fail for files or folders, told by their mode."""

    def fsync(descriptor: int) -> None:
        if fails(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
@pytest.mark.parametrize("write", WRITES)
def test_a_file_system_without_fsync_of_folders_is_no_error(write, number, file, monkeypatch):
    fail_fsync(monkeypatch, number, stat.S_ISDIR)
    WRITES[write](file)
    assert file.read_text() == ("old" if "fsync" in write else "new")


@pytest.mark.parametrize("write", WRITES)
def test_a_disk_that_fails_under_a_folder_is_an_error_with_a_name(write, file, monkeypatch):
    fail_fsync(monkeypatch, errno.EIO, stat.S_ISDIR)
    with pytest.raises(OSError, match="Input/output error") as error:
        WRITES[write](file)
    assert error.value.errno == errno.EIO
    assert error.value.filename == str(file if write == "write_file" else file.parent)


def test_a_disk_that_fails_under_a_file_leaves_the_old_one(file, monkeypatch):
    fail_fsync(monkeypatch, errno.EIO, stat.S_ISREG)
    with pytest.raises(OSError, match=str(file)):
        write_file(file, "new")
    assert file.read_text() == "old"
    assert {path.name for path in file.parent.iterdir()} == {"file", "source"}


def test_a_folder_that_may_be_written_to_and_not_read_is_no_error(file, monkeypatch):
    open_ = os.open

    def refuse(path, flags, *args) -> int:
        if Path(path).is_dir():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    write_file(file, "new")
    assert file.read_text() == "new"


def test_a_file_that_may_not_be_read_is_an_error(file, monkeypatch):
    def refuse(path, flags) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError, match=str(file)):
        fsync(file)


def test_outputs_follow_links_and_never_replace_a_device_or_a_pipe(file: Path):
    link, pipe = file.with_name("link"), file.with_name("pipe")
    link.symlink_to(file)
    write_output(link, "new")
    assert link.is_symlink() and file.read_text() == "new"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="No such device or address"):  # and does not wait
        write_output(pipe, "new")
    assert pipe.is_fifo()
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_output(pipe, "new")
    assert os.read(reader, 10) == b"new"
    os.close(reader)
    with pytest.raises(IsADirectoryError):
        write_output(file.parent, "new")
    write_output(file.with_name("another"), "new")
    assert file.with_name("another").read_text() == "new"


def test_a_wrong_path_is_the_users_error_and_a_full_disk_is_not():
    assert isinstance(failed_write("x", OSError(errno.ENOENT, "x")), ValueError)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
        assert isinstance(failed_write("x", OSError(number, "x")), DiskError)
