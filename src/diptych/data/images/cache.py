"""A cache of cut images on a local disk, shared by all processes of a machine.

In: an image's hash and its patches, as bytes before normalising. Out: the same bytes in a later
epoch, without decoding. An epoch reads every image once before any comes again, so nothing is
evicted: what came last would be what is needed last. When the cache is full, it takes no more.

One file per image: a header (magic, number of patches, bytes of a patch, hash of the rest), then
the bytes. A file that is not whole is as good as none, and is written again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
from pathlib import Path

import numpy as np
import xxhash

from diptych.core.files import replacing

_LOG = logging.getLogger(__name__)

_HEADER = struct.Struct("<8sIIQ")
_MAGIC = b"diptych1"
_TOTAL = struct.Struct("<Q")
_TOTAL_NAME = "num_bytes"


class ImageCache:
    """Cut images of one maker in one folder; safe to use from several processes.

    Attributes:
        takes_more: whether there is room, as far as this process knows.
    """

    def __init__(self, folder: Path, *, max_bytes: int, maker_sha256: str) -> None:
        """Name the folder; nothing is read or written yet.

        Args:
            folder: may hold the images of several processors, which share its bound.
            max_bytes: how much all its files may hold together.
            maker_sha256: the processor that cut them; another one's are not found.
        """
        self._folder = folder
        self._images = folder / maker_sha256[:16]
        self._max_bytes = max_bytes
        self.takes_more = True

    def get(self, image_hash: str) -> np.ndarray | None:
        """Return an image's patches, [p, d] uint8, or None where the cache has none."""
        try:
            with self._path(image_hash).open("rb", buffering=0) as file:
                content = np.empty(os.fstat(file.fileno()).st_size, dtype=np.uint8)
                num_read = file.readinto(content.data)
        except OSError:
            return None
        if num_read != content.size or num_read < _HEADER.size:
            return None
        magic, num_patches, width, digest = _HEADER.unpack_from(content.data)
        patches = content[_HEADER.size :]
        if magic != _MAGIC or patches.size != num_patches * width:
            return None
        if xxhash.xxh3_64_intdigest(patches.data) != digest:
            return None
        return patches.reshape(num_patches, width)

    def has(self, image_hash: str) -> bool:
        """Tell whether there is a file of an image; it is not read."""
        return self._path(image_hash).is_file()

    def put(self, image_hash: str, *, patches: np.ndarray) -> None:
        """Keep an image's patches, [p, d] uint8, if there is room; a failing disk is noted once."""
        if not self.takes_more:
            return
        path = self._path(image_hash)
        try:
            # A damaged file is replaced by one of the same size, which is counted already.
            if not path.exists() and not self._reserve(_HEADER.size + patches.nbytes):
                self.takes_more = False
                return
            with replacing(path) as partial, partial.open("wb", buffering=0) as file:
                digest = xxhash.xxh3_64_intdigest(patches.data)
                file.write(_HEADER.pack(_MAGIC, *patches.shape, digest))
                file.write(patches.data)
        except OSError as error:
            self.takes_more = False
            _LOG.warning("The image cache '%s' takes no more images: %s", self._folder, error)

    def _path(self, image_hash: str) -> Path:
        return self._images / image_hash[:3] / image_hash

    def _reserve(self, num_bytes: int) -> bool:
        """Add to the folder's total, which all processes share, unless it would be too much."""
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._folder / _TOTAL_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            found = os.pread(descriptor, _TOTAL.size, 0)
            total = num_bytes + (_TOTAL.unpack(found)[0] if len(found) == _TOTAL.size else 0)
            if total <= self._max_bytes:
                os.pwrite(descriptor, _TOTAL.pack(total), 0)
            return total <= self._max_bytes
        finally:
            os.close(descriptor)
