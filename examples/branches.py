"""Train branching networks with every activation on scikit-learn's digits; fold them, compare."""

from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import nn

import conformallayers as cl

images, labels = load_digits(return_X_y=True)
x = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16
y = torch.from_numpy(labels).long()
train, test = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).split([1347, 450])


def network(act: Callable[[], nn.Module]) -> nn.Module:
    """Build two activations, one of them in a residual block, with biases and a linear head."""
    block = cl.Residual(cl.Conv2d(8, 8, 3, padding=1, bias=True), act())
    features = cl.ConformalLayers(cl.Conv2d(1, 8, 3, bias=True), act(), block, cl.Scale(10.0))
    return nn.Sequential(features, nn.Flatten(), nn.Linear(288, 10))


activations: dict[str, Callable[[], nn.Module]] = {
    "ReSPro, published": lambda: cl.ReSPro("learned"),
    "ReSPro, projective": lambda: cl.ReSPro("learned", projective=True),
    "Gnomonic": lambda: cl.Gnomonic("learned"),
}
for name, activation in activations.items():
    torch.manual_seed(0)
    model = network(activation)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):  # epochs
        for rows in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    folded = cl.fold(model, (1, 8, 8))
    with torch.no_grad():
        accuracy = (folded(x[test]).argmax(1) == y[test]).float().mean()
    error = cl.fold_error(model, folded, x[test])
    print(f"{name}: accuracy {accuracy:.1%} folded, relative error {error:.0e}")
print(str(folded.explain()).splitlines()[-1])
