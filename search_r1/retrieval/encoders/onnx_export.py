"""Write the ONNX files of an encoder: `python -m search_r1.retrieval.encoders.onnx_export FOLDER`.

FOLDER is a model folder; `onnx/model.onnx` in it computes in float32, `onnx/model_int8.onnx`
multiplies 8-bit integers. Prints how near their states come to those of the model.
"""

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from transformers import AutoModel, AutoTokenizer

from verl.errors import explain

OPSET = 17
TEXTS = ["Paris is the capital of France.", "who wrote the opera about a barber in Seville"]
NAMES = ("model.onnx", "model_int8.onnx")


class States(torch.nn.Module):
    """A model that gives the states of its tokens, for inputs in a fixed order."""

    def __init__(self, model: torch.nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return (batch, tokens, dim) for inputs (batch, tokens)."""
        return self.model(**dict(zip(self.names, inputs, strict=True))).last_hidden_state


def export(folder: Path) -> list[Path]:
    """Write both files and return their paths; those that exist are replaced."""
    (folder / "onnx").mkdir(exist_ok=True)
    paths = [folder / "onnx" / name for name in NAMES]
    # The other implementations of attention do not trace for any length.
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    inputs = AutoTokenizer.from_pretrained(folder)(TEXTS, return_tensors="pt", padding=True)
    axes = {0: "batch", 1: "tokens"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tracing, and that it is the older of two ways
        torch.onnx.export(
            States(model, tuple(inputs)), tuple(inputs.values()), str(paths[0]),
            input_names=list(inputs), output_names=["last_hidden_state"], opset_version=OPSET,
            dynamic_axes=dict.fromkeys([*inputs, "last_hidden_state"], axes), dynamo=False,
        )  # fmt: skip
    # Tables of embeddings stay as they are: they would lose more than they save.
    quantize_dynamic(
        paths[0], paths[1], weight_type=QuantType.QInt8, per_channel=True,
        op_types_to_quantize=["MatMul"],
    )  # fmt: skip
    return paths


def similarity(folder: Path, path: Path) -> float:
    """Return the mean cosine of the states of all tokens with the model's."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        expected = AutoModel.from_pretrained(folder)(**inputs).last_hidden_state.numpy()
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    [states] = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    mask = inputs["attention_mask"].numpy() == 1
    pairs = expected[mask], states[mask]
    lengths = np.prod([np.linalg.norm(part, axis=1) for part in pairs], axis=0)
    return float(((pairs[0] * pairs[1]).sum(axis=1) / lengths).mean())


def main() -> None:
    """Write the files and print how near they come."""
    parser = argparse.ArgumentParser(description="Write the ONNX files of an encoder.")
    parser.add_argument("folder", type=Path, help="model folder")
    folder: Path = parser.parse_args().folder
    if not (folder / "config.json").is_file():
        fix = "give the folder of a model that was downloaded or trained"
        parser.error(explain("folder", folder, "a model folder with config.json", fix))
    for path in export(folder):
        sys.stdout.write(f"{path}: cosine {similarity(folder, path):.5f}\n")


if __name__ == "__main__":
    main()
