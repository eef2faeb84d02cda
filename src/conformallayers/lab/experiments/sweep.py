"""Search for hyperparameters as in the paper, TPE with Hyperband, by validation accuracy."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.pruners import HyperbandPruner
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from optuna.visualization.matplotlib import plot_parallel_coordinate

from ...errors import ConformalError, ignored_warnings
from ...utils.files import write_json
from ..checks import command_line, require_same
from ..data.datasets import Dataset, load
from ..options import SweepOptions
from ..report import figures
from ..training.config import TrainConfig, make_config
from ..training.evaluate import check_outputs
from ..training.own_networks import absolute, is_own, source_hash
from ..training.train import epoch_rows
from . import paper
from .records import Row, provenance

Space = dict[str, BaseDistribution]
# Bounds for data sets that are not the paper's, or smaller.
BATCH_SIZES, LEARNING_RATES = (8, 256), (1e-4, 1e-1)
_DONE = (TrialState.COMPLETE, TrialState.PRUNED)
_PLACES = ("data_root", "verify", "trials", "out")  # options that may change in a study


def run_sweep(network: str, dataset: str | Dataset, options: SweepOptions) -> Row:
    """Run trials until the study has enough of them, and return the contents of ``study.json``.

    Trials are ranked by validation accuracy; the test images are not used. The same call
    continues the study, and several processes may share its folder.
    """
    places = options.data_root, options.size, options.verify
    source = dataset if isinstance(dataset, Dataset) else load(dataset, *places, where="sweep")
    names = {"network": absolute(network), "dataset": source.name}
    derived = {**source.options, "source": source_hash(names["network"])}
    config = make_config(**names, epochs=options.max_epochs, seed=options.seed, **derived)
    if is_own(config.network):  # or every trial would fail
        check_outputs(config.build(), config.input_shape, config.classes)
    train_set, held_out = source.split(options.validation)
    images = len(train_set.train_labels)
    space = fitting_space(source.name, images, options.max_epochs)
    title = f"{config.network_name}-{config.dataset_name}"
    out = options.out or Path("results/sweep") / title
    chosen = {name: value for name, value in asdict(options).items() if name not in _PLACES}
    kept = {**names, **chosen, "pictures": derived.get("pictures"), "source": derived["source"]}
    study = _open_study(title, options.max_epochs, out, kept)
    command = command_line(["sweep", *names.values()], {"trials": options.trials, **chosen})
    counts = {"train": images, "validation": len(held_out.test_labels)}
    about = {**provenance(command), **names, "options": kept, "images": counts}
    try:
        while (done := len(study.get_trials(deepcopy=False, states=_DONE))) < options.trials:
            print(_run_trial(study, space, config, train_set, held_out))
            _write(study, about, out)
    except KeyboardInterrupt as stop:
        message = f"Interrupted: {done} trials kept. To go on, repeat the command."
        raise KeyboardInterrupt(message) from stop
    finally:
        record = _write(study, about, out)
        if record["best"] is not None:
            with ignored_warnings():  # of an experimental function, and of missing options
                axes: Any = plot_parallel_coordinate(study, params=list(space))
            axes.set_title(title)
            figures.save(axes.figure, out, "study")
    return record


def _run_trial(
    study: Study, space: Space, config: TrainConfig, train_set: Dataset, held_out: Dataset
) -> str:
    """Train with the options of one more trial, and return a line about it."""
    trial, accuracy = study.ask(space), None
    config = config.model_copy(update=trial.params)
    try:
        for row in epoch_rows(config, train_set, held_out):
            accuracy = row["validation_accuracy"]
            trial.report(accuracy, row["epoch"])
            if trial.should_prune() and row["epoch"] < config.epochs:
                accuracy = None
                break
    except ConformalError as error:  # the loss is not finite
        accuracy = None
        trial.set_user_attr("reason", str(error).partition(" Lower")[0])
    except KeyboardInterrupt:
        study.tell(trial, state=TrialState.FAIL)
        raise
    state = TrialState.PRUNED if accuracy is None else TrialState.COMPLETE
    found = _row(study.tell(trial, accuracy, state))
    shown = ", ".join(f"{name} {value}" for name, value in found.items() if value is not None)
    return f"trial {trial.number}: {shown}"


def _row(trial: FrozenTrial) -> Row:
    reached = trial.intermediate_values
    return {
        "trial": trial.number,
        "state": trial.state.name,
        **trial.params,
        "validation_accuracy": trial.value if trial.state == TrialState.COMPLETE else None,
        "epochs_run": len(reached),
        "last_accuracy": reached[max(reached)] if reached else None,
        "seconds": trial.duration.total_seconds() if trial.duration else None,
        "reason": trial.user_attrs.get("reason"),
    }


def _write(study: Study, about: Row, out: Path) -> Row:
    """Write study.json, all trials with the best first, and return the record."""
    trials = [_row(trial) for trial in study.get_trials(deepcopy=False)]
    trials.sort(key=lambda row: -(row["validation_accuracy"] or 0))
    best = next((row for row in trials if row["state"] == "COMPLETE"), None)
    record = {**about, "best": best, "trials": trials}
    write_json(out / "study.json", record)
    return record


def _open_study(name: str, most: int, out: Path, kept: Row) -> Study:
    """Create or continue a study; its sampler has no seed, so that processes that share it draw different trials."""
    out.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # an interrupt is not a failed trial
    eta = paper.HYPERBAND["eta"]
    fewest = max(1, most // eta ** paper.HYPERBAND["s"])  # epochs before a trial may be pruned
    study = optuna.create_study(
        study_name=name,
        storage=JournalStorage(JournalFileBackend(str(out / "journal.log"))),
        sampler=TPESampler(),
        pruner=HyperbandPruner(min_resource=fewest, max_resource=most, reduction_factor=eta),
        direction="maximize",
        load_if_exists=True,
    )
    if "options" in study.user_attrs:
        remedy = f"Give the options of the study {name}, or name another --out."
        require_same("sweep", study.user_attrs["options"], kept, remedy)
    study.set_user_attr("options", kept)
    return study


def fitting_space(dataset: str, images: int, max_epochs: int) -> Space:
    """Return the space of a search: the paper's for its data sets, else one for this many training images."""
    small = dataset not in paper.DATASETS or images < paper.BATCH_SIZES[1]
    low, high = BATCH_SIZES if small else paper.BATCH_SIZES
    rates = LEARNING_RATES if small else paper.LEARNING_RATES
    return {
        "batch_size": IntDistribution(min(low, images), min(high, images), log=small),
        "epochs": IntDistribution(min(paper.EPOCHS[0], max_epochs), max_epochs),
        "learning_rate": FloatDistribution(*rates, log=small),
        "optimizer": CategoricalDistribution(paper.OPTIMIZERS),
    }
