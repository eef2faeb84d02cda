"""The numbers of the paper as printed, in settings that train accepts."""

from __future__ import annotations

import pytest

from conformallayers.lab.experiments import paper
from conformallayers.lab.training.config import make_config

# Copied from the source of the paper and of its supplement.
PRINTED = {
    "BaseLinearNet": r"""92.12\% & 82.19\% & 40.50\%
        Batch size & 2868 & 3111 & 2198 \\
        Epochs & 44 & 15 & 41 \\
        Learning rate & 0.02039 & 0.05305 & 0.09827 \\
        Optimizer & Adam & Adam & Adam \\""",
    "BaseReLUNet": r"""97.24\% & 85.90\% & 49.47\%
        Batch size & 2838 & 3277 & 3677 \\
        Epochs & 50 & 48 & 21 \\
        Learning rate & 0.090331 & 0.08607 & 0.01 \\
        Optimizer & Adam & Adam & RMSprop \\""",
    "BaseReSProNet": r"""94.29\% & 84.01\% & 41.86\%
        Batch size & 2429 & 2339 & 3056\\
        Epochs & 50 & 45 & 19\\
        Learning rate & 0.7699 & 0.5601 & 0.4542 \\
        Optimizer & Adam & Adam & Adam \\""",
    "LeNet": r"""98.87\% & 90.13\% & 59.05\%
        Batch size & 2979 & 2444 & 2317 \\
        Epochs$^\dagger$ & 200 & 200 & 200 \\
        Learning rate & 0.004722 & 0.012 & 0.00159 \\
        Optimizer & RMSprop & Adam & RMSprop \\""",
    "LeNetCL": r"""97.33\% & 89.12\% & 53.27\%
        Batch size & 2088 & 2763 & 3595 \\
        Epochs$^\dagger$ & 200 & 200 & 200 \\
        Learning rate & 0.02 & 0.02302 & 0.01991\\
        Optimizer & Adam & Adam & Adam \\""",
}


def test_cells_are_those_of_the_paper() -> None:
    assert len(paper.CELLS) == 15
    for name, text in PRINTED.items():
        first, *others = text.replace("\\", "").replace("%", "").splitlines()
        columns = [[float(cell) / 100 for cell in first.split("&")]]
        columns += [[cell.strip().lower() for cell in line.split("&")[1:]] for line in others]
        cells = [cell for cell in paper.CELLS if cell.network == name]
        assert tuple(cell.dataset for cell in cells) == paper.DATASETS
        for cell, (accuracy, *setting) in zip(cells, zip(*columns, strict=True), strict=True):
            assert cell.accuracy == pytest.approx(accuracy, abs=1e-12)
            assert [str(value) for value in cell.setting.values()] == setting
            make_config(network=cell.network, dataset=cell.dataset, **cell.setting)
