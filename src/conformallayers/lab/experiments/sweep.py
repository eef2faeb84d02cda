"""Search for hyperparameters as in the paper, TPE with Hyperband, by validation accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
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
from optuna.trial import FrozenTrial, Trial, TrialState

from ...errors import ConformalError, first_line, ignored_warnings, refusal
from ...utils.files import write_json
from ..checks import command_line, make_folder, require_choice, require_positive, require_same
from ..data.datasets import Dataset, find_source
from ..options import SweepOptions
from ..report import figures
from ..training.config import DERIVED, TrainConfig, make_config
from ..training.own_networks import absolute, source_hash
from ..training.train import epoch_rows
from . import paper
from .records import Row, provenance

Space = dict[str, BaseDistribution]
# Bounds for data sets that are not the paper's, or smaller.
BATCH_SIZES, LEARNING_RATES = (8, 256), (1e-4, 1e-1)
_DONE = (TrialState.COMPLETE, TrialState.PRUNED)
_STUDY_OPTIONS = ("max_epochs", "subset", "validation", "seed", "size", "space")
_FIXED = (
    "network",
    "dataset",
    "training_preset",
    "size",
    "validation",
    "seed",
    "threads",
    "device",
)
_FORM = "NAME=LOW:HIGH, NAME=LOW:HIGH:log or NAME=VALUE,VALUE"
_REMEDY = "Such as --space learning_rate=1e-4:0.1:log optimizer=adam,sgd."


def run_sweep(
    network: str,
    dataset: str | Dataset,
    *,
    say: Callable[[str], object] = print,
    **options: Any,
) -> Row:
    """Run trials until the study has enough of them, and return the contents of ``study.json``.

    Trials are ranked by validation accuracy; the test images are not used. The same call
    continues the study, and several processes may share one storage.

    Args:
        network, dataset: as in :func:`conformallayers.lab.training.train.train`.
        say: receives one line per trial.
        **options: fields of :class:`conformallayers.lab.options.SweepOptions`.
    """
    chosen, most = SweepOptions(**options), paper.EPOCHS[1]
    require_positive("sweep", chosen, "trials", "max_epochs", "validation")
    if chosen.max_epochs > most:
        remedy = "The paper's search space ends there."
        raise refusal("sweep --max-epochs", f"at most {most}", str(chosen.max_epochs), remedy)
    search = _Search(network, dataset, chosen)
    try:
        while search.done < chosen.trials:
            say(search.run_trial())
            search.write()
    except KeyboardInterrupt as stop:
        search.conclude()
        message = f"Interrupted: {search.done} trials kept. To go on, repeat the command."
        raise KeyboardInterrupt(message) from stop
    return search.conclude()


class _Search:
    """A study, the images its trials use, and the folder it writes to."""

    def __init__(self, network: str, dataset: str | Dataset, options: SweepOptions) -> None:
        how: Any = {"verify": options.verify, "where": "sweep"}
        source = find_source(dataset, options.size, options.data_root, **how)
        network, name = absolute(network), source.name
        self.config = make_config(
            network=network,
            dataset=name,
            epochs=options.max_epochs,
            seed=options.seed,
            threads=options.threads,
            **{**source.options, "source": source_hash(network)},
        )
        self.title = f"{self.config.network_name}-{self.config.dataset_name}"
        self.options, self.out = options, options.out or Path("results/sweep") / self.title
        own = parse_space(options.space, self.config)
        self.train_set, self.held_out = source.read().split(options.validation)
        if options.subset is not None:
            self.train_set = self.train_set.subset(options.subset)
        images = len(self.train_set.train_labels)
        self.space = {**fitting_space(name, images, options.max_epochs), **own}
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # an interrupt is not a failed trial
        names = {"network": network, "dataset": name}
        shown = {key: getattr(options, key) for key in _STUDY_OPTIONS}
        kept = {**names, **shown, "space": list(options.space)}
        kept |= {key: getattr(self.config, key) for key in ("pictures", "source")}
        self.study = _open_study(self.title, options.storage, self.out, kept)
        command = command_line(["sweep", network, name], {"trials": options.trials, **shown})
        counts = {"train": images, "validation": len(self.held_out.test_labels)}
        self.source = {**provenance(command), **names, "options": kept, "images": counts}

    @property
    def done(self) -> int:
        """The number of finished and pruned trials."""
        return len(self.study.get_trials(deepcopy=False, states=_DONE))

    def run_trial(self) -> str:
        """Train with the options of one more trial, and return a line about it."""
        trial = self.study.ask(self.space)
        accuracy = None
        try:
            accuracy = self._train(trial)
        except ConformalError as error:  # the loss is not finite
            trial.set_user_attr("reason", str(error).partition(" Lower")[0])
        except KeyboardInterrupt:
            self.study.tell(trial, state=TrialState.FAIL)
            raise
        state = TrialState.PRUNED if accuracy is None else TrialState.COMPLETE
        found = self.study.tell(trial, accuracy, state)
        setting = (
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in trial.params.items()
        )
        reached = found.intermediate_values
        shown = f"{100 * reached[max(reached)]:.2f} %" if reached else "no accuracy"
        line = f"trial {trial.number}: {state.name.lower()}, {shown} after {len(reached)} epochs"
        return f"{line}; {', '.join(setting)}"

    def _train(self, trial: Trial) -> float | None:
        """Return the last validation accuracy; None if the trial is pruned."""
        chosen = self.config.model_copy(update=trial.params)
        accuracy = 0.0
        for row in epoch_rows(chosen, self.train_set, self.held_out):
            accuracy = row["validation_accuracy"]
            trial.report(accuracy, row["epoch"])
            if trial.should_prune() and row["epoch"] < chosen.epochs:
                return None
        return accuracy

    def write(self) -> Row:
        """Write study.json, all trials with the best first, and return the record."""
        trials = [_row(trial) for trial in self.study.get_trials(deepcopy=False)]
        trials.sort(key=lambda row: -(row["validation_accuracy"] or 0))
        best = next((row for row in trials if row["state"] == "COMPLETE"), None)
        record = {**self.source, "best": best, "trials": trials}
        write_json(self.out / "study.json", record)
        return record

    def conclude(self) -> Row:
        """Write the record and the figure of the finished trials."""
        record = self.write()
        if record["best"] is not None:
            with ignored_warnings():  # of an experimental function, and of missing options
                from optuna.visualization.matplotlib import plot_parallel_coordinate

                axes = plot_parallel_coordinate(self.study, params=list(self.space))
            axes.set_title(self.title)
            drawn: Any = axes.figure
            figures.save(drawn, self.out, "figure")
        return record


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


def _open_study(name: str, storage: str | None, out: Path, options: Row) -> Study:
    make_folder("sweep --out", out)
    journal, most, eta = out / "journal.log", options["max_epochs"], paper.HYPERBAND["eta"]
    fewest = max(1, most // eta ** paper.HYPERBAND["s"])  # epochs before a trial may be pruned
    try:
        study = optuna.create_study(
            study_name=name,
            storage=storage or JournalStorage(JournalFileBackend(str(journal))),
            sampler=_Sampler(options["seed"]),
            pruner=HyperbandPruner(min_resource=fewest, max_resource=most, reduction_factor=eta),
            direction="maximize",
            load_if_exists=True,
        )
    except Exception as error:  # every storage backend has its own errors
        where = f"sweep, {journal}" if storage is None else "sweep --storage"
        remedy = "Name another --out, or an address such as sqlite:///study.db."
        raise refusal(where, "a storage of Optuna", first_line(error), remedy) from error
    before = study.user_attrs.get("options")
    if before is None:
        study.set_user_attr("options", options)
    else:
        remedy = f"Give the options of the study {name}, or name another --out."
        require_same("sweep", before, options, remedy)
    return study


class _Sampler(TPESampler):
    """TPE whose random numbers depend only on the seed and the number of the trial.

    A resumed study therefore draws the same trials as an uninterrupted one, and processes that
    share a study draw different ones.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        # TPESampler has no public way to seed it again. It keeps no state but its random numbers.
        numbers = np.random.SeedSequence([self._seed, trial.number])
        super().__init__(seed=int(numbers.generate_state(1)[0]))
        super().before_trial(study, trial)


def fitting_space(dataset: str, images: int, max_epochs: int) -> Space:
    """Return the space of a search: the paper's for its data sets, else one for this many training images.

    Examples:
        >>> fitting_space("mnist", 54000, 50)["learning_rate"]
        FloatDistribution(high=1.0, log=False, low=0.001, step=None)
        >>> fitting_space("/data/pets", 100, 50)["batch_size"]
        IntDistribution(high=100, log=True, low=8, step=1)
    """
    small = dataset not in paper.DATASETS or images < paper.BATCH_SIZES[1]
    low, high = BATCH_SIZES if small else paper.BATCH_SIZES
    rates = LEARNING_RATES if small else paper.LEARNING_RATES
    return {
        "batch_size": IntDistribution(min(low, images), min(high, images), log=small),
        "epochs": IntDistribution(min(paper.EPOCHS[0], max_epochs), max_epochs),
        "learning_rate": FloatDistribution(*rates, log=small),
        "optimizer": CategoricalDistribution(paper.OPTIMIZERS),
    }


def parse_space(texts: Iterable[str], config: TrainConfig) -> Space:
    """Read ``NAME=LOW:HIGH``, ``NAME=LOW:HIGH:log`` and ``NAME=VALUE,VALUE`` of options of train.

    Every bound and value is checked as an option of the search's configuration, whose epochs are the maximum.
    """
    known = [name for name in TrainConfig.model_fields if name not in (*_FIXED, *DERIVED)]
    space: Space = {}
    for text in texts:
        name, _, values = text.partition("=")
        require_choice("sweep --space", name := name.replace("-", "_"), known, _REMEDY)
        # Adam refuses a momentum, but a trial may draw another optimizer.
        usual = {**config.model_dump(), **({"optimizer": "sgd"} if name == "momentum" else {})}
        ends, log = values.removesuffix(":log"), values.endswith(":log")
        words = ends.split(":" if ":" in ends else ",")
        found: Any = [getattr(make_config(**{**usual, name: word}), name) for word in words]
        if name == "epochs" and max(found) > config.epochs:
            expected = f"at most {config.epochs} epochs, as --max-epochs says"
            raise refusal("sweep --space", expected, str(max(found)), "Give both.")
        try:
            if ":" not in values:
                space[name] = CategoricalDistribution(found)
            elif len(found) == 2 and all(isinstance(end, int) for end in found):
                space[name] = IntDistribution(found[0], found[1], log)
            else:
                space[name] = FloatDistribution(found[0], found[1], log)
        except (TypeError, ValueError) as error:
            raise refusal("sweep --space", _FORM, repr(text), _REMEDY) from error
    return space
