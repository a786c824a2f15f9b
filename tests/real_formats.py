"""Small data files in their real formats, as the tests need them: MNIST's, CIFAR's, a folder of pictures."""

import gzip
import hashlib
import pickle
import struct

import numpy as np
from PIL import Image
from torchvision import datasets

RNG = np.random.default_rng(0)
SIZES = {"train": 12, "t10k": 5}


def idx(array):
    """Return an array of bytes in the IDX format of MNIST: magic number, sizes in big endian, data."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_mnist(root, *, name="MNIST", packed=False):
    """Write both parts; return the training images and the names and checksums of the files."""
    folder = root / name / "raw"
    folder.mkdir(parents=True)
    kept, resources = None, []
    for part, size in SIZES.items():
        images = RNG.integers(0, 256, (size, 28, 28), dtype=np.uint8)
        kept = images if kept is None else kept
        for kind, array in (("images-idx3", images), ("labels-idx1", (np.arange(size) % 10).astype(np.uint8))):
            file = folder / f"{part}-{kind}-ubyte{'.gz' if packed else ''}"
            content = gzip.compress(idx(array)) if packed else idx(array)
            file.write_bytes(content)
            resources.append((f"{part}-{kind}-ubyte.gz", hashlib.md5(content).hexdigest()))
    return kept, resources


def write_cifar(root, monkeypatch, *, cls=datasets.CIFAR10, label_key="labels"):
    """Write all batches as CIFAR's pickled dictionaries, and give the class the checksums of these files."""
    folder = root / cls.base_folder
    folder.mkdir(parents=True)

    def write(name, entry):
        content = pickle.dumps(entry, protocol=2)
        (folder / name).write_bytes(content)
        return hashlib.md5(content).hexdigest()

    checksums, batches = {}, []
    for name, _ in cls.train_list + cls.test_list:
        pixels = RNG.integers(0, 256, (4, 3072), dtype=np.uint8)
        batches.append(pixels)
        checksums[name] = write(name, {"data": pixels, label_key: [0, 1, 2, 9]})
    names = [f"class {i}" for i in range(100 if cls is datasets.CIFAR100 else 10)]
    meta = cls.meta | {"md5": write(cls.meta["filename"], {cls.meta["key"]: names})}
    monkeypatch.setattr(cls, "train_list", [[name, checksums[name]] for name, _ in cls.train_list])
    monkeypatch.setattr(cls, "test_list", [[name, checksums[name]] for name, _ in cls.test_list])
    monkeypatch.setattr(cls, "meta", meta)
    return batches


def write_folder(root, *, size=(6, 9), classes=("cat", "dog"), each=4):
    for label in classes:
        (root / label).mkdir(parents=True)
        for i in range(each):
            pixels = RNG.integers(0, 256, (*size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / label / f"{i}.png")
