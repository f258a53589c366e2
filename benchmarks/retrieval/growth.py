"""How an index grows towards wiki-18: `python -m benchmarks.retrieval.growth --rows 100000 200000`.

Builds each factory by the ordinary builder over more and more vectors of 768 values, and measures
recall@10 of an exact search, queries per processor second, bytes, and the processor seconds of the
build. A power of the rows, fitted to all sizes but the largest, predicts that one, which gives the
fit's error, and wiki-18's 21,015,324 rows. Vectors are those of --vectors (.npy), repeated and
perturbed, or else made up in clusters.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import faiss
import numpy as np

from benchmarks.retrieval.sizing import DIM, ROWS
from search_r1.retrieval.encoder import HashEncoder
from search_r1.retrieval.encoders.families import Vectors
from search_r1.retrieval.engines.dense import VECTORS_NAME
from search_r1.retrieval.index_builder import BuildConfig, build_index

FACTORIES = ("SQ8", "IVF4096,PQ64", "HNSW32")
NUM_QUERIES, DEPTH, CHUNK, NUM_CLUSTERS = 256, 10, 1 << 16, 2000
NOISE = 0.5
"""Length of what is added to a vector of unit length, so that no row is a copy of another."""
EFFORT = {"IVF": ("nprobe", 64), "HNS": ("efSearch", 128)}

Measured = Mapping[str, float]


def vectors_in_chunks(count: int, real: Vectors | None) -> Iterator[Vectors]:
    """Yield rows of unit length, the same ones for every count."""
    draw = np.random.default_rng(0)
    base = draw.standard_normal((NUM_CLUSTERS, DIM), dtype=np.float32) if real is None else real
    base = base / np.linalg.norm(base, axis=1, keepdims=True)
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        noise = draw.standard_normal((CHUNK, base.shape[1]), dtype=np.float32)[:size]
        noise *= NOISE / np.linalg.norm(noise, axis=1, keepdims=True)
        rows = base[np.arange(start, start + size) % len(base)] + noise
        yield rows / np.linalg.norm(rows, axis=1, keepdims=True)


def write_inputs(folder: Path, count: int, real: Vectors | None) -> tuple[Vectors, list[list[int]]]:
    """Write corpus and embeddings; return queries, and the rows of their exact hits."""
    dim = DIM if real is None else real.shape[1]
    queries = next(vectors_in_chunks(CHUNK, real))[-NUM_QUERIES:].copy()
    queries += np.roll(queries, 1, axis=1) * NOISE  # near rows, and none of them
    best = np.full((NUM_QUERIES, DEPTH), -np.inf, dtype=np.float32)
    hits = np.zeros((NUM_QUERIES, DEPTH), dtype=np.int64)
    matrix = np.lib.format.open_memmap(folder / "vectors.npy", "w+", np.float32, (count, dim))
    lines = (json.dumps({"id": str(i), "contents": f"passage {i}"}) for i in range(count))
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    ends = HashEncoder(dim).encode_passages(["passage 0", f"passage {count - 1}"])
    start = 0
    for rows in vectors_in_chunks(count, real):
        # The builder compares the first and the last row with the encoder.
        rows[0] = ends[0] if start == 0 else rows[0]
        rows[-1] = ends[1] if start + len(rows) == count else rows[-1]
        matrix[start : start + len(rows)] = rows
        scores = np.concatenate([best, queries @ rows.T], axis=1)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :DEPTH]
        best = np.take_along_axis(scores, order, axis=1)
        new = np.broadcast_to(np.arange(start, start + len(rows)), (NUM_QUERIES, len(rows)))
        hits = np.take_along_axis(np.concatenate([hits, new], axis=1), order, axis=1)
        start += len(rows)
    matrix.flush()
    return queries, hits.tolist()


def measure(folder: Path, factory: str, queries: Vectors, exact: list[list[int]]) -> Measured:
    """Build an index over the written inputs, and search it."""
    began = time.process_time()
    config = BuildConfig(
        "growth", str(folder / "corpus.jsonl"), str(folder), f"hash:{queries.shape[1]}",
        faiss_type=factory, embedding_path=str(folder / "vectors.npy"),
    )  # fmt: skip
    file = build_index(config) / VECTORS_NAME
    seconds = time.process_time() - began
    index = faiss.read_index(str(file))
    if factory[:3] in EFFORT:
        faiss.ParameterSpace().set_index_parameter(index, *EFFORT[factory[:3]])
    index.search(queries[:1], DEPTH)
    began = time.process_time()
    found = np.concatenate([index.search(queries[i : i + 64], DEPTH)[1] for i in range(0, 256, 64)])
    spent = time.process_time() - began
    same = [len(set(a) & set(b)) / DEPTH for a, b in zip(found.tolist(), exact, strict=True)]
    return {
        "recall": float(np.mean(same)),
        "rate": len(queries) / spent,
        "bytes": float(file.stat().st_size),
        "build_s": seconds,
    }


def power(rows: Sequence[int], values: Sequence[float], at: int) -> float:
    """Return the value at a number of rows, by a power of the rows fitted to all points."""
    slope, offset = np.polyfit(np.log(rows), np.log(values), 1)
    return float(np.exp(offset + slope * np.log(at)))


def summary(factory: str, rows: Sequence[int], points: Sequence[Measured]) -> list[str]:
    """Return a line for each figure: measured, the fit's error at the largest size, wiki-18."""
    lines = []
    for name in points[0]:
        values = [max(point[name], 1e-9) for point in points]
        error = ""
        if len(rows) > 2:
            predicted = power(rows[:-1], values[:-1], rows[-1])
            error = (
                f", the fit without the last is off by {100 * (predicted / values[-1] - 1):+.1f} %"
            )
        listed = ", ".join(f"{value:,.4g}" for value in values)
        wiki = power(rows, values, ROWS) if name != "recall" else min(1, power(rows, values, ROWS))
        lines.append(f"{factory} {name}: {listed}{error}; at {ROWS:,}: {wiki:,.4g}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 2_000_000, 5_000_000])
    parser.add_argument("--factories", nargs="+", default=FACTORIES)
    parser.add_argument("--vectors", type=Path, help="real vectors (.npy) to repeat and perturb")
    parser.add_argument("--folder", type=Path, help="where the files go; default: a temporary one")
    options = parser.parse_args()
    if len(options.rows) < 2 or any(a >= b for a, b in pairwise(options.rows)):
        parser.error("--rows: expected two sizes or more, the smallest first")
    real = None if options.vectors is None else np.load(options.vectors).astype(np.float32)
    points: dict[str, list[Measured]] = {factory: [] for factory in options.factories}
    for rows in options.rows:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            queries, exact = write_inputs(Path(name), rows, real)
            for factory in options.factories:
                points[factory].append(measure(Path(name), factory, queries, exact))
                sys.stdout.write(f"{rows:,} {factory}: {points[factory][-1]}\n")
                sys.stdout.flush()
    for factory, measured in points.items():
        sys.stdout.write("\n".join(summary(factory, options.rows, measured)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
