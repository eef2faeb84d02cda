"""Train a conformal network on scikit-learn's digits, fold it, and compare the two."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import conformallayers as cl

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16
y = torch.from_numpy(labels).long()
train, test = torch.randperm(len(x)).split([1347, 450])

model = nn.Sequential(
    cl.ConformalLayers(
        cl.Conv2d(1, 8, 3, padding=1),
        cl.ReSPro("spectral"),
        cl.Conv2d(8, 8, 3, padding=1),
        cl.ReSPro("spectral"),
    ),
    nn.Flatten(),
    nn.Linear(512, 64),  # folds into the matrix as well
    nn.ReLU(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(10):  # epochs
    for rows in train[torch.randperm(len(train))].split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()

folded = cl.fold(model, (1, 8, 8))  # a new module; the model stays as it is
with torch.no_grad():
    accuracy = (folded(x[test]).argmax(1) == y[test]).float().mean()
print(folded.explain())
print(f"accuracy of the folded network: {accuracy:.1%}")
print(f"relative error of the fold: {cl.fold_error(model, folded, x[test]):.1e}")
