"""conformallayers sweep: search for hyperparameters in the paper's space."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from .extras import extra_for

_FLAG = Parameter(negative="")
_NO_CHECK = Parameter(name="--check", negative="--no-check")


def sweep(
    network: str,
    dataset: str,
    *,
    trials: int = 50,
    timeout: float | None = None,
    max_epochs: int = 50,
    subset: int | None = None,
    validation: float = 0.1,
    alpha: str | None = None,
    projective: Annotated[bool, _FLAG] = False,
    seed: int = 0,
    threads: int | None = None,
    study: str | None = None,
    storage: str | None = None,
    out: Path | None = None,
    data_root: Path | None = None,
    verify: Annotated[bool, _NO_CHECK] = True,
) -> None:
    """Search for batch size, epochs, learning rate and optimiser: TPE with Hyperband.

    Args:
        network: A class of conformallayers.networks, such as LeNetCL.
        dataset: mnist, fashion-mnist, cifar10 or digits.
        trials: Of the study in all, pruned ones included.
        timeout: No new trial after so many seconds.
        max_epochs: Of a trial.
        subset: Train on so many images, always the same; all if not given.
        validation: Training images to set aside, as a share below 1 or a number.
        alpha: young (the paper's), spectral, learned or a number; for conformal networks.
        projective: Take the projective form of ReSPro.
        seed: Of the search, the weights and the order of the images.
        threads: Of torch; as it is set up if not given.
        study: Its name; NETWORK-DATASET if not given. The same name goes on with it.
        storage: An address for Optuna, such as sqlite:///study.db; else a journal in the folder.
        out: The folder for tables and figure; results/sweep/NETWORK-DATASET if not given.
        data_root: The folder of the data; else CONFORMALLAYERS_DATA, else data.
        verify: Compare the checksums of the data; without, any data in the same format.
    """
    options = locals().copy()
    with extra_for("the sweep"):
        from ..lab.experiments.sweep import run_sweep
        from ..utils.memory import keep_freed_memory
    keep_freed_memory()
    best = run_sweep(**options)["best"]
    if best is None:
        print("no trial ran to its end: ask for more with --trials")
    else:
        print(f"best: trial {best['trial']}, {100 * best['validation_accuracy']:.2f} %")
