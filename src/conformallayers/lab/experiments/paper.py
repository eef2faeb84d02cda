"""Settings and results that the paper reports, and settings with better results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DATASETS = ("mnist", "fashion-mnist", "cifar10")
NETWORKS = {1: ("BaseLinearNet", "BaseReLUNet", "BaseReSProNet"), 2: ("LeNet", "LeNetCL")}

# The supplement's search space; the bounds are included.
BATCH_SIZES, EPOCHS, LEARNING_RATES = (2048, 4096), (10, 50), (0.001, 1.0)
OPTIMIZERS = ("adam", "rmsprop")
SETTING = ("batch_size", "epochs", "learning_rate", "optimizer")
HYPERBAND = {"max_iter": 50, "s": 2, "eta": 3}

# Experiments III and IV, quoted from the text.
CLAIMS = {
    "experiment 3": "For k = 1, DkNet is almost 6× faster than DkNetCL. For k ≥ 9, the ConformalLayers-based CNN "
    "becomes more profitable. Constant inference times of DkNetCL; DkNet's grow linearly with k.",
    "experiment 4": "On a GPU with 4 GB, D3ModNet holds up to 14K images, D3ModNetCL up to 89K. "
    "D3ModNetCL is about 1.16 times faster.",
}


@dataclass(frozen=True)
class Cell:
    """One cell of Tables I and II, with the setting of the supplement."""

    network: str
    dataset: str
    accuracy: float
    batch_size: int
    epochs: int
    learning_rate: float
    optimizer: str

    @property
    def setting(self) -> dict[str, Any]:
        """The options of a run with the paper's setting."""
        return {name: getattr(self, name) for name in SETTING}


CELLS = (
    Cell("BaseLinearNet", "mnist", 0.9212, 2868, 44, 0.02039, "adam"),
    Cell("BaseLinearNet", "fashion-mnist", 0.8219, 3111, 15, 0.05305, "adam"),
    Cell("BaseLinearNet", "cifar10", 0.4050, 2198, 41, 0.09827, "adam"),
    Cell("BaseReLUNet", "mnist", 0.9724, 2838, 50, 0.090331, "adam"),
    Cell("BaseReLUNet", "fashion-mnist", 0.8590, 3277, 48, 0.08607, "adam"),
    Cell("BaseReLUNet", "cifar10", 0.4947, 3677, 21, 0.01, "rmsprop"),
    Cell("BaseReSProNet", "mnist", 0.9429, 2429, 50, 0.7699, "adam"),
    Cell("BaseReSProNet", "fashion-mnist", 0.8401, 2339, 45, 0.5601, "adam"),
    Cell("BaseReSProNet", "cifar10", 0.4186, 3056, 19, 0.4542, "adam"),
    # The supplement searches up to 50 epochs and then trains LeNet and LeNetCL for 200.
    Cell("LeNet", "mnist", 0.9887, 2979, 200, 0.004722, "rmsprop"),
    Cell("LeNet", "fashion-mnist", 0.9013, 2444, 200, 0.012, "adam"),
    Cell("LeNet", "cifar10", 0.5905, 2317, 200, 0.00159, "rmsprop"),
    Cell("LeNetCL", "mnist", 0.9733, 2088, 200, 0.02, "adam"),
    Cell("LeNetCL", "fashion-mnist", 0.8912, 2763, 200, 0.02302, "adam"),
    Cell("LeNetCL", "cifar10", 0.5327, 3595, 200, 0.01991, "adam"),
)

# Settings other than the paper's: options of a run that override those of a cell; a training preset replaces
# the supplement's options. An entry here is all that a new --variant NAME needs.
VARIANTS: dict[str, dict[str, Any]] = {
    # The text says stride 1, but the 7200 features in its figure imply stride 2.
    "stride1": {"pool_stride": 1},
    # Conformal networks reach the paper's ReLU networks.
    "modern": {"training_preset": "modern"},
}
