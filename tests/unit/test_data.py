"""Datasets, and the files they are read from: good ones, and each way to be bad."""

import gzip
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, Subset

from tutti.errors import DataError
from tutti.recipes import ArrayDataset, collate, data, files

DOCS = Path(__file__).parents[2] / "docs" / "data.md"
REAL = os.environ.get("TUTTI_DATA")
needs_data = pytest.mark.skipif(not REAL, reason="TUTTI_DATA names no folder with the real datasets")

IDX = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()


def images(num: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(256, size=(num, *shape), dtype=np.uint8)


def labels(num: int) -> np.ndarray:
    return (np.arange(num) % 10).astype(np.uint8)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A data folder with tiny files in the real formats."""
    for folder in ("mnist", "fashion-mnist"):
        (tmp_path / folder).mkdir()
        for name, array in zip(IDX, (images(12, 28, 28), labels(12), images(5, 28, 28), labels(5)), strict=True):
            (tmp_path / folder / name).write_bytes(gzip.compress(idx_bytes(array)))
    (tmp_path / "cifar10").mkdir()
    save_cifar(tmp_path)
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare" / "input.txt").write_text("Speak, speak.\n" * 100)
    return tmp_path


def save_cifar(root: Path, **changes: np.ndarray) -> Path:
    arrays = {
        "x_train": images(12, 32, 32, 3),
        "y_train": labels(12),
        "x_test": images(5, 32, 32, 3),
        "y_test": labels(5),
    }
    path = root / "cifar10" / "cifar10_subset_10k_2k.npz"
    np.savez_compressed(path, **{k: v for k, v in {**arrays, **changes}.items() if v.size})  # type: ignore[arg-type]
    return path


# --- datasets


@pytest.fixture
def dataset() -> ArrayDataset:
    return ArrayDataset(torch.arange(30.0).view(10, 3), torch.arange(10), prepare=torch.neg)


def loaded(loader: DataLoader) -> list[tuple[Tensor, Tensor]]:
    return [(inputs, targets) for inputs, targets in loader]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_collate_and_the_default_collate_agree(dataset: ArrayDataset, num_workers: int) -> None:
    ours = loaded(DataLoader(dataset, 4, collate_fn=collate, num_workers=num_workers))
    plain = loaded(DataLoader(dataset, 4, num_workers=num_workers))
    singly = loaded(DataLoader([dataset[i] for i in range(10)], 4))  # type: ignore[arg-type]
    assert [len(targets) for _, targets in ours] == [4, 4, 2]
    for batch in zip(ours, plain, singly, strict=True):
        for part in (0, 1):
            assert torch.equal(batch[0][part], batch[1][part])
            assert torch.equal(batch[0][part], batch[2][part])


def test_works_with_samplers_subsets_and_no_batching(dataset: ArrayDataset) -> None:
    in_order = BatchSampler(SequentialSampler(range(10)), 3, drop_last=True)
    batches = loaded(DataLoader(dataset, batch_sampler=in_order, collate_fn=collate))
    assert [targets.tolist() for _, targets in batches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    ((inputs, targets),) = loaded(DataLoader(Subset(dataset, [7, 2]), 5, collate_fn=collate))
    assert torch.equal(inputs, -torch.tensor([[21.0, 22, 23], [6, 7, 8]]))
    assert targets.tolist() == [7, 2]
    whole = DataLoader(dataset, sampler=BatchSampler(RandomSampler(dataset), 4, drop_last=False), batch_size=None)
    assert sorted(int(t) for batch in loaded(whole) for t in batch[1]) == list(range(10))
    assert [int(t) for _, t in loaded(DataLoader(dataset, batch_size=None))] == list(range(10))
    single = collate([dataset[3]])
    assert single[0].shape == (1, 3)


def test_dataset_ends_where_it_ends(dataset: ArrayDataset) -> None:
    assert len(dataset) == 10
    with pytest.raises(IndexError):
        dataset[10]
    with pytest.raises(IndexError):
        dataset.__getitems__([3, 10])
    assert len(dataset.__getitems__([])) == 0
    with pytest.raises(DataError, match="3 inputs and 2 targets"):
        ArrayDataset(torch.zeros(3), torch.zeros(2))


def test_fetching_never_changes_what_is_stored() -> None:
    stored = torch.full((4, 1, 2, 2), 200, dtype=torch.uint8)
    kept = ArrayDataset(stored, torch.arange(4), prepare=data.Normalize((0.5,), (0.25,)))
    kept.__getitems__([0, 1]).inputs.zero_()
    kept[2][0].zero_()
    assert (stored == 200).all()


def test_normalize_by_channel_and_by_row() -> None:
    prepare = data.Normalize((0.5, 0.0), (0.25, 1.0))
    pixels = torch.tensor([0, 255], dtype=torch.uint8).view(1, 2, 1, 1).expand(3, 2, 4, 4)
    assert torch.equal(prepare(pixels)[:, 0], torch.full((3, 4, 4), -2.0))
    assert torch.equal(prepare(pixels)[:, 1], torch.ones(3, 4, 4))
    assert torch.equal(prepare(pixels)[1], prepare(pixels[1]))
    assert prepare(pixels).is_contiguous()


def test_windows_do_not_overlap_and_targets_are_one_later() -> None:
    cut = data.windows(torch.arange(13), 4)
    assert cut.inputs.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert torch.equal(cut.targets, cut.inputs + 1)
    assert len(data.windows(torch.arange(12), 4)) == 2  # the twelfth has no successor


# --- good files


def test_embedded_digits() -> None:
    train, test = data.digits()
    assert (len(train), len(test)) == (1437, 360)
    assert isinstance(train, ArrayDataset)
    assert isinstance(test, ArrayDataset)
    counts = torch.cat([train.targets, test.targets]).bincount()
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert test.targets.bincount().min() >= 25
    everything = torch.cat([split.__getitems__(range(len(split))).inputs for split in (train, test)])
    assert everything.shape == (1797, 1, 8, 8)
    assert everything.mean().abs() < 1e-3
    assert everything.std() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("load", [data.mnist, data.fashion_mnist, data.cifar10_subset])
def test_image_files(root: Path, load: Callable[[Path], data.Splits]) -> None:
    train, test = load(root)
    assert (len(train), len(test)) == (12, 5)
    inputs, targets = next(iter(DataLoader(train, 12, collate_fn=collate)))
    assert inputs.dtype == torch.float32
    assert inputs.is_contiguous()
    assert targets.tolist() == [*range(10), 0, 1]
    assert targets.dtype == torch.int64
    assert torch.equal(train[3][0], inputs[3])


def test_pixels_arrive_where_they_were(root: Path) -> None:
    image = data.mnist(root).train[4][0]
    torch.testing.assert_close(image[0] * 0.3081 + 0.1307, torch.from_numpy(images(12, 28, 28)[4] / 255).float())
    photo = data.cifar10_subset(root).train[4][0]
    blue = torch.from_numpy(images(12, 32, 32, 3)[4, :, :, 2] / 255).float()
    torch.testing.assert_close(photo[2] * 0.2616 + 0.4465, blue)


def test_text_file(root: Path) -> None:
    train, test = data.tinyshakespeare(root, window=32)
    assert (len(train), len(test)) == (1259 // 32, 139 // 32)
    inputs, targets = train[0]
    assert "".join(data.ALPHABET[i] for i in inputs.tolist()) == ("Speak, speak.\n" * 3)[:32]
    assert torch.equal(inputs[1:], targets[:-1])


def places(splits: data.Splits) -> list[int]:
    """Where the tensors of both datasets are in memory."""
    held = [split for split in splits if isinstance(split, ArrayDataset)]
    return [tensor.data_ptr() for split in held for tensor in (split.inputs, split.targets)]


@pytest.mark.parametrize(
    "load", [data.digits, data.mnist, data.fashion_mnist, data.cifar10_subset, partial(data.tinyshakespeare, window=32)]
)
def test_ranks_of_a_process_share_one_copy(root: Path, load: Callable[[Path], data.Splits]) -> None:
    ready = Barrier(8)
    with ThreadPoolExecutor(8) as ranks:
        loaded = list(ranks.map(lambda _: (ready.wait(), load(root))[1], range(8)))
    assert len(places(loaded[0])) == 4
    assert all(places(splits) == places(loaded[0]) for splits in loaded)
    assert loaded[0].train is not loaded[1].train


def test_what_one_rank_fetches_is_not_what_others_see(root: Path) -> None:
    for load in (data.mnist, partial(data.tinyshakespeare, window=32)):
        before = [part.clone() for part in load(root).train[0]]
        for part in (*load(root).train[0], *load(root).train.__getitems__([0])[0]):
            part.zero_().add_(1)
        assert all(torch.equal(a, b) for a, b in zip(before, load(root).train[0], strict=True))


def test_a_changed_file_is_read_again_and_an_error_is_not_kept(root: Path) -> None:
    path = root / "tinyshakespeare" / "input.txt"
    data.tinyshakespeare(root, window=32)
    path.unlink()
    with pytest.raises(DataError, match="missing data file"):
        data.tinyshakespeare(root, window=32)
    for first in ("A", "Be"):
        path.write_text(first + "Speak, speak.\n" * 100)
        assert data.ALPHABET[int(data.tinyshakespeare(root, window=32).train[0][0][0])] == first[0]
    path.write_bytes(b"\xff")
    with pytest.raises(DataError, match="none of the 65 characters"):
        data.tinyshakespeare(root)


def test_a_changed_file_of_a_set_is_read_again(root: Path) -> None:
    data.mnist(root)
    (root / "mnist" / IDX[1]).write_bytes(gzip.compress(idx_bytes(labels(11))))
    with pytest.raises(DataError, match="12 images for 11 labels"):
        data.mnist(root)


# --- missing files

LOADERS = [data.mnist, data.fashion_mnist, data.cifar10_subset, data.tinyshakespeare]


@pytest.mark.parametrize("load", LOADERS)
def test_no_folder(load: Callable[[Path | None], data.Splits]) -> None:
    with pytest.raises(DataError, match=r"--data FOLDER or set TUTTI_DATA. Origin of the file: "):
        load(None)


@pytest.mark.parametrize(
    ("load", "file", "origin"),
    [
        (data.mnist, f"mnist/{IDX[0]}", "yann.lecun.com/exdb/mnist, or any mirror with MD5 f68b3c2d"),
        (
            data.fashion_mnist,
            f"fashion-mnist/{IDX[3]}",
            "zalandoresearch/fashion-mnist, folder data/fashion, MD5 bb300cfd",
        ),
        (data.cifar10_subset, "cifar10/cifar10_subset_10k_2k.npz", "www.cs.toronto.edu/~kriz/cifar.html"),
        (data.tinyshakespeare, "tinyshakespeare/input.txt", "github.com/karpathy/char-rnn"),
    ],
)
def test_missing_file(root: Path, load: Callable[[Path], data.Splits], file: str, origin: str) -> None:
    (root / file).unlink()
    with pytest.raises(DataError) as caught:
        load(root)
    assert f"missing data file {root.resolve() / file}" in str(caught.value)
    assert origin in str(caught.value)


# --- truncated and wrong files


def idx_fault(tmp_path: Path, packed: bytes, num_dims: int = 3) -> str:
    path = tmp_path / "file.gz"
    path.write_bytes(packed)
    with pytest.raises(DataError) as caught:
        files.read_idx(path, num_dims)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_bad_idx(tmp_path: Path) -> None:
    good = idx_bytes(images(3, 28, 28))
    assert "cut off or not gzip" in idx_fault(tmp_path, gzip.compress(good)[:-900])
    assert "cut off or not gzip" in idx_fault(tmp_path, good)
    assert "cut off or not gzip" in idx_fault(tmp_path, gzip.compress(good)[:40] + b"x" * 50)
    assert "shape (3, 28, 28) takes 2352 bytes, got 2351" in idx_fault(tmp_path, gzip.compress(good[:-1]))
    assert "is too long: shape (3, 28, 28) takes 2352 bytes, got 2353" in idx_fault(
        tmp_path, gzip.compress(good + b"x")
    )
    assert "got 0" in idx_fault(tmp_path, gzip.compress(good[:10]))
    swapped = idx_fault(tmp_path, gzip.compress(good), num_dims=1)
    assert "starts with 0x00000803" in swapped
    assert "start with 0x00000801. Are two files swapped?" in swapped
    assert "starts with 0x," in idx_fault(tmp_path, gzip.compress(b""))
    assert "holds no samples" in idx_fault(tmp_path, gzip.compress(idx_bytes(images(0, 28, 28))))


def test_bad_idx_sets(root: Path) -> None:
    (root / "mnist" / IDX[2]).write_bytes(gzip.compress(idx_bytes(images(5, 8, 8))))
    with pytest.raises(DataError, match=r"images are \(8, 8\), wanted \(28, 28\)"):
        data.mnist(root)
    (root / "fashion-mnist" / IDX[1]).write_bytes(gzip.compress(idx_bytes(labels(12) + 3)))
    with pytest.raises(DataError, match="go up to 12, wanted 0 to 9"):
        data.fashion_mnist(root)


def test_bad_npz(root: Path) -> None:
    path = save_cifar(root)
    whole = path.read_bytes()
    for broken in (whole[:-3000], whole[:2000], b"", b"hello" * 9):
        path.write_bytes(broken)
        with pytest.raises(DataError, match="cut off or not npz") as caught:
            data.cifar10_subset(root)
        assert str(path) in str(caught.value)
    with path.open("wb") as file:
        np.save(file, images(2, 3))
    with pytest.raises(DataError, match="cut off or not npz"):
        data.cifar10_subset(root)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 255
    path.write_bytes(flipped)
    with pytest.raises(DataError, match="cut off or not npz"):
        data.cifar10_subset(root)


def test_npz_is_never_unpickled(root: Path) -> None:
    save_cifar(root, y_train=np.array([print, None], dtype=object))
    with pytest.raises(DataError, match="allow_pickle=False"):
        data.cifar10_subset(root)


def test_npz_with_other_arrays_hears_of_all_of_them(root: Path) -> None:
    save_cifar(root, y_train=np.empty(0), x_test=images(5, 28, 28, 3), y_test=np.arange(5))
    with pytest.raises(DataError) as caught:
        data.cifar10_subset(root)
    for part in (
        "no array 'y_train'",
        "'x_test' has shape (5, 28, 28, 3), wanted (any, 32, 32, 3)",
        "'y_test' is int64, wanted uint8",
        "Has: ['x_train', 'x_test', 'y_test']",
    ):
        assert part in str(caught.value)
    save_cifar(root, y_train=labels(11))
    with pytest.raises(DataError, match="12 images for 11 labels"):
        data.cifar10_subset(root)


def test_bad_text(root: Path) -> None:
    path = root / "tinyshakespeare" / "input.txt"
    for text, message in (
        (b"", "is empty"),
        (b"Speak, " * 20, "cut off: 140 characters are too few for windows of 64"),
        (b"Speak \xc3\xa9t\xc3\xa9 " * 99, "byte 6 is 0xc3, which is none of the 65 characters"),
    ):
        path.write_bytes(text)
        with pytest.raises(DataError, match=re.escape(str(path)) + ".*" + message):
            data.tinyshakespeare(root)


def test_unreadable_paths_are_data_errors(tmp_path: Path) -> None:
    for read in (
        lambda p: files.read_idx(p, 3),
        lambda p: files.read_npz(p, {}),
        lambda p: files.read_text(p, "a"),
    ):
        with pytest.raises(DataError, match=r"cannot read .*No such file"):
            read(tmp_path / "none")


# --- the docs, and the real thing


def test_the_script_in_the_docs_makes_a_file_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cifar-10-batches-bin").mkdir()
    (tmp_path / "cifar10").mkdir()
    rows = np.concatenate([labels(20)[:, None], images(20, 3072)], axis=1)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        rows.tofile(tmp_path / "cifar-10-batches-bin" / f"{name}.bin")
    code = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[0]
    exec(compile(code, str(DOCS), "exec"), {})
    (tmp_path / "cifar10_subset_10k_2k.npz").rename(tmp_path / "cifar10" / "cifar10_subset_10k_2k.npz")
    train, test = data.cifar10_subset(tmp_path)
    assert (len(train), len(test)) == (100, 20)
    red = torch.from_numpy(rows[7, 1:1025].reshape(32, 32) / 255).float()
    torch.testing.assert_close(test[7][0][0] * 0.2470 + 0.4914, red)


@needs_data
@pytest.mark.parametrize(
    ("folder", "load", "sizes", "shape"),
    [
        ("mnist", data.mnist, (60000, 10000), (1, 28, 28)),
        ("fashion-mnist", data.fashion_mnist, (60000, 10000), (1, 28, 28)),
        ("cifar10", data.cifar10_subset, (10000, 2000), (3, 32, 32)),
        ("tinyshakespeare", data.tinyshakespeare, (15685, 1742), (64,)),
    ],
)
def test_real_data(
    folder: str, load: Callable[[Path], data.Splits], sizes: tuple[int, int], shape: tuple[int, ...]
) -> None:
    assert REAL is not None
    if not (Path(REAL) / folder).is_dir():
        pytest.skip(f"no folder {folder} in TUTTI_DATA={REAL}")
    train, test = load(Path(REAL))
    assert (len(train), len(test)) == sizes
    inputs, targets = next(iter(DataLoader(train, 5000, collate_fn=collate)))
    assert inputs.shape == (5000, *shape)
    if inputs.is_floating_point():
        assert inputs.mean().abs() < 0.03
        assert inputs.std() == pytest.approx(1, abs=0.03)
        assert targets.unique().tolist() == list(range(10))
