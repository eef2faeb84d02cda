"""Search for hyperparameters as in the paper, TPE with Hyperband, by validation accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import optuna
from matplotlib.figure import Figure
from optuna.pruners import HyperbandPruner
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import MaxTrialsCallback, Study
from optuna.trial import FrozenTrial, Trial, TrialState

from ...errors import ConformalError, first_line, refusal
from ...utils.files import write_json
from ..checks import command_line, make_folder, require_positive, require_same
from ..data.datasets import Dataset
from ..data.sources import find_source
from ..report import figures
from ..training.config import make_config
from ..training.own_networks import absolute, source_hash
from ..training.train import epoch_rows
from . import paper
from .options import SweepOptions
from .records import Row, provenance
from .search_space import Range, Space, draw, fitting_space, parse_space

NAME = "study"
BEST = 10  # trials in the figure
_DONE = (TrialState.COMPLETE, TrialState.PRUNED)
_OPTIONS = "options"  # user attribute of a study that holds its options
_TRAIN_OPTIONS = ("preset", "size", "alpha", "projective", "seed", "threads")
_STUDY_OPTIONS = (
    *("max_epochs", "subset", "validation", "alpha", "projective", "seed"),
    *("preset", "size"),
)
_WIDE = 100.0  # a range whose ends differ by this factor has a logarithmic axis


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
        **options: fields of :class:`conformallayers.lab.experiments.options.SweepOptions`.
    """
    chosen, most = SweepOptions(**options), paper.EPOCHS[1]
    require_positive("sweep", chosen, "trials", "max_epochs", "validation")
    if chosen.max_epochs > most:
        remedy = "The paper's search space ends there."
        raise refusal("sweep --max-epochs", f"at most {most}", str(chosen.max_epochs), remedy)
    search = _Search(network, dataset, chosen)

    def after(study: Study, trial: FrozenTrial) -> None:
        say(_line(trial))
        search.write()

    try:
        if search.done < chosen.trials:
            until = MaxTrialsCallback(chosen.trials, states=_DONE)
            search.study.optimize(search.objective, callbacks=[after, until])
    except KeyboardInterrupt as stop:
        search.conclude()
        message = f"Interrupted: {search.done} trials kept. To go on, repeat the command."
        raise KeyboardInterrupt(message) from stop
    return search.conclude()


class _Search:
    """A study, the images its trials use, and the folder it writes to."""

    def __init__(self, network: str, dataset: str | Dataset, options: SweepOptions) -> None:
        source = find_source(
            dataset, options.size, options.data_root, verify=options.verify, where="sweep"
        )
        network, name = absolute(network), source.name
        chosen = {key: getattr(options, key) for key in _TRAIN_OPTIONS}
        self.config = make_config(
            network=network,
            dataset=name,
            epochs=options.max_epochs,
            **{**chosen, **source.options, "source": source_hash(network)},
        )
        study = f"{self.config.network_name}-{self.config.dataset_name}"
        kept = {key: getattr(options, key) for key in _STUDY_OPTIONS}
        kept["space"] = list(options.space) or None
        kept |= {key: getattr(self.config, key) for key in ("pictures", "source")}
        self.options, self.out = options, options.out or Path("results/sweep") / study
        own = parse_space(options.space, self.config)
        self.train_set, self.held_out = source.read().split(options.validation)
        if options.subset is not None:
            self.train_set = self.train_set.subset(options.subset)
        images = len(self.train_set.train_labels)
        self.space = {**fitting_space(name, images, options.max_epochs), **own}

        optuna.logging.set_verbosity(optuna.logging.ERROR)  # an interrupt is not a failed trial
        names = {"network": network, "dataset": name}
        self.study = _open_study(study, options.storage, self.out, {**names, **kept})
        shown = {key: getattr(options, key) for key in ("trials", *_STUDY_OPTIONS, "space")}
        self.source = {
            **provenance(command_line(["sweep", network, name], shown)),
            **names,
            "options": kept,
            "images": {"train": images, "validation": len(self.held_out.test_labels)},
            "space": {
                key: vars(values) if isinstance(values, Range) else list(values)
                for key, values in self.space.items()
            },
        }

    @property
    def done(self) -> int:
        """The number of finished and pruned trials."""
        return len(self.study.get_trials(deepcopy=False, states=_DONE))

    def objective(self, trial: Trial) -> float:
        """Train with the options of a trial, and return the last validation accuracy."""
        chosen = self.config.model_copy(update=draw(trial, self.space))
        accuracy = 0.0
        try:
            for row in epoch_rows(chosen, self.train_set, self.held_out):
                accuracy = row["validation_accuracy"]
                trial.report(accuracy, row["epoch"])
                if trial.should_prune() and row["epoch"] < chosen.epochs:
                    raise optuna.TrialPruned
        except ConformalError as error:  # the loss is not finite
            trial.set_user_attr("reason", str(error).partition(" Lower")[0])
            raise optuna.TrialPruned from error
        return accuracy

    def write(self) -> Row:
        """Write study.json, and return the record."""
        record = {**self.source, "finished": self.done >= self.options.trials}
        record |= _summary(self.study)
        write_json(self.out / f"{NAME}.json", record)
        return record

    def conclude(self) -> Row:
        """Write the record and the figure of the best trials."""
        record = self.write()
        best = [trial for trial in record["trials"] if trial["state"] == "COMPLETE"][:BEST]
        if best:
            title = f"{self.config.network_name}, {self.config.dataset_name}"
            figures.save(parallel_coordinates(best, title, self.space), self.out, "figure")
        return record


def _open_study(name: str, storage: str | None, out: Path, options: Mapping[str, Any]) -> Study:
    make_folder("sweep --out", out)
    journal, most, eta = out / "journal.log", options["max_epochs"], paper.HYPERBAND["eta"]
    fewest = max(1, most // eta ** paper.HYPERBAND["s"])  # epochs before a trial may be pruned
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
    except Exception as error:  # every storage backend has its own errors
        where = f"sweep, {journal}" if storage is None else "sweep --storage"
        remedy = "Name another --out, or an address such as sqlite:///study.db."
        raise refusal(where, "a storage of Optuna", first_line(error), remedy) from error
    before = study.user_attrs.get(_OPTIONS)
    if before is None:
        study.set_user_attr(_OPTIONS, dict(options))
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


def _summary(study: Study) -> Row:
    """Return all trials, the best first, those without a final accuracy last."""
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


def parallel_coordinates(trials: Sequence[Row], title: str, space: Space) -> Figure:
    """Draw finished trials, rows of study.json: a smooth curve through an axis for each option and the accuracy."""
    rows = sorted(trials, key=lambda row: float(row["validation_accuracy"]))
    shares = [100 * row["validation_accuracy"] for row in rows]
    margin = max(0.05, 0.05 * (shares[-1] - shares[0]))
    ends = {**space, "accuracy (%)": Range(shares[0] - margin, shares[-1] + margin)}
    values = [
        [row[name] for name in space] + [share] for row, share in zip(rows, shares, strict=True)
    ]
    last = len(ends) - 1
    steps = np.linspace(0, last, 50 * last + 1)
    left = np.minimum(steps.astype(int), last - 1)
    bend = (1 - np.cos(np.pi * (steps - left))) / 2
    with figures.styled(max(6.0, 1.8 * len(ends)), 4.2) as (figure, axes):
        for row in values:
            heights = [_height(value, end) for value, end in zip(row, ends.values(), strict=True)]
            curve = np.take(heights, left) * (1 - bend) + np.take(heights, left + 1) * bend
            axes.plot(steps, curve, color=matplotlib.colormaps["cividis"](heights[-1]), linewidth=2)
        for place, end in enumerate(ends.values()):
            axes.axvline(place, color="#333333", linewidth=1)
            for value in (end.low, end.high) if isinstance(end, Range) else end:
                text = f"{value:.3g}" if isinstance(value, float) else str(value)
                at = (place, _height(value, end))
                axes.annotate(text, at, (-4, 0), textcoords="offset points", ha="right")
        axes.set(xlim=(-0.45, last + 0.5), ylim=(-0.06, 1.06), yticks=[])
        axes.set_xticks(range(len(ends)), [name.replace("_", " ") for name in ends])
        axes.spines[:].set_visible(False)
        axes.set_title(f"{title}: the best {len(rows)} of the search")
    return figure


def _height(value: Any, ends: Range | tuple[Any, ...]) -> float:
    """Return the position of a value on its axis, from 0 to 1.

    Examples:
        >>> _height(0.1, Range(0.01, 1.0)), _height("sgd", ("adam", "sgd"))
        (0.5, 0.75)
    """
    if not isinstance(ends, Range):
        return (ends.index(value) + 0.5) / len(ends)
    # Good learning rates crowd at the lower end of a wide range, however it was searched.
    scale: Any = np.log if ends.high >= _WIDE * ends.low > 0 else np.asarray
    low, high, place = scale([ends.low, ends.high, value])
    return float((place - low) / ((high - low) or 1.0))


def _line(trial: FrozenTrial) -> str:
    setting = ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in trial.params.items()
    )
    reached = trial.intermediate_values
    shown = f"{100 * reached[max(reached)]:.2f} %" if reached else "no accuracy"
    return f"trial {trial.number}: {trial.state.name.lower()}, {shown} after {len(reached)} epochs; {setting}"
