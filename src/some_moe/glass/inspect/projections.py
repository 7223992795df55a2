"""Maps of a key store: E keys of width D laid out on a plane by PCA, t-SNE and UMAP, the same way every time.

Keys are taken at unit length, so near on a map means a like direction. Few keys fall back on PCA, with a note.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from some_moe.system.workers import start_worker

METHODS = ("pca", "tsne", "umap")
FEWEST_KEYS = 8  # a neighbourhood method has nothing to choose among fewer
SEED = 0


@dataclass(frozen=True, kw_only=True)
class KeyMap:
    """One layer's keys on a plane."""

    method: str  # what was asked for: one of METHODS
    points: np.ndarray  # (E, 2) float64
    note: str | None = None  # why the points are not what was asked for


def map_keys(layers: Sequence[np.ndarray], method: str) -> list[KeyMap]:
    """Map the keys (E, D) of each layer by one method."""
    return [map_layer(keys, method) for keys in layers]


def map_layer(keys: np.ndarray, method: str) -> KeyMap:
    """Map keys (E, D) by one method; where it cannot work, by PCA with a note."""
    unit = unit_rows(keys)
    flat, note = project(unit, *principal_axes(unit)[:2]), None
    if method == "pca":
        return KeyMap(method=method, points=flat)
    name, fit = {"tsne": ("t-SNE", fit_tsne), "umap": ("UMAP", fit_umap)}[method]
    if len(unit) < FEWEST_KEYS:
        note = f"{name} needs at least {FEWEST_KEYS} keys and this layer has {len(unit)}: PCA is shown instead."
    elif np.ptp(unit, axis=0).max() < 1e-5:
        note = f"All keys point the same way, so {name} has no neighbourhoods to keep: PCA is shown instead."
    return KeyMap(method=method, points=flat if note else fit(unit, flat), note=note)


def unit_rows(vectors: np.ndarray) -> np.ndarray:
    """Vectors (n, D) at unit length, in float64; a zero vector stays zero."""
    vectors = vectors.astype(np.float64)
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.where(lengths > 0, lengths, 1.0))


def principal_axes(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The mean (D,), the two axes (D, 2) of most variance, and the share of the variance on each (2,).

    An axis points to where its largest entry is positive, so that no map is mirrored by chance.
    """
    mean = vectors.mean(0)
    centred = vectors - mean
    variance, axes = np.linalg.eigh(centred.T @ centred)
    variance, axes = np.clip(variance[::-1], 0, None), axes[:, ::-1][:, :2]
    if len(variance) == 1:  # keys of width 1
        variance, axes = np.pad(variance, (0, 1)), np.pad(axes, ((0, 0), (0, 1)))
    largest = axes[np.abs(axes).argmax(0), np.arange(2)]
    axes = axes * np.where(largest < 0, -1.0, 1.0)
    return mean, axes, variance[:2] / max(float(variance.sum()), np.finfo(float).tiny)


def project(vectors: np.ndarray, mean: np.ndarray, axes: np.ndarray) -> np.ndarray:
    """Vectors (…, D) on the plane of two axes: (…, 2)."""
    return np.asarray((vectors - mean) @ axes)


def _spread_out(flat: np.ndarray, size: float) -> np.ndarray:
    """A starting layout: the PCA map, scaled so that its first axis has this standard deviation."""
    return np.asarray(flat * (size / max(float(flat[:, 0].std()), 1e-12)), np.float32)


def fit_tsne(unit: np.ndarray, flat: np.ndarray) -> np.ndarray:
    """t-SNE of unit keys (E, D), started from their PCA map (E, 2)."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    perplexity = min(30.0, (len(unit) - 1) / 3)
    tsne = TSNE(perplexity=perplexity, init=_spread_out(flat, 1e-4), metric="cosine", random_state=SEED)
    with threadpool_limits(1):  # a store of keys is small: more threads would only wait for each other
        return np.asarray(tsne.fit_transform(unit.astype(np.float32)), np.float64)


def fit_umap(unit: np.ndarray, flat: np.ndarray) -> np.ndarray:
    """UMAP of unit keys (E, D), started from their PCA map (E, 2).

    Neighbours are found here, exactly: UMAP's own search would first spend seconds on compiling itself.
    """
    with warnings.catch_warnings():
        # It warns that a fixed seed means one thread, and that no new points can be added later: both are meant.
        warnings.simplefilter("ignore")
        from umap import UMAP

        num_neighbors = max(3, min(15, len(unit) // 3))
        distance = 1 - unit @ unit.T
        np.fill_diagonal(distance, -1.0)  # each key is its own first neighbour, even among equals
        nearest = np.argsort(distance, axis=1, kind="stable")[:, :num_neighbors]
        lengths = np.clip(np.take_along_axis(distance, nearest, 1), 0, None)
        umap = UMAP(
            n_neighbors=num_neighbors,
            metric="cosine",
            precomputed_knn=(nearest, lengths.astype(np.float32)),
            force_approximation_algorithm=True,  # for small data it would search again
            init=_spread_out(flat, 10.0),
            random_state=SEED,
            n_jobs=1,
        )
        return np.asarray(umap.fit_transform(unit.astype(np.float32)), np.float64)


@contextmanager
def umap_in_background() -> Iterator[Callable[[Sequence[np.ndarray]], Callable[[], list[KeyMap]]]]:
    """Load UMAP in a second process, for its compiler takes many seconds that can be spent otherwise.

    Gives a function that sends the layers' keys there, and returns another that waits for their maps.
    """
    with start_worker(f"{__name__}:map_in_background") as (send, receive):

        def start(layers: Sequence[np.ndarray]) -> Callable[[], list[KeyMap]]:
            send(list(layers))
            return receive

        yield start


def map_in_background(receive: Callable[[], list[np.ndarray]]) -> list[KeyMap]:
    """What the second process does."""
    import numba

    # UMAP's search for neighbours is loaded as plain Python: it is never called, and compiles for 20 s at first import.
    numba.config.DISABLE_JIT = True  # type: ignore[attr-defined]
    import pynndescent  # noqa: F401

    numba.config.DISABLE_JIT = False  # type: ignore[attr-defined]
    map_layer(np.eye(FEWEST_KEYS), "umap")  # compiles while nobody waits
    return map_keys(receive(), "umap")
