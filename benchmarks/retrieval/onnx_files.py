"""Compare ONNX files of an encoder with its folder: `python -m benchmarks.retrieval.onnx_files`.

--model FOLDER with `onnx/model.onnx` and `onnx/model_int8.onnx` (by
`search_r1.retrieval.encoders.onnx_export`). Prints what a server's start over --start made-up
vectors takes, and with --data (corpus.jsonl, train.jsonl, dev.jsonl) the rate of encoding, the
share of float32's documents among the first three, the recall of answers over --passages, and how
many of `ALONE` questions find other documents when no batch is encoded with them; also with the
first `CUTS` values of float32's vectors, as models trained for it allow. --index: a Flat index of
the passages' float32 vectors, which are encoded without it.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import faiss
import numpy as np
import psutil

from search_r1.agent.search import holds_answer
from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.encoder import open_encoder
from search_r1.retrieval.encoders.families import Vectors
from search_r1.retrieval.engines.own_rows import sample_rows
from search_r1.retrieval.local_server import LocalServer
from search_r1.retrieval.settings import EncoderConfig

FILES = ("", "onnx/model.onnx", "onnx/model_int8.onnx")
"""The folder itself, by sentence-transformers, and its files."""
ROUNDS, CHUNK, TOPK = 2, 64, 3
CUTS = (256, 128, 64)
ALONE = 500
"""Questions that are encoded one by one, too."""


def configs(model: Path) -> dict[str, EncoderConfig]:
    """Return the encoders by name: float32, bfloat16 and the files."""
    named = {name or "float32": EncoderConfig(str(model / name)) for name in FILES}
    return {**named, "bfloat16": EncoderConfig(str(model), encoder_dtype="bfloat16")}


def starts(model: Path, rows: int, folder: Path) -> None:
    """Print the processor seconds of each start, from the process to the first healthy answer."""
    path, index = folder / "corpus.jsonl", faiss.IndexFlatIP
    lines = (json.dumps({"id": str(i), "contents": f'"T{i}"\npassage {i}'}) for i in range(rows))
    path.write_text("\n".join(lines))
    corpus, own = Corpus.open(path), sample_rows(rows)
    vectors = open_encoder(EncoderConfig(str(model / FILES[1]))).encode_passages(
        [corpus[row].contents for row in own]
    )
    matrix = np.random.default_rng(0).standard_normal((rows, vectors.shape[1]), dtype=np.float32)
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    matrix[own] = vectors  # the server searches these documents
    flat = index(matrix.shape[1])
    flat.add(matrix)
    faiss.write_index(flat, str(folder / "flat.index"))
    del matrix, flat
    for _ in range(ROUNDS):
        for name in FILES:
            flags = ["--retriever_name", "minilm", "--retriever_model", str(model / name)]
            flags += ["--corpus_path", str(path), "--index_path", str(folder / "flat.index")]
            began = time.perf_counter()
            with LocalServer(flags, timeout=600.0) as server:
                wall = time.perf_counter() - began
                process = psutil.Process(server.pid)
                times, memory = process.cpu_times(), process.memory_info()
            own_mb = (memory.rss - memory.shared) / 1e6
            show(f"start, {name or 'float32'}: {times.user + times.system:.2f} processor seconds, "
                 f"{wall:.2f} s, {own_mb:.0f} MB of own memory")  # fmt: skip


def qualities(
    model: Path, data: Path, num_passages: int, num_questions: int, index: Path | None
) -> None:
    """Print rates, and what each encoder finds among passages in float32."""
    lines = [(data / f"{name}.jsonl").read_text().splitlines() for name in ("train", "dev")]
    rows = [json.loads(line) for part in lines for line in part][:num_questions]
    questions = [row["question"] for row in rows]
    documents = Corpus.open(data / "corpus.jsonl").documents(range(num_passages))
    if index is not None:
        passages = faiss.read_index(str(index)).reconstruct_n(0, num_passages)
    else:
        encoder = open_encoder(configs(model)[FILES[1]])
        passages = encoder.encode_passages([document.contents for document in documents])
    encoded = {name: encode(model, name, questions, passages) for name in configs(model)}
    found = {name: nearest(vectors, passages) for name, vectors in encoded.items()}
    for cut in CUTS:
        encoded[name := f"float32, {cut} values"] = encoded["float32"]
        found[name] = nearest(encoded["float32"][:, :cut], passages[:, :cut])
    asked = [i for i, row in enumerate(rows) if not {"yes", "no"} & set(row["golden_answers"])]
    for name, hits in found.items():
        pairs = zip(hits, found["float32"], strict=True)
        same = np.mean([len(set(ours) & set(theirs)) / TOPK for ours, theirs in pairs])
        recall = np.mean([
            holds_answer([documents[j] for j in hits[i]], rows[i]["golden_answers"]) for i in asked
        ])  # fmt: skip
        cosine = (encoded[name] * encoded["float32"]).sum(axis=1)
        show(f"{name}: {100 * same:.1f} % of the documents, recall@{TOPK} {100 * recall:.1f} %, "
             f"cosine {cosine.mean():.5f}, lowest {cosine.min():.5f}")  # fmt: skip


def encode(model: Path, name: str, questions: Sequence[str], passages: Vectors) -> Vectors:
    """Return the vectors of the questions; print the rates, and how many depend on the batch."""
    encoder, rates = open_encoder(configs(model)[name]), []
    encoder.encode_queries(questions[:CHUNK])
    for _ in range(ROUNDS):
        began = time.process_time()
        parts = [
            encoder.encode_queries(questions[i : i + CHUNK])
            for i in range(0, len(questions), CHUNK)
        ]
        rates.append(len(questions) / (time.process_time() - began))
    vectors = np.concatenate(parts)
    alone = np.concatenate([encoder.encode_queries([text]) for text in questions[:ALONE]])
    pairs = zip(nearest(alone, passages), nearest(vectors[:ALONE], passages), strict=True)
    moved = sum(set(ours) != set(theirs) for ours, theirs in pairs)
    show(f"{name}: {', '.join(f'{rate:.0f}' for rate in rates)} questions a processor second; "
         f"{moved} of {len(alone)} find other documents alone")  # fmt: skip
    return vectors


def nearest(queries: Vectors, passages: Vectors) -> list[list[int]]:
    """Return the rows of the TOPK passages with the best cosines for each query."""
    passages = passages / np.linalg.norm(passages, axis=1, keepdims=True)
    parts = (queries[i : i + CHUNK] @ passages.T for i in range(0, len(queries), CHUNK))
    found = np.concatenate([np.argsort(-part, axis=1, kind="stable")[:, :TOPK] for part in parts])
    rows: list[list[int]] = found.tolist()
    return rows


def show(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="model folder with onnx/")
    parser.add_argument("--start", type=int, default=0, help="rows of the index that is started")
    parser.add_argument("--data", type=Path, help="folder with corpus and questions")
    parser.add_argument("--passages", type=int, default=44_198, help="passages of the corpus")
    parser.add_argument("--questions", type=int, default=3694, help="questions that are asked")
    parser.add_argument("--index", type=Path, help="Flat index of the passages")
    args = parser.parse_args()
    if args.start:
        with tempfile.TemporaryDirectory() as folder:
            starts(args.model, args.start, Path(folder))
    if args.data:
        qualities(args.model, args.data, args.passages, args.questions, args.index)


if __name__ == "__main__":
    main()
