"""The ImageNet path from end to end on a generated folder: 1,000 classes, ResNet-50 at 224 pixels, `paper` settings.

    python -m bench.imagenet        writes results/imagenet-path.json, about 15 minutes on two cores

It trains nothing worth having: 300 different images, linked into 1,000 classes (2 to train, 1 to test), are there to
show that loading, training, a kill and its resume, the posterior, calibration, evaluation and the run folder work at
this size, and what memory they take. Training batches have 32 images, not 256, which would need some 25 GB.
"""

import io
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from afield.experiment import run_folder
from afield.model.saving import write_file

RECORD = Path(__file__).parents[1] / "results" / "imagenet-path.json"
CLASSES, IMAGES, SIDE = 1000, 300, 256
FLAGS = ["--preset", "paper", "--epochs", "2", "--batch-size", "32"]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_images(folder)
        command = [sys.executable, "-m", "afield.cli.main", "train", "imagenet", *FLAGS, "--out", str(folder / "runs")]
        environment = os.environ | {"AFIELD_DATA": str(folder)}
        run = folder / "runs" / "imagenet" / "sngp" / "0"
        begin = time.monotonic()
        killed_after = kill_after_first_epoch(command, environment, run / run_folder.CHECKPOINT)
        subprocess.run(command, env=environment, check=True)
        trained = time.monotonic()
        evaluate = [sys.executable, "-m", "afield.cli.main", "evaluate", str(run)]
        subprocess.run(evaluate, env=environment, check=True)
        finished = run_folder.read(run)
        epochs = [json.loads(line) for line in (run / run_folder.LOG).read_text().splitlines()]
        record = {
            "command": "python -m bench.imagenet",
            "flags": FLAGS,
            "classes": CLASSES,
            "killed_after_seconds": round(killed_after, 1),
            "epochs_run_after_resume": sum("epoch" in line for line in epochs) - 1,
            "train_resume_predict_evaluate_seconds": round(trained - begin, 1),
            "evaluate_seconds": round(time.monotonic() - trained, 1),
            "peak_memory_gb": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 2),
            "model_mb": round((run / run_folder.MODEL).stat().st_size / 1e6, 1),
            "cost": finished.cost,
            "metrics": {key: finished.metrics[key] for key in ("accuracy/clean", "nll/clean", "auroc/noise")},
        }
    write_file(RECORD, (json.dumps(record, indent=1) + "\n").encode())
    print(json.dumps(record, indent=1))


def make_images(folder: Path) -> None:
    """Smooth random images; class i has the images i, i + 1 to train and i + 2 to test, modulo their number."""
    draw = np.random.default_rng(0)
    (folder / "images").mkdir()
    for i in range(IMAGES):
        small = Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        content = io.BytesIO()
        small.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(content, "JPEG", quality=90)
        (folder / "images" / f"{i}.JPEG").write_bytes(content.getvalue())
    for label in range(CLASSES):
        for part, offsets in (("train", (0, 1)), ("val", (2,))):
            home = folder / "imagenet" / part / f"n{label:08d}"
            home.mkdir(parents=True)
            for offset in offsets:
                os.link(folder / "images" / f"{(label + offset) % IMAGES}.JPEG", home / f"{offset}.JPEG")


def kill_after_first_epoch(command: list[str], environment: dict[str, str], checkpoint: Path) -> float:
    begin = time.monotonic()
    process = subprocess.Popen(command, env=environment)
    while not checkpoint.exists():
        if process.poll() is not None:
            raise RuntimeError(f"The training ended before its first checkpoint, with code {process.returncode}.")
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return time.monotonic() - begin


if __name__ == "__main__":
    main()
