"""Options of predictions; imports nothing heavy, so that the command line prints its help at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """How to read samples, run the network and write predictions.

    Args:
        top: Classes per image.
        format: table, csv or jsonl.
        out: File for the rows; standard output if not given.
        batch: Images to read and run at a time.
        resize: Scale images of another size; otherwise they count as broken. A network of the zoo, or one that was trained on a folder of pictures, always scales.
        labels: Text file with the name of each class, one per line; those of the model if not given.
        engine: torch, numpy (imports no torch), onnxruntime, or auto: torch if it is installed, else numpy. numpy takes folds only; the others fold what is not folded.
        threads: Threads of torch and ONNX Runtime in each process; torch's own default if not given.
        ray: Share the work among processes with Ray Data.
        workers: Processes of Ray; 2 if not given.
        address: Address of a running Ray cluster; a local one is started if not given.
    """

    top: int = 3
    format: str = "table"
    out: Path | None = None
    batch: int = 64
    resize: bool = False
    labels: Path | None = None
    engine: str = "auto"
    threads: int | None = None
    ray: bool = False
    workers: int | None = None
    address: str | None = None
