"""Search for hyperparameters as the paper did: TPE with Hyperband, by validation accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.pruners import HyperbandPruner
from optuna.samplers import BaseSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import MaxTrialsCallback, Study
from optuna.trial import FrozenTrial, Trial, TrialState

from ...errors import ConformalError, refusal
from ..data.datasets import Dataset, load
from ..report import figures
from ..training.config import TrainConfig, make_config
from ..training.train import epoch_rows
from . import paper
from .coordinates import parallel_coordinates
from .records import Row, command_line, provenance, write_record

NAME = "study"
BEST = 10  # trials in the figure
_DONE = (TrialState.COMPLETE, TrialState.PRUNED)
_OPTIONS = "options"  # under which a study keeps its own


def run_sweep(
    network: str,
    dataset: str | Dataset,
    *,
    trials: int = 50,
    timeout: float | None = None,
    max_epochs: int = paper.EPOCHS[1],
    subset: int | None = None,
    validation: float = 0.1,
    alpha: str | None = None,
    projective: bool = False,
    seed: int = 0,
    threads: int | None = None,
    study: str | None = None,
    storage: str | None = None,
    out: Path | None = None,
    data_root: Path | None = None,
    verify: bool = True,
    say: Callable[[str], object] = print,
) -> Row:
    """Run trials until the study has so many, and return what ``study.json`` holds.

    The accuracy that decides is that of training images set aside; the test images are not used.
    The same call goes on with the study; several processes may share one storage.

    Args:
        network, dataset: as in :func:`conformallayers.lab.training.train.train`.
        trials: of the study in all, pruned ones included.
        timeout: no new trial after so many seconds.
        max_epochs: of a trial; the paper has 50.
        subset: train on so many images, always the same; None takes all that are not set aside.
        validation: training images to set aside, as a share below 1 or a number.
        alpha, projective: of conformal networks.
        seed: of the search, the weights and the order of the images.
        threads: of torch; None leaves them.
        study: its name; None takes NETWORK-DATASET.
        storage: an address for Optuna; None takes a journal in ``out``.
        out: the folder; None takes ``results/sweep/NETWORK-DATASET``.
        data_root, verify: as in :func:`conformallayers.lab.data.datasets.load`.
        say: is told a line for each trial.
    """
    name = dataset if isinstance(dataset, str) else dataset.name
    study = study or f"{network}-{name}"
    out = out or Path("results/sweep") / study
    options: Row = {"max_epochs": max_epochs, "subset": subset, "validation": validation}
    options |= {"alpha": alpha, "projective": projective, "seed": seed}
    _check(trials, timeout, max_epochs, validation)
    fixed = {"alpha": alpha, "projective": projective, "seed": seed, "threads": threads}
    config = make_config(network=network, dataset=name, epochs=max_epochs, **fixed)
    source = load(dataset, data_root, verify=verify) if isinstance(dataset, str) else dataset
    train_set, held = source.split(validation)
    train_set = train_set if subset is None else train_set.subset(subset)

    optuna.logging.set_verbosity(optuna.logging.ERROR)  # an interrupt is no failure to trace
    found = _study(study, storage, out, {"network": network, "dataset": name, **options})
    shown = {"trials": trials, **options, "study": study if study != f"{network}-{name}" else None}
    source_row = provenance(command_line(["sweep", network, name], shown))
    source_row |= {"network": network, "dataset": name, "options": options}
    counts = {"train": len(train_set.train_labels), "validation": len(held.test_labels)}

    def done() -> int:
        return len(found.get_trials(deepcopy=False, states=_DONE))

    def record() -> Row:
        result = {**source_row, "images": counts, "finished": done() >= trials, **_summary(found)}
        write_record(out, NAME, result, result["trials"])
        return result

    def conclude() -> Row:
        result = record()
        best = [trial for trial in result["trials"] if trial["state"] == "COMPLETE"][:BEST]
        if best:
            figures.save(parallel_coordinates(best, f"{network}, {name}"), out, "figure")
        return result

    def after(study: Study, trial: FrozenTrial) -> None:
        say(_line(trial))
        record()

    def objective(trial: Trial) -> float:
        return _objective(trial, config, max_epochs, train_set, held)

    try:
        if done() < trials:
            until = MaxTrialsCallback(trials, states=_DONE)
            found.optimize(objective, timeout=timeout, callbacks=[after, until])
    except KeyboardInterrupt as stop:
        conclude()
        message = f"Interrupted: {done()} trials kept. To go on, repeat the command."
        raise KeyboardInterrupt(message) from stop
    return conclude()


def suggested(trial: Trial, max_epochs: int) -> Row:
    """Let the search choose from the paper's space, its epochs cut at a number."""
    return {
        "batch_size": trial.suggest_int("batch_size", *paper.BATCH_SIZES),
        "epochs": trial.suggest_int("epochs", min(paper.EPOCHS[0], max_epochs), max_epochs),
        "learning_rate": trial.suggest_float("learning_rate", *paper.LEARNING_RATES),
        "optimizer": trial.suggest_categorical("optimizer", paper.OPTIMIZERS),
    }


def _objective(
    trial: Trial, config: TrainConfig, max_epochs: int, train_set: Dataset, held: Dataset
) -> float:
    chosen = config.model_copy(update=suggested(trial, max_epochs))
    accuracy = 0.0
    try:
        for row in epoch_rows(chosen, train_set, held):
            accuracy = row["validation_accuracy"]
            trial.report(accuracy, row["epoch"])
            if trial.should_prune() and row["epoch"] < chosen.epochs:
                raise optuna.TrialPruned
    except ConformalError as error:  # a loss that is no number
        trial.set_user_attr("reason", str(error).partition(" Lower")[0])
        raise optuna.TrialPruned from error
    return accuracy


def _study(name: str, storage: str | None, out: Path, options: Mapping[str, Any]) -> Study:
    out.mkdir(parents=True, exist_ok=True)
    journal, most, eta = out / "journal.log", options["max_epochs"], paper.HYPERBAND["eta"]
    fewest = max(1, most // eta ** paper.HYPERBAND["s"])  # epochs before a trial may be ended
    pruner = HyperbandPruner(min_resource=fewest, max_resource=most, reduction_factor=eta)
    try:
        study = optuna.create_study(
            study_name=name,
            storage=storage or JournalStorage(JournalFileBackend(str(journal))),
            sampler=_Sampler(options["seed"]),
            pruner=pruner,
            direction="maximize",
            load_if_exists=True,
        )
    except Exception as error:  # of whatever stands behind the address
        where = f"sweep, {journal}" if storage is None else "sweep --storage"
        reason = (str(error) or type(error).__name__).splitlines()[0]
        remedy = "Name another --out, or an address such as sqlite:///study.db."
        raise refusal(where, "a storage of Optuna", reason, remedy) from error
    before = study.user_attrs.get(_OPTIONS)
    if before is None:
        study.set_user_attr(_OPTIONS, dict(options))
    for key, value in options.items():
        if before is not None and before.get(key) != value:
            where = f"sweep --{key.replace('_', '-')}"
            remedy = f"Give the options of the study {name}, or name another by --study and --out."
            raise refusal(where, f"{before.get(key)!r} as before", repr(value), remedy)
    return study


class _Sampler(BaseSampler):
    """TPE whose random numbers hang on the seed and the number of the trial alone.

    So a study that goes on draws what it would have drawn, and processes that share one do not
    draw the same.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        numbers = np.random.SeedSequence([self._seed, trial.number])
        self._tpe = TPESampler(seed=int(numbers.generate_state(1)[0]))
        self._tpe.before_trial(study, trial)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> Row:
        return self._tpe.infer_relative_search_space(study, trial)

    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: Row) -> Row:
        return self._tpe.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: Any
    ) -> Any:
        return self._tpe.sample_independent(study, trial, param_name, param_distribution)


def _summary(study: Study) -> Row:
    """Return the trials, best first; those that did not run to their end come last."""
    rows = []
    for trial in study.get_trials(deepcopy=False):
        reached = trial.intermediate_values
        row = {"trial": trial.number, "state": trial.state.name, **trial.params}
        row["validation_accuracy"] = trial.value if trial.state == TrialState.COMPLETE else None
        row |= {
            "epochs_run": len(reached),
            "last_accuracy": reached[max(reached)] if reached else None,
        }
        row["seconds"] = trial.duration.total_seconds() if trial.duration else None
        rows.append({**row, "reason": trial.user_attrs.get("reason")})
    rows.sort(key=lambda row: (row["state"] != "COMPLETE", -(row["validation_accuracy"] or 0)))
    best = rows[0] if rows and rows[0]["state"] == "COMPLETE" else None
    return {"study": study.study_name, "best": best, "trials": rows}


def _line(trial: FrozenTrial) -> str:
    setting = ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in trial.params.items()
    )
    reached = trial.intermediate_values
    shown = f"{100 * reached[max(reached)]:.2f} %" if reached else "no accuracy"
    return f"trial {trial.number}: {trial.state.name.lower()}, {shown} after {len(reached)} epochs; {setting}"


def _check(trials: int, timeout: float | None, max_epochs: int, validation: float) -> None:
    values = {"trials": trials, "max-epochs": max_epochs, "validation": validation}
    if timeout is not None:
        values["timeout"] = timeout
    for name, value in values.items():
        if value <= 0:
            remedy = "See conformallayers sweep --help."
            raise refusal(f"sweep --{name}", "a value greater than 0", str(value), remedy)
    if max_epochs > paper.EPOCHS[1]:
        remedy = "The paper's search space ends there."
        raise refusal("sweep --max-epochs", f"at most {paper.EPOCHS[1]}", str(max_epochs), remedy)
