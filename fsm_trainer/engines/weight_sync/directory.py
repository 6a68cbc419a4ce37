"""Weights as folders of safetensors, one per version: for engines on other machines that share a file system.

A folder is what `from_pretrained` and vLLM's `reload_weights` take for weights: shards and an index. It is written
aside and renamed whole. What a killed publisher left behind is removed by the next one under the same root.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from fsm_trainer.engines.base import Snapshot
from fsm_trainer.engines.weight_sync.image import no_room, read_images, split_tied, unreadable, write_image
from fsm_trainer.engines.weight_sync.transport import BUCKET_BYTES, DIRECTORY, WeightTransport

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
_FOLDER = "fsm-weights-"
_OWNER = "owner"


class DirectoryTransport(WeightTransport):
    """Publishes folders under a root that every engine sees by the same path."""

    def __init__(self, root: str | os.PathLike[str], bucket_bytes: int = BUCKET_BYTES) -> None:
        """`bucket_bytes` is how large a shard becomes, unless it is one tensor, and how much is copied at once."""
        self._root, self._bucket_bytes = Path(root).absolute(), bucket_bytes
        self._folder: Path | None = None
        self._owner: IO[bytes] | None = None
        self._versions: dict[int, Path] = {}

    def publish(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> Snapshot:
        """Write one folder. Raises OSError when the file system is full or refuses."""
        tensors, aliases = split_tied(named_tensors)
        try:
            return self._publish(self._own_folder(), tensors, aliases, version)
        except OSError as error:
            raise no_room(error, tensors.values(), version, f"in {self._root}") from error

    def release(self, version: int) -> None:
        """Remove the version's folder; local readers that mapped it keep what they mapped."""
        folder = self._versions.pop(version, None)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove every version, and the root if nothing else is in it."""
        self._versions.clear()
        if self._folder is not None and self._owner is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._owner.close()
            with suppress(OSError):  # others may publish there, too
                self._root.rmdir()
        self._folder = self._owner = None

    def _publish(self, folder: Path, tensors: dict[str, Tensor], aliases: dict[str, str], version: int) -> Snapshot:
        part, whole = folder / f".part-{version:06d}", folder / f"version-{version:06d}"
        part.mkdir()
        try:
            nbytes = self._write(part, tensors, aliases, version)
            self.release(version)
            part.rename(whole)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        self._versions[version] = whole
        return Snapshot(version, str(whole), nbytes, DIRECTORY)

    def _write(self, folder: Path, tensors: dict[str, Tensor], aliases: dict[str, str], version: int) -> int:
        """Write every shard and, last, the index; returns the bytes of the shards."""
        shards = _cut(tensors, self._bucket_bytes)
        weight_map: dict[str, str] = {}
        nbytes = 0
        for number, names in enumerate(shards, 1):
            shard = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tied = {alias: first for alias, first in aliases.items() if first in names}
            with (folder / shard).open("xb") as file:
                stored = {name: tensors[name] for name in names}
                nbytes += write_image(file, stored, tied, version, self._bucket_bytes)
            weight_map.update(dict.fromkeys(names, shard))
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
        return nbytes

    def _own_folder(self) -> Path:
        """Where the versions go, locked for as long as this process lives; made at the first call."""
        if self._folder is None:
            self._root.mkdir(parents=True, exist_ok=True)
            _remove_orphans(self._root)
            new = Path(tempfile.mkdtemp(prefix=f".{_FOLDER}", dir=self._root))
            try:
                # Another user's engine may have to read it, as it may read any other file of the run.
                new.chmod(0o755)
                self._owner = (new / _OWNER).open("wb")
                _lock(self._owner)
                # Named as one that may be an orphan only once it is locked.
                self._folder = new.rename(self._root / new.name.removeprefix("."))
            except BaseException:
                shutil.rmtree(new, ignore_errors=True)
                raise
        return self._folder


def read_directory(snapshot: Snapshot) -> Iterator[tuple[str, Tensor]]:
    """Yield a folder's tensors, mapped, after all of its shards have been found whole and of that version.

    Raises ValueError otherwise.
    """
    folder = Path(snapshot.location)
    stored: dict[str, set[str]] = {}
    try:
        for name, shard in json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].items():
            stored.setdefault(shard, set()).add(name)
    except OSError as error:
        raise unreadable(error, folder, snapshot) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"weights of version {snapshot.version} are incomplete: {folder / INDEX} is no index of shards ({error})"
        ) from error
    paths = [str(folder / shard) for shard in stored]
    return read_images(paths, snapshot, [frozenset(names) for names in stored.values()])


def _cut(tensors: dict[str, Tensor], bucket_bytes: int) -> list[list[str]]:
    """Names by shard, in order: each as many as fit into a bucket, at least one."""
    shards: list[list[str]] = []
    used = 0
    for name, tensor in tensors.items():
        if not shards or used + tensor.nbytes > bucket_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += tensor.nbytes
    return shards


def _remove_orphans(root: Path) -> None:
    """Remove the folders of publishers that have died, whose lock is free."""
    for folder in root.glob(f"{_FOLDER}*"):
        # Another publisher may be removing it, too. Some file systems lock only what may be written.
        with suppress(FileNotFoundError), (folder / _OWNER).open("r+b") as owner:
            if _lock(owner):
                shutil.rmtree(folder, ignore_errors=True)


def _lock(file: IO[bytes]) -> bool:
    """Lock a file if nobody has; False also where the file system has no locks, so that nothing is removed there."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        return False
    return True
