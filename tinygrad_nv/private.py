"""Directories and files that no other user may write: what is kept on disk and used again, code among it.

Protocol: `refusal(place)` says why others may write a directory, or put another in its place; "" where only
this user and root can. `make` makes one for this user alone. `read` gives a file that is this user's or
root's, and no link; `write` makes one, beside its place and renamed. `write_sealed` adds a keyed hash of name
and content, and `read_sealed` gives the content where that fits: files that were copied here from elsewhere,
cut or changed are None. The key is random and lies in the directory `root`, readable for this user alone.

Where the system knows no owners (no os.getuid), everything is trusted as it was made.
"""
from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

KEY = "tinygrad_nv.key"
KEY_BYTES = SEAL_BYTES = 32
# limit: bytes of a compiled file in the cache directory; captured steps of a large model have some MB
MOST_BYTES = 1 << 30
EVERYONE = "everyone may write it"
OTHERS_WRITE, GROUP_WRITES = stat.S_IWOTH, stat.S_IWGRP
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


# **** directories ****

def refusal(place: Path) -> str:
    """Why a directory is not this user's alone, "" where it is, or is not there. One of this user that its
    group may write, as a umask of 002 makes them, is made 0700, and a line says so."""
    if not hasattr(os, "getuid"): return ""
    place = place.absolute()
    real = Path(os.path.realpath(place))
    for link in (place, *place.parents):
        if (found := _lstat(link)) is not None and stat.S_ISLNK(found.st_mode) and not _is_trusted(found):
            return f"the link {link} belongs to {owner(found)}"
    # the owner of the root of the file system is trusted: in a user namespace that is not always number 0
    system = os.stat("/").st_uid
    for parent in real.parents:
        if (found := _lstat(parent)) is None: continue
        if not _is_trusted(found) and found.st_uid != system: return f"{parent} belongs to {owner(found)}"
        if found.st_mode & OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
            return f"everyone may rename it: {parent} has mode {_mode(found)}, without the sticky bit"
    found = _lstat(real)
    return "" if found is None or not stat.S_ISDIR(found.st_mode) else _writers(real, found)


def _writers(place: Path, found: os.stat_result) -> str:
    """Returns who else may write a directory."""
    if not _is_trusted(found): return f"it belongs to {owner(found)}"
    if not found.st_mode & (OTHERS_WRITE | GROUP_WRITES): return ""
    if found.st_mode & OTHERS_WRITE: return f"{EVERYONE}: its mode is {_mode(found)}"
    why = f"its group may write it: its mode is {_mode(found)}"
    if found.st_uid != os.getuid(): return why
    try: os.chmod(place, 0o700)
    except OSError: return why
    print(f"tinygrad-nv: the group of {place} could write it (mode {_mode(found)}); its mode is 0700 now",
          file=sys.stderr)
    return ""


def make(place: Path) -> None:
    """Makes a directory, and those above it that are missing, for this user alone, whatever the umask is."""
    missing = [each for each in (place, *place.parents) if _lstat(each) is None]
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError): os.mkdir(each, 0o700)
    if not place.is_dir(): raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))


def is_mine(place: Path) -> bool:
    """Whether a directory is this user's."""
    try: return os.stat(place).st_uid == os.getuid()
    except OSError: return False


def owner(found: os.stat_result) -> str:
    """The name of an owner, and the number."""
    try:
        import pwd
        return f"{pwd.getpwuid(found.st_uid).pw_name} (uid {found.st_uid})"
    except (ImportError, KeyError): return f"uid {found.st_uid}"


def _is_trusted(found: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or found.st_uid in (0, os.getuid())


def _mode(found: os.stat_result) -> str: return f"{found.st_mode & 0o7777:04o}"


def _lstat(path: Path) -> os.stat_result | None:
    try: return os.lstat(path)
    except OSError: return None


# **** files ****

def open_private(path: str | Path) -> BufferedReader:
    """Opens a file to read it. Raises OSError for a link, for what is no regular file (a FIFO would wait for
    a writer), and for one of another user."""
    found = os.fstat(handle := os.open(path, os.O_RDONLY | NO_LINK))
    if stat.S_ISREG(found.st_mode) and _is_trusted(found): return os.fdopen(handle, "rb")
    os.close(handle)
    if not stat.S_ISREG(found.st_mode): raise OSError(errno.EINVAL, "it is no regular file", str(path))
    raise PermissionError(errno.EACCES, f"it belongs to {owner(found)}", str(path))


def read(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """The content of a file that `open_private` opens. Raises OSError for a larger one."""
    with open_private(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes, and at most {most} are read", str(path))
        return file.read(most)


def write(path: Path, data: bytes | BinaryIO) -> None:
    """Writes a file for this user alone, of bytes or what another has, beside its place, and renames it, so
    that a reader sees all of it or nothing. A failure leaves nothing behind."""
    make(path.parent)
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:40]}.", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            if isinstance(data, bytes): file.write(data)
            else: shutil.copyfileobj(data, file)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError): os.unlink(name)
        raise


def remove(path: Path) -> None:
    """Removes what has a name, if there is any."""
    if (found := _lstat(path)) is None: return
    if stat.S_ISDIR(found.st_mode): shutil.rmtree(path)
    else: path.unlink()


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Held by one process at a time, where the system has file locks; the system gives it up where that
    process ends."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o666)
    try:
        with contextlib.suppress(ImportError):      # absent on Windows
            import fcntl
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally: os.close(handle)


# **** seals ****

def write_sealed(path: Path, data: bytes, root: Path | None = None) -> None:
    """Writes a file with its seal. `root` has the key; by default it is the folder above the file's."""
    if path.is_dir() and not path.is_symlink(): remove(path)
    seal_key = key(root or path.parent.parent)
    write(path, data + (seal(seal_key, path.name, data) if seal_key else b""))


def read_sealed(path: Path, root: Path | None = None) -> bytes | None:
    """The content of a file that `write_sealed` wrote; None of any other, and where it cannot be known."""
    try: data = read(path)
    except OSError: return None
    return content(key(root or path.parent.parent), path.name, data)


def content(seal_key: bytes | None, name: str, data: bytes) -> bytes | None:
    """Data without its seal; None where that does not fit."""
    if seal_key is None or len(data) < SEAL_BYTES: return None
    inside, found = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
    return inside if hmac.compare_digest(seal(seal_key, name, inside), found) else None


def seal(seal_key: bytes, name: str, data: bytes) -> bytes:
    """The keyed hash of a name and what has it."""
    made = hashlib.blake2b(f"{name}\0".encode(), key=seal_key, digest_size=SEAL_BYTES)
    made.update(data)
    return made.digest()


def key(root: Path) -> bytes | None:
    """The key of a directory, made where there is none; None where it can be neither read nor made."""
    path = root / KEY
    for _ in range(2):
        try:
            if len(found := read(path)) == KEY_BYTES: return found
        except PermissionError as error:
            if error.errno == errno.EACCES and not os.access(root, os.W_OK): return None
        except OSError: pass
        if not _make_key(path): return None
    return None


def _is_key(path: Path) -> bool:
    try: return len(read(path)) == KEY_BYTES
    except OSError: return False


def _make_key(path: Path) -> bool:
    """Puts a new key in the place of what is none. Of threads or processes that do at once the first wins:
    what it has sealed meanwhile stays readable."""
    try:
        make(path.parent)
        handle, name = tempfile.mkstemp(prefix=".key.", dir=path.parent)
        try:
            with open(handle, "wb") as file: file.write(secrets.token_bytes(KEY_BYTES))
            try: os.link(name, path)
            except FileExistsError:
                if not _is_key(path):
                    remove(path)
                    os.replace(name, path)
            except OSError: os.replace(name, path)      # a file system without links
        finally:
            with contextlib.suppress(FileNotFoundError): os.unlink(name)
    except OSError: return False
    return True
